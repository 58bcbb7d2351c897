#include "server/prompt_scores.h"

#include <exception>
#include <utility>

#include "generate/scoring.h"

namespace leeway {

void PromptScores::start(std::shared_ptr<const PolicySnapshot> weights,
                         std::vector<std::vector<int32_t>> prompts, int64_t top, Done done) {
  ++open_;
  worker_.post([this, weights = std::move(weights), prompts = std::move(prompts), top,
                done = std::move(done)] {
    std::vector<PromptScore> scores;
    std::string failure;
    try {
      std::vector<std::vector<TokenLogprob>> likely;
      std::vector<std::vector<float>> values = score_tokens(
          weights->host(), prompts, {.threads = threads_, .top_logprobs = top}, nullptr, &likely);
      for (size_t i = 0; i < values.size(); ++i) {
        scores.push_back({std::move(values[i]), std::move(likely[i])});
      }
    } catch (const std::exception& error) {
      failure = error.what();
    }
    post_([this, done, scores = std::move(scores), failure] {
      --open_;
      done(scores, failure);
    });
  });
}

}  // namespace leeway
