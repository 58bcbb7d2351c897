// The small files beside a model's weights: how it is sampled and where text begins and ends.
//
// Keys that nothing here stands for are ignored, since these files hold settings of other programs
// too; null counts as absent.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/sampling.h"

namespace leeway {

// generation_config.json; empty where the file or the key is missing.
struct GenerationConfig {
  std::optional<float> temperature, top_p, min_p;
  std::optional<int64_t> top_k, max_new_tokens;
  std::vector<int32_t> eos_token_id;  // a number or a list in the file
  // Settings that change what is drawn and that nothing here does, as "repetition_penalty 1.05".
  std::vector<std::string> not_applied;
};

// `"do_sample": false` is temperature 0. Throws Error naming the file, the key and the value for
// what is malformed or out of range.
GenerationConfig read_generation_config(const std::string& folder);

// tokenizer_config.json; the same rules.
struct TokenizerConfig {
  std::optional<bool> add_bos_token;
  std::string bos_token, eos_token;  // a string, or an object with "content", in the file
};
TokenizerConfig read_tokenizer_config(const std::string& folder);

// The tokens that a tokenizer.json puts in front of a text by its post_processor, by their
// spelling. Empty where it adds none.
std::vector<std::string> tokens_before_text(const std::string& tokenizer_file);

}  // namespace leeway
