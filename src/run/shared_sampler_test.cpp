// One sampler for training and evaluation, and the chat format that each of them uses.
#include "run/shared_sampler.h"

#include <gtest/gtest.h>

#include <deque>

#include "orchestrator/rollouts.h"
#include "orchestrator/steady_clock.h"
#include "run/policy_evaluation.h"
#include "run/test_support.h"

namespace leeway {
namespace {

// Answers every request with the same text, in the order of `answer` or of submission.
class ScriptedSampler : public Sampler {
 public:
  explicit ScriptedSampler(std::vector<int32_t> reply) : reply_(std::move(reply)) {}
  int64_t submit(Request request) override {
    prompts.push_back(request.prompt);
    for (int64_t sample = 0; sample < request.samples; ++sample) {
      SampledSequence result{.request = next_, .sample = sample, .ids = reply_};
      result.raw_logprobs.assign(reply_.size(), -0.5f);
      result.processed_logprobs = result.raw_logprobs;
      result.versions.assign(reply_.size(), version);
      results_.push_back(std::move(result));
    }
    return next_++;
  }
  void cancel(int64_t request) override { cancelled.push_back(request); }
  std::vector<SampledSequence> poll(double) override {
    std::vector<SampledSequence> out;
    if (results_.empty()) return out;
    out.push_back(std::move(results_.front()));
    results_.pop_front();
    return out;
  }
  void update_weights(std::shared_ptr<const PolicySnapshot>, PolicyVersion to) override {
    version = to;
  }

  std::vector<std::vector<int32_t>> prompts;
  std::vector<int64_t> cancelled;
  PolicyVersion version = 0;

 private:
  std::vector<int32_t> reply_;
  int64_t next_ = 0;
  std::deque<SampledSequence> results_;
};

TEST(SharedSampler, EachUserGetsItsOwnResultsWhicheverOfThemPolls) {
  SteadyClock clock;
  ScriptedSampler sampler({7});
  SharedSampler shared(sampler, 3, clock);
  EXPECT_EQ(shared.version(), 3);
  std::map<int64_t, int64_t> trained, evaluated;  // samples by request
  const int64_t training = shared.training().submit({.prompt = {1}, .samples = 3});
  const int64_t evaluation = shared.evaluation().submit({.prompt = {2}, .samples = 2});
  const int64_t unwanted = shared.training().submit({.prompt = {3}, .samples = 2});
  // The samples of training come first and are kept.
  for (const SampledSequence& result : shared.evaluation().poll(60.0)) ++evaluated[result.request];
  EXPECT_EQ(evaluated, (std::map<int64_t, int64_t>{{evaluation, 1}}));
  shared.training().cancel(unwanted);
  EXPECT_EQ(sampler.cancelled, std::vector<int64_t>{unwanted});
  for (int turn = 0; turn < 10; ++turn) {
    for (const SampledSequence& result : shared.training().poll(0.0)) ++trained[result.request];
    for (const SampledSequence& result : shared.evaluation().poll(0.0)) ++evaluated[result.request];
  }
  EXPECT_EQ(trained, (std::map<int64_t, int64_t>{{training, 3}}));
  EXPECT_EQ(evaluated, (std::map<int64_t, int64_t>{{evaluation, 2}}));
  shared.evaluation().update_weights(nullptr, 4);
  EXPECT_EQ(shared.version(), 4);
  EXPECT_EQ(sampler.version, 4);
}

// Has a turn with thinking behind it, asks one question more, then rewards.
class TwoQuestions final : public Environment {
 public:
  std::optional<uint64_t> size(Split) const override { return 2; }
  Example example(Split, uint64_t index) const override {
    Example example;
    example.index = index;
    Message answer;
    answer.role = Role::assistant;
    answer.reasoning = "hm";
    answer.content = "no";
    example.messages = {user("first"), answer, user("second")};
    return example;
  }
  std::unique_ptr<Episode> start(const Example&, const EpisodePlace&) const override {
    return std::make_unique<Asking>();
  }
  bool needs_renderer() const override { return true; }

 private:
  static Message user(const std::string& text) {
    Message message;
    message.role = Role::user;
    message.content = text;
    return message;
  }
  class Asking final : public Episode {
   public:
    Turn respond(const Reply&) override {
      if (std::exchange(asked_, true)) return {.rewards = {{.name = "end", .value = 1.0}}};
      return {.kind = Turn::Kind::messages, .messages = {user("third")}};
    }

   private:
    bool asked_ = false;
  };
};

RunSetup thinking_setup(const Catalog& catalog, const std::string& folder,
                        const std::vector<std::string>& flags) {
  std::vector<std::string> sets = {"orchestrator.renderer.name=qwen3", "model.vocab_size=320",
                                   "model.max_position_embeddings=512", "eval.greedy=false",
                                   "eval.prompts=1"};
  sets.insert(sets.end(), flags.begin(), flags.end());
  RunSetup setup(tiny_config(catalog, folder, sets));
  std::vector<EnvironmentMix::Member> members;
  members.push_back({.id = setup.environment_ids.at(0),
                     .weight = 1.0,
                     .environment = std::make_unique<TwoQuestions>()});
  setup.environments = std::make_unique<EnvironmentMix>(std::move(members), 1);
  return setup;
}

std::vector<int32_t> thinking_reply(const RunSetup& setup) {
  std::vector<int32_t> ids =
      setup.tokenizer->encode("<think>\nhm\n</think>\n\nyes<|im_end|>", SpecialTokens::recognise);
  EXPECT_EQ(ids.back(), setup.conversation->stop_ids().front());
  return ids;
}

// The prompts of an evaluation, and those of a rollout of training.
std::vector<std::vector<int32_t>> evaluated_prompts(const RunSetup& setup) {
  SteadyClock clock;
  ScriptedSampler sampler(thinking_reply(setup));
  SharedSampler shared(sampler, 0, clock);
  PolicyEvaluator evaluator(setup);
  evaluator.sample_with(&shared);
  const auto weights = std::make_shared<const PolicySnapshot>(setup.weights, 0);
  const EvaluationResult result = evaluator.evaluate(weights, setup.config.run.eval);
  EXPECT_EQ(result.failed, 0) << result.last_failure;
  return sampler.prompts;
}
std::vector<std::vector<int32_t>> trained_prompts(const RunSetup& setup) {
  SteadyClock clock;
  ScriptedSampler sampler(thinking_reply(setup));
  RolloutDriver driver(*setup.conversation, sampler, clock, setup.rollout_settings(1.0f));
  const Environment& environment = *setup.environments->members().front().environment;
  driver.start(environment, environment.example(Split::train, 0), {0}, 1);
  std::vector<RolloutOutcome> outcomes;
  while (outcomes.empty()) outcomes = driver.poll(0.1);
  EXPECT_EQ(outcomes.front().outcome, Outcome::completed) << outcomes.front().message;
  return sampler.prompts;
}

TEST(EvaluationFormat, HasNoFlagsOfTheRenderer) {
  const Catalog catalog;
  const TestFolder folder;
  const RunSetup plain = thinking_setup(catalog, folder / "run", {});
  ASSERT_EQ(evaluated_prompts(plain), trained_prompts(plain));
  for (const char* flag : {"preserve_all_thinking=true", "thinking_retention=all"}) {
    const RunSetup flagged =
        thinking_setup(catalog, folder / "run", {std::string("orchestrator.renderer.") + flag});
    EXPECT_EQ(evaluated_prompts(flagged), evaluated_prompts(plain)) << flag;
    EXPECT_NE(trained_prompts(flagged), trained_prompts(plain)) << flag;
  }
}

}  // namespace
}  // namespace leeway
