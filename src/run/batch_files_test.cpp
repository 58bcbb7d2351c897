#include "run/batch_files.h"

#include <gtest/gtest.h>

#include "base/files.h"
#include "run/test_support.h"

namespace leeway {
namespace {

TEST(BatchFiles, ReadAdvantagesOfSingleTokensWhereTheyAreThere) {
  const TestFolder folder;
  const std::string begin =
      R"({"step": 1, "group": 3, "advantage": 0.5, "batch_rollouts": 2, "samples": [{"pi": [0, -1, )"
      R"(-2], "rollout": [0, -1, -2], "loss_mask": [0, 1, 1], "versions": [-1, 0, 0])";
  const std::string file = folder / "step_1.jsonl";
  write_file_atomically(file,
                        begin + R"(, "advantages": [0.5, 2, -1]}]})" + "\n" + begin + "}]}\n");
  EXPECT_EQ(read_batch_file(file).batch.advantages,
            (std::vector<double>{0.5, 2.0, -1.0, 0.5, 0.5, 0.5}));
  write_file_atomically(file, begin + R"(, "advantages": [0.5, 2]}]})" + "\n");
  EXPECT_THROW(read_batch_file(file), Error) << "another length";
}

// A rollout with advantages of its own turns, and one without.
TEST(BatchFiles, WriteAdvantagesOfSingleTokensWhereTheyDiffer) {
  StepRecord record;
  record.batch.groups.resize(1);
  record.batch.groups[0].rollouts.resize(2);
  record.batch.advantages = {{0.5, -0.5}};
  record.batch.first_sample = {0, 1, 2};
  for (const std::vector<float>& advantages :
       {std::vector<float>{0.5f, 2.0f, -1.0f}, std::vector<float>{-0.5f}}) {
    Sample& sample = record.batch.learner.samples.emplace_back();
    sample.ids = {1, 2, 3};
    sample.loss_mask = {0, 1, 1};
    sample.advantages = advantages;
    sample.rollout = {0.0f, -1.0f, -2.0f};
    sample.versions = {-1, 0, 0};
    record.learned.logprobs.push_back({0.0f, -1.0f, -2.0f});
  }
  const TestFolder folder;
  write_file_atomically(folder / "step_1.json", batch_json(record));
  EXPECT_EQ(read_batch_file(folder / "step_1.json").batch.advantages,
            (std::vector<double>{0.5, 2.0, -1.0, -0.5, -0.5, -0.5}));
}

}  // namespace
}  // namespace leeway
