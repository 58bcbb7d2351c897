#include "orchestrator/generated_environment.h"

#include <fmt/format.h>

#include "leeway/error.h"
#include "orchestrator/split.h"
#include "orchestrator/verifiers.h"

namespace leeway {
namespace {

// Far more than a split of one prompt in 8 ever needs: only an empty split exhausts it.
constexpr int kMostDraws = 10'000;

class GeneratedEnvironment : public Environment {
 public:
  GeneratedEnvironment(Generator generator, uint64_t seed)
      : generator_(std::move(generator)), seed_(seed) {
    for (const Split split : {Split::train, Split::held_out}) example(split, 0);
  }

  std::optional<uint64_t> size(Split) const override { return std::nullopt; }

  Example example(Split split, uint64_t index) const override {
    const bool held_out = split == Split::held_out;
    Rng rng(mixed_seed({seed_, held_out, index}));
    for (int draw = 0; draw < kMostDraws; ++draw) {
      Example example = generator_.make(rng);
      if (is_held_out(example.messages.front().content) != held_out) continue;
      example.index = index;
      return example;
    }
    throw Error(fmt::format("there are too few prompts with {}: none is left {}; allow for more",
                            generator_.keys, held_out ? "to be held out" : "to train on"));
  }

  std::unique_ptr<Episode> start(const Example& example, const EpisodePlace&) const override {
    return generator_.start(example);
  }

  bool needs_renderer() const override { return generator_.needs_renderer; }

 private:
  Generator generator_;
  uint64_t seed_;
};

class ExactEpisode : public Episode {
 public:
  explicit ExactEpisode(std::string answer) : answer_(std::move(answer)) {}

  Turn respond(const Reply& reply) override {
    Turn turn;
    turn.rewards = {{"exact", 1.0, exact_reply(reply, answer_) ? 1.0 : 0.0}};
    return turn;
  }

 private:
  std::string answer_;
};

}  // namespace

std::unique_ptr<Environment> make_generated_environment(Generator generator, uint64_t seed) {
  return std::make_unique<GeneratedEnvironment>(std::move(generator), seed);
}

std::unique_ptr<Episode> make_exact_episode(std::string answer) {
  return std::make_unique<ExactEpisode>(std::move(answer));
}

}  // namespace leeway
