// Log-probabilities of the tokens of prompts, as a trainer computes them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model/policy_snapshot.h"
#include "server/worker.h"

namespace leeway {

// On the server's thread. They are computed on a thread of its own, on the CPU in float32, with
// the weights that are current at the call.
class PromptScores {
 public:
  // `post` runs a function on the server's thread. `threads` as in EngineOptions.
  PromptScores(std::function<void(std::function<void()>)> post, int threads)
      : post_(std::move(post)), threads_(threads) {}

  // For each prompt log p(token t+1 | tokens up to t), one value less than it has tokens; or why
  // there are none.
  using Done = std::function<void(const std::vector<std::vector<float>>& scores,
                                  const std::string& failure)>;
  void start(std::shared_ptr<const PolicySnapshot> weights,
             std::vector<std::vector<int32_t>> prompts, Done done);

  bool busy() const { return open_ > 0; }

 private:
  std::function<void(std::function<void()>)> post_;
  int threads_;
  int64_t open_ = 0;
  Worker worker_;
};

}  // namespace leeway
