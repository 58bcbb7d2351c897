// Log-probabilities for people and for programs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "text/tokenizer.h"

namespace leeway {

// Lists of ids: {"logprobs": [[null, ..]..]}; the first token of a list has none.
std::string scores_json(const std::vector<std::vector<float>>& scores);

// A text and its scores.
struct ScoredText {
  std::vector<int32_t> ids;     // at least one
  std::vector<float> logprobs;  // of ids[1] and on
  // Of a conversation: 1 where the model produces the token, one entry per id. Empty: a plain text.
  std::vector<uint8_t> sampled;
};

// A row per token, then the total and the perplexity; of a conversation also those of what the
// model produces, which is marked.
std::string scored_table(const ScoredText& text, const Tokenizer& tokenizer);
// {"tokens", "text", "logprobs", "total", "perplexity"}; of a conversation also "mask" and
// "sampled":
// {"tokens", "total", "perplexity"}. A perplexity of no token is null.
std::string scored_json(const ScoredText& text, const Tokenizer& tokenizer);

}  // namespace leeway
