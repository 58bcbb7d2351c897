#include "run/trainer_learner.h"

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

}  // namespace
}  // namespace leeway
