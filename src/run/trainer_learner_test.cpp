#include "run/trainer_learner.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <thread>

#include "trainer/cpu_backend.h"
#include "trainer/test_backend.h"
#include "trainer/test_support.h"

namespace leeway {
namespace {

LearnerResult result_of(TrainerLearner& learner) {
  while (true) {
    if (auto result = learner.poll(10.0)) return std::move(*result);
  }
}

TEST(TrainerLearner, GivesTheVeryBatchBackWithWhatTheUpdateDid) {
  const Parameters policy = testing::make_policy();
  Trainer trainer(policy, testing::spec_of("grpo"), testing::small_table());
  TrainerLearner learner(trainer);
  for (int64_t step = 1; step <= 2; ++step) {
    TrainingBatch batch{step, testing::rolled_out(policy, 7, 9)};
    std::vector<const int32_t*> places;
    for (const Sample& sample : batch.samples) places.push_back(sample.ids.data());
    learner.start(std::move(batch));
    const LearnerResult result = result_of(learner);
    ASSERT_EQ(result.failure, "");
    EXPECT_EQ(result.version, step);
    EXPECT_EQ(result.batch.step, step);
    ASSERT_EQ(result.batch.samples.size(), places.size());
    ASSERT_EQ(result.kept.size(), places.size());
    ASSERT_EQ(result.logprobs.size(), places.size());
    for (size_t i = 0; i < places.size(); ++i) {
      const Sample& sample = result.batch.samples[i];
      EXPECT_EQ(sample.ids.data(), places[i]) << "moved, not copied";
      EXPECT_EQ(result.logprobs[i].size(), sample.ids.size());
      ASSERT_EQ(result.kept[i].size(), sample.ids.size());
      for (size_t t = 0; t < sample.ids.size(); ++t) {
        EXPECT_LE(result.kept[i][t], sample.loss_mask[t]);
      }
    }
  }
}

TEST(TrainerLearner, GivesTheBatchBackAfterAFailureToo) {
  const Parameters policy = testing::make_policy();
  Trainer trainer(policy, testing::spec_of("grpo"), testing::small_table());
  TrainerLearner learner(trainer);
  TrainingBatch batch{1, testing::rolled_out(policy, 7, 3)};
  batch.samples[1].ids[0] = -1;
  learner.start(std::move(batch));
  const LearnerResult result = result_of(learner);
  EXPECT_NE(result.failure.find("sample 1: ids[0] = -1"), std::string::npos) << result.failure;
  EXPECT_EQ(result.weights, nullptr);
  EXPECT_EQ(result.batch.samples.size(), 3u);
}

TEST(RoomForSampler, IsLeftByATrainerThatWaitsAndTakenBackByOneThatNeverDoes) {
  RoomForSampler room;
  EXPECT_FALSE(room.after(1.0, 9.0)) << "one update says little";
  EXPECT_FALSE(room.after(1.0, 0.1));
  EXPECT_FALSE(room.after(1.0, 2.0));
  EXPECT_TRUE(room.after(1.0, 2.0));
  // With less of the device it waits less; that alone is no reason to take it back.
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(room.after(2.0, 0.2));
  EXPECT_TRUE(room.after(3.5, 0.0));
  EXPECT_TRUE(room.after(3.5, 0.1));
  EXPECT_TRUE(room.after(3.5, 0.01));
  EXPECT_FALSE(room.after(3.5, 0.01));
  EXPECT_FALSE(room.after(2.5, 0.0));
}

// Steps of a trainer and a sampler beside each other, which take as long as the slower one, for
// `updates`; returns how often the room changed and sets the seconds of the last step.
int changes_of(double trains, double samples, double trains_with_room, double samples_with_room,
               int updates, double& last_step) {
  RoomForSampler room;
  bool leaves = false;
  int changes = 0;
  for (int i = 0; i < updates; ++i) {
    const double trained = leaves ? trains_with_room : trains;
    const double sampled = leaves ? samples_with_room : samples;
    last_step = std::max(trained, sampled);
    const bool next = room.after(trained, std::max(0.0, sampled - trained));
    changes += next != leaves;
    leaves = next;
  }
  return changes;
}

TEST(RoomForSampler, StaysWhereAStepIsShorterAlsoIfTheTrainerIsThenTheSlowerSide) {
  double step = 0.0;
  EXPECT_EQ(changes_of(1.0, 1.9, 1.5, 1.4, 40, step), 1);
  EXPECT_EQ(step, 1.5);
}

TEST(RoomForSampler, IsTriedSeldomWhereItMakesStepsLonger) {
  double step = 0.0;
  const int changes = changes_of(1.0, 1.5, 1.7, 1.4, 500, step);
  EXPECT_GE(changes, 4) << "there and back, twice";
  EXPECT_LE(changes, 16) << "tries are twice as far apart each";
  EXPECT_EQ(step, 1.5);
}

// The CPU's backend, which writes down what it is asked.
class AskedBackend final : public testing::ForwardingBackend {
 public:
  AskedBackend(std::unique_ptr<TrainingBackend> inner, std::vector<bool>& asked, bool can)
      : ForwardingBackend(std::move(inner)), asked_(asked), can_(can) {}
  bool leave_room(bool leaves) override {
    asked_.push_back(leaves);
    return leaves && can_;
  }

 private:
  std::vector<bool>& asked_;
  const bool can_;
};

MakeTrainingBackend asked_backend(std::vector<bool>& asked, bool can) {
  return [&asked, can](TrainingWeights weights, const TrainerTable& table) {
    return std::make_unique<AskedBackend>(make_cpu_training(std::move(weights), table), asked, can);
  };
}

TEST(TrainerLearner, LeavesRoomWhenItHasWaitedForBatchesAndSaysSo) {
  for (const bool can : {true, false}) {
    std::vector<bool> asked;
    const Parameters policy = testing::make_policy();
    Trainer trainer(policy, testing::spec_of("grpo"), testing::small_table(),
                    asked_backend(asked, can));
    std::vector<double> said;
    TrainerLearner learner(trainer, 0, 0, /*beside_sampler=*/true);
    for (int64_t step = 1; step <= 4; ++step) {
      // Far longer than an update takes.
      learner.start({step, testing::rolled_out(policy, 7, 9), /*waited=*/1800.0});
      const LearnerResult result = result_of(learner);
      ASSERT_EQ(result.failure, "");
      for (const auto& [name, value] : result.metrics) {
        if (name == "perf/trainer_leaves_room") said.push_back(value);
      }
    }
    EXPECT_EQ(asked, (std::vector<bool>{false, true, true})) << "before all but the first";
    EXPECT_EQ(said, (std::vector<double>{0.0, 0.0, can ? 1.0 : 0.0, can ? 1.0 : 0.0}));
  }
}

TEST(TrainerLearner, TimeThatNobodySampledIsNoWaiting) {
  std::vector<bool> asked;
  const Parameters policy = testing::make_policy();
  Trainer trainer(policy, testing::spec_of("grpo"), testing::small_table(),
                  asked_backend(asked, true));
  TrainerLearner learner(trainer, 0, 0, /*beside_sampler=*/true);
  for (int64_t step = 1; step <= 4; ++step) {
    learner.start({step, testing::rolled_out(policy, 7, 9)});
    const double busy = result_of(learner).busy_seconds;
    std::this_thread::sleep_for(std::chrono::duration<double>(3.0 * busy));
  }
  EXPECT_EQ(asked, (std::vector<bool>{false, false, false}));
}

TEST(TrainerLearner, WithoutASamplerBesideItLeavesNone) {
  std::vector<bool> asked;
  const Parameters policy = testing::make_policy();
  Trainer trainer(policy, testing::spec_of("grpo"), testing::small_table(),
                  asked_backend(asked, true));
  TrainerLearner learner(trainer);
  for (int64_t step = 1; step <= 2; ++step) {
    learner.start({step, testing::rolled_out(policy, 7, 9)});
    for (const auto& [name, value] : result_of(learner).metrics) {
      EXPECT_NE(name, "perf/trainer_leaves_room");
    }
  }
  EXPECT_TRUE(asked.empty());
}

TEST(RoomForSampler, StaysAsItIsWithoutTimes) {
  RoomForSampler room;
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(room.after(0.0, 0.0));
}

// An environment may ask for samples that are context only.
TEST(TrainerLearner, ReportsEverySampleOfABatchInWhichNothingIsTrained) {
  const Catalog catalog;
  const Parameters policy = testing::make_policy();
  std::vector<testing::NamedPreset> presets = testing::foreign_list(catalog);
  for (const char* name : {"icepop", "grpo", "ppo+tis"}) presets.push_back(testing::with(name));
  for (const testing::NamedPreset& named : presets) {
    SCOPED_TRACE(named.label());
    const LossSpec spec = testing::spec_of(named);
    if (spec.reads(Stream::teacher)) continue;
    Trainer trainer(policy, spec, testing::small_table());
    TrainerLearner learner(trainer);
    TrainingBatch batch{1, testing::rolled_out(policy, 7, 4)};
    for (Sample& sample : batch.samples) {
      std::fill(sample.loss_mask.begin(), sample.loss_mask.end(), 0);
    }
    learner.start(std::move(batch));
    const LearnerResult result = result_of(learner);
    ASSERT_EQ(result.failure, "");
    EXPECT_EQ(trainer.optimizer_steps(), 0);
    ASSERT_EQ(result.logprobs.size(), 4u);
    ASSERT_EQ(result.kept.size(), 4u);
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(result.logprobs[i].size(), result.batch.samples[i].ids.size());
      EXPECT_EQ(result.kept[i], TokenFlags::value_type(result.batch.samples[i].ids.size(), 0));
    }
  }
}

std::map<std::string, double> metrics_after_a_step(const testing::NamedPreset& named) {
  const Parameters policy = testing::make_policy();
  TrainerTable table = testing::small_table();
  table.prox_forward = ProxForward::never;  // prox is what sampled, and pi has moved from it
  const LossSpec spec = testing::spec_of(named);
  if (spec.reads(Stream::teacher)) return {};
  Trainer trainer(testing::make_policy(3), spec, table);
  TrainerLearner learner(trainer);
  // Without NaN at masked positions, which some of the sources look at.
  std::vector<Sample> samples = testing::make_samples(7, 9, true);
  testing::add_rollouts(policy, samples, 107, 0.3, true);
  learner.start({1, std::move(samples)});
  const LearnerResult result = result_of(learner);
  EXPECT_EQ(result.failure, "") << named.preset;
  std::map<std::string, double> metrics;
  for (const auto& [name, value] : result.metrics) {
    EXPECT_TRUE(metrics.emplace(name, value).second) << name << " is there twice";
  }
  return metrics;
}

TEST(TrainerLearner, WritesTheSourcesMetricsUnderTheirNames) {
  const Catalog catalog;
  std::set<std::string> names;
  int presets = 0;
  for (const testing::NamedPreset& named : testing::foreign_list(catalog)) {
    SCOPED_TRACE(named.preset);
    const auto metrics = metrics_after_a_step(named);
    presets += metrics.empty() ? 0 : 1;
    for (const auto& [name, value] : metrics) names.insert(name);
  }
  EXPECT_GT(presets, 20);
  for (const char* name :
       {"tis", "tis_clipfrac", "tis_abs", "pg_clipfrac", "ppo_kl", "ppo_clip_frac",
        "ppo_ratio_mean", "inference_diff", "inference_kld", "actor/ppo_kl", "actor/pg_clipfrac",
        "foreign/is_masked", "foreign/masked_mismatch_kl"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
}

TEST(TrainerLearner, MeasuresWhatBoundsDoToWeights) {
  auto metrics = metrics_after_a_step(testing::with("ppo+tis"));
  ASSERT_TRUE(metrics.contains("weight_clipped_share"));
  EXPECT_TRUE(metrics.contains("weight_abs_deviation"));
  // A narrow band around 1 changes nearly every weight that is not exactly 1.
  metrics = metrics_after_a_step(
      testing::with("reinforce+off_policy_is", {{"ois_eps_low", 1e-9}, {"ois_eps_high", 1e-9}}));
  EXPECT_GT(metrics["weight_clipped_share"], 0.9);
  EXPECT_LT(metrics["weight_abs_deviation"], 1e-8);
  EXPECT_FALSE(metrics_after_a_step(testing::with("grpo")).contains("weight_clipped_share"));
}

}  // namespace
}  // namespace leeway
