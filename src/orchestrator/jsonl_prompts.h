// Files of prompts, one JSON object a line, and which of them are held out: what environments that
// read prompts share.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "orchestrator/environment.h"
#include "text/renderers/json_value.h"

namespace leeway {

struct JsonlPrompt {
  std::vector<Message> messages;  // not empty; the last is not the assistant's
  std::string demonstration;      // a reply; empty: none
  std::string kept;               // what the environment wants of the line
};

struct JsonlReader {
  std::string prompt_key;                       // a string or a list of messages
  std::vector<std::string> demonstration_keys;  // of which a line has at most one: a string
  // Gives JsonlPrompt::kept of a line's object. Throws Error that need not say which line it is.
  std::function<std::string(const JsonValue& object)> keep;
};

// The member `key` of a line. Throws Error with the keys there are; `named_by` is the key of the
// configuration that asks for it.
const JsonValue& jsonl_member(const JsonValue& object, const std::string& key,
                              const char* named_by);

struct JsonlPrompts {
  std::vector<JsonlPrompt> train, held_out;
  bool needs_renderer = false;  // a prompt is more than one user message

  const std::vector<JsonlPrompt>& of(Split split) const {
    return split == Split::train ? train : held_out;
  }
  // Messages and demonstration; throws nothing, `index` must be below the size.
  Example example(Split split, uint64_t index) const;
};

// A prompt is known by the `id` of its line, a string or a number, or by the whole line: what is
// the same is on the same side, and lines with the same text but other keys are two prompts.
//
// All of `data`, one prompt in 8 held out by what it is known by (one on each side where there are
// two); or with `eval_data` all of that. Throws Error with file and line for a line that cannot be
// used, for a file without any, and for a prompt that is in both files.
JsonlPrompts read_jsonl_prompts(const std::string& data, const std::string& eval_data,
                                const JsonlReader& reader);

}  // namespace leeway
