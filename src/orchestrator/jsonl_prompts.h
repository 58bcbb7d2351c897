// Files of prompts, one JSON object per line, and which of them are held out; shared by
// environments that read prompts.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "orchestrator/environment.h"
#include "text/renderers/json_value.h"

namespace leeway {

struct JsonlPrompt {
  std::vector<Message> messages;  // not empty; the last is not the assistant's
  std::string tools_json;         // a list of tool schemas; empty: none
  std::string demonstration;      // a reply; empty: none
  std::string kept;               // what the environment keeps of the line
};

struct JsonlReader {
  std::string prompt_key;                       // a string or a list of messages
  std::vector<std::string> demonstration_keys;  // of which a line has at most one: a string
  // Extracts JsonlPrompt::kept from a line's object. May throw Error, which need not name the line.
  std::function<std::string(const JsonValue& object)> keep;
};

// The member `key` of a line. Throws Error listing the existing keys; `named_by` is the
// configuration key that names it.
const JsonValue& jsonl_member(const JsonValue& object, const std::string& key,
                              const char* named_by);

struct JsonlPrompts {
  std::vector<JsonlPrompt> train, held_out;
  bool needs_renderer = false;  // a prompt is more than one user message, or has tools

  const std::vector<JsonlPrompt>& of(Split split) const {
    return split == Split::train ? train : held_out;
  }
  // Messages, tools and demonstration; throws nothing, `index` must be below the size.
  Example example(Split split, uint64_t index) const;
};

// A prompt is identified by the `id` of its line (a string or a number), or by the whole line:
// identical prompts are on the same side, and lines with the same text but other keys are two
// prompts.
//
// The key `tools` of a line is a list of tool schemas as OpenAI writes them, {"type": "function",
// "function": {"name": ..}} or the inner object alone, with different names.
//
// Reads all of `data`; one prompt in 8 is held out by its identity (at least one on each side if
// there are two), or all of `eval_data` if given. Throws Error with file and line for an invalid
// line, a file without prompts, and a prompt that is in both files.
JsonlPrompts read_jsonl_prompts(const std::string& data, const std::string& eval_data,
                                const JsonlReader& reader);

}  // namespace leeway
