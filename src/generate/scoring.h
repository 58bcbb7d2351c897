// Log-probabilities of given tokens, as the trainer computes them.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "data/sampling.h"
#include "kernels/numerics.h"
#include "model/parameters.h"
#include "trainer/backend.h"

namespace leeway {

struct ScoringOptions {
  Numerics numerics = Numerics::exact;  // on the CPU
  int threads = 0;                      // 0: one per core
  MakeTrainingBackend backend;          // empty: the CPU, without the memory that training needs
  int64_t top_logprobs = 0;             // most likely tokens for each value; on the CPU alone
};

// For each list, log p(token t+1 | tokens up to t) in float32, one value less than it has tokens.
// The lists are not empty and fit the model (token_lists.h). `on_pass` gets the number of tokens
// done. `top`, unless null, receives for each list the most likely tokens of each value, largest
// first, as many as options.top_logprobs says or the vocabulary has. Throws Error "tokens[i][t]:
// .." for a value that is not finite.
std::vector<std::vector<float>> score_tokens(const Parameters& parameters,
                                             const std::vector<std::vector<int32_t>>& lists,
                                             const ScoringOptions& options,
                                             const std::function<void(size_t done)>& on_pass,
                                             std::vector<std::vector<TokenLogprob>>* top = nullptr);

}  // namespace leeway
