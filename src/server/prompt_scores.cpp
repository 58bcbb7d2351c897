#include "server/prompt_scores.h"

#include <exception>
#include <utility>

#include "generate/scoring.h"

namespace leeway {

void PromptScores::start(std::shared_ptr<const PolicySnapshot> weights,
                         std::vector<std::vector<int32_t>> prompts, Done done) {
  ++open_;
  worker_.post(
      [this, weights = std::move(weights), prompts = std::move(prompts), done = std::move(done)] {
        std::vector<std::vector<float>> scores;
        std::string failure;
        try {
          scores = score_tokens(weights->host(), prompts, {.threads = threads_}, nullptr);
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
