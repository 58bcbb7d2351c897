// Log-probabilities of the tokens of prompts, as a trainer computes them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/sampling.h"
#include "model/policy_snapshot.h"
#include "server/worker.h"

namespace leeway {

struct PromptScore {
  // log p(token t+1 | tokens up to t), one value less than the prompt has tokens.
  std::vector<float> logprobs;
  std::vector<TokenLogprob> top;  // the most likely ones for each value, the same number of them

  // The first `most` of them for one value.
  std::span<const TokenLogprob> top_of(size_t value, int64_t most) const {
    const size_t count = logprobs.empty() ? 0 : top.size() / logprobs.size();
    return std::span(top).subspan(value * count, std::min(count, static_cast<size_t>(most)));
  }
};

// On the server's thread. They are computed on a thread of its own, on the CPU in float32, with
// the weights that are current at the call.
class PromptScores {
 public:
  // `post` runs a function on the server's thread. `threads` as in EngineOptions.
  PromptScores(std::function<void(std::function<void()>)> post, int threads)
      : post_(std::move(post)), threads_(threads) {}

  // Of each prompt; or why there are none.
  using Done =
      std::function<void(const std::vector<PromptScore>& scores, const std::string& failure)>;
  // `top`: the most likely tokens for each value, 0 to kMostTopLogprobs.
  void start(std::shared_ptr<const PolicySnapshot> weights,
             std::vector<std::vector<int32_t>> prompts, int64_t top, Done done);

  bool busy() const { return open_ > 0; }

 private:
  std::function<void(std::function<void()>)> post_;
  int threads_;
  int64_t open_ = 0;
  Worker worker_;
};

}  // namespace leeway
