// The rules for splitting text into words, by the names that GGUF files have for them
// (tokenizer.ggml.pre) and as tokenizer.json spells them.
#pragma once

#include <rapidjson/document.h>

#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace leeway {

struct PreTokenizerName {
  const char* name;
  std::vector<std::string> patterns;  // each splits what the one before it left
  bool nfc = false;                   // the family normalizes text first
  bool ignore_merges = false;
  bool begins = false;  // a text begins with the begin token unless the file says otherwise
};

// Null for a name that is not known.
const PreTokenizerName* find_pre_tokenizer(std::string_view name);
// "gpt-2, llama-bpe, ..": for messages.
std::string pre_tokenizer_names();

// The `pre_tokenizer` of a tokenizer.json, as a value in `json`.
void write_pre_tokenizer(JsonWriter& json, const PreTokenizerName& rule);

// The rule that a tokenizer.json has, by its `pre_tokenizer` and `ignore_merges`; null if it has no
// name here.
const PreTokenizerName* pre_tokenizer_of(const rapidjson::Value& tokenizer);

}  // namespace leeway
