// Ranks with a torch device each, as threads whose devices are the CPU, against one trainer: the
// same steps but for the order of sums, and the same states.

#include <gtest/gtest.h>

#include "torch/shard_exchange.h"
#include "torch/torch_ranks_test_support.h"

namespace leeway {
namespace {

using at::Tensor;
using testing::HostGroup;
using testing::lead;
using testing::make_policy;
using testing::on_ranks;
using testing::rolled_out;
using testing::small_table;
using testing::spec_of;
using testing::TestFolder;

TEST(TorchRanks, TakeTheStepsOfOne) {
  for (const OptimizerState state : {OptimizerState::float32, OptimizerState::int8}) {
    const LossSpec spec = spec_of("icepop");
    const Parameters policy = make_policy(1, true);
    TrainerTable table = small_table();
    table.optimizer_state = state;
    table.optimizer.weight_decay = 0.1;
    Trainer one(policy, spec, table, testing::one_torch_trainer());
    std::vector<BatchResult> expected;
    for (uint64_t batch = 0; batch < 3; ++batch) {
      expected.push_back(one.train_batch(rolled_out(policy, batch, 9)));
    }
    const TrainingState last = one.state();
    for (const int size : {1, 2, 4}) {
      lead(size, spec, policy, table, [&](Trainer& trainer) {
        for (uint64_t batch = 0; batch < 3; ++batch) {
          const BatchResult got = trainer.train_batch(rolled_out(policy, batch, 9));
          const BatchResult& other = expected[batch];
          ASSERT_EQ(got.failure, "");
          // Sums in another order; a code of a moment may then be its neighbour.
          const double slack = state == OptimizerState::int8 ? 20.0 : 1.0;
          EXPECT_NEAR(got.loss, other.loss, slack * 1e-4 * (1.0 + std::abs(other.loss))) << size;
          EXPECT_NEAR(got.grad_norm, other.grad_norm, slack * 1e-3 * other.grad_norm) << size;
        }
        const TrainingState state_of_ranks = trainer.state();
        EXPECT_EQ(state_of_ranks.optimizer.steps(), 3);
        testing::expect_near(state_of_ranks.policy, last.policy, 2e-3, "weights");
        testing::expect_near(state_of_ranks.optimizer.first_moment(), last.optimizer.first_moment(),
                             2e-2, "first moment");
        testing::expect_near(state_of_ranks.optimizer.second_moment(),
                             last.optimizer.second_moment(), 2e-2, "second moment");
      });
    }
  }
}

TEST(TorchRanks, AStateOfAnyNumberIsLoadedByAnyOther) {
  for (const OptimizerState state : {OptimizerState::float32, OptimizerState::int8}) {
    const LossSpec spec = spec_of("icepop");
    const Parameters policy = make_policy(2);
    TrainerTable table = small_table();
    table.optimizer_state = state;
    for (const int saved : {1, 2, 4}) {
      const TestFolder folder;
      std::optional<TrainingState> was;
      lead(saved, spec, policy, table, [&](Trainer& trainer) {
        ASSERT_EQ(trainer.train_batch(rolled_out(policy, 5, 9)).failure, "");
        trainer.save(folder.path());
        was = trainer.state();
      });
      for (const int loaded : {1, 2, 4}) {
        lead(loaded, spec, policy, table, [&](Trainer& trainer) {
          trainer.load(folder.path());
          const TrainingState now = trainer.state();
          EXPECT_EQ(now.optimizer.steps(), 1);
          testing::expect_near(now.policy, was->policy, 0.0, "weights");
          testing::expect_near(now.optimizer.first_moment(), was->optimizer.first_moment(), 0.0,
                               "first moment");
          testing::expect_near(now.optimizer.second_moment(), was->optimizer.second_moment(), 0.0,
                               "second moment");
        });
      }
    }
  }
}

// The masters of the GPU's path: rank 0 joins what all have.
TEST(TorchRanks, SplitMastersAreCollectedBitForBit) {
  const Parameters policy = make_policy(3);
  const FlatLayout layout(policy.config());
  const Tensor full = at::zeros({layout.size}, at::kFloat);
  copy_to_flat(layout, policy, full);
  const SplitMasters masters{at::zeros({layout.size}, at::kBFloat16),
                             at::zeros({layout.size}, at::kShort)};
  split(full, masters);
  const Tensor expected = joined(masters);
  for (const int size : {1, 2, 4, 8}) {
    on_ranks(size, [&](Ranks& ranks) {
      ShardExchange exchange(ranks, std::make_unique<HostGroup>(ranks));
      const FlatRange own = layout.part_of(ranks.rank(), size);
      const Tensor got = at::zeros({layout.size}, at::kFloat);
      exchange.collect(layout, masters.high, masters.low.narrow(0, own.begin, own.count),
                       [&](int64_t begin, const Tensor& numbers) {
                         got.narrow(0, begin, numbers.numel()).copy_(numbers);
                       });
      if (ranks.rank() == 0) {
        EXPECT_TRUE(at::equal(got, expected)) << size;
      }
    });
  }
}

}  // namespace
}  // namespace leeway
