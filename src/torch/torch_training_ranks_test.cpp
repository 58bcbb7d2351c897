// Ranks with a torch device each, as threads whose devices are the CPU, against one trainer: the
// same steps but for the order of sums, and the same states.

#include <gtest/gtest.h>

#include "torch/shard_exchange.h"
#include "torch/torch_ranks_test_support.h"
#include "torch/torch_state_shard.h"
#include "trainer/state_loading.h"
#include "trainer/state_saving.h"

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
using testing::torch_ranks;

// An adapter over `base`, with numbers in both of its matrices.
Parameters adapter_over(Parameters base) {
  Parameters adapter(std::make_shared<const Parameters>(std::move(base)),
                     {.rank = 8,
                      .alpha = 16.0,
                      .targets = {kLoraTargets.begin(), kLoraTargets.end()},
                      .base_path = ""});
  Rng rng(4);
  for (size_t i = 0; i < adapter.table().size(); ++i) {
    for (float& value : adapter.of(i)) value = static_cast<float>(0.1 * rng.normal());
  }
  return adapter;
}

// Trains one, then ranks, on the same batches; `spread` as of rolled_out.
void expect_the_steps_of_one(const Parameters& policy, const LossSpec& spec,
                             const TrainerTable& table, double spread) {
  Trainer one(policy, spec, table, testing::one_torch_trainer());
  std::vector<BatchResult> expected;
  for (uint64_t batch = 0; batch < 3; ++batch) {
    expected.push_back(one.train_batch(rolled_out(policy, batch, 9, spread)));
  }
  const TrainingState last = one.state();
  for (const int size : {1, 2, 4}) {
    lead(size, spec, policy, table, [&](Trainer& trainer) {
      for (uint64_t batch = 0; batch < 3; ++batch) {
        const BatchResult got = trainer.train_batch(rolled_out(policy, batch, 9, spread));
        const BatchResult& other = expected[batch];
        ASSERT_EQ(got.failure, "");
        // Sums in another order; a code of a moment may then be its neighbour.
        const double slack = table.optimizer_state == OptimizerState::int8 ? 20.0 : 1.0;
        EXPECT_NEAR(got.loss, other.loss, slack * 1e-4 * (1.0 + std::abs(other.loss))) << size;
        EXPECT_NEAR(got.grad_norm, other.grad_norm, slack * 1e-3 * other.grad_norm) << size;
      }
      const TrainingState state_of_ranks = trainer.state();
      EXPECT_EQ(state_of_ranks.optimizer.steps(), 3);
      testing::expect_near(state_of_ranks.policy, last.policy, 2e-3, "weights");
      testing::expect_near(state_of_ranks.optimizer.first_moment(), last.optimizer.first_moment(),
                           2e-2, "first moment");
      testing::expect_near(state_of_ranks.optimizer.second_moment(), last.optimizer.second_moment(),
                           2e-2, "second moment");
    });
  }
}

TEST(TorchRanks, TakeTheStepsOfOne) {
  for (const OptimizerState state : {OptimizerState::float32, OptimizerState::int8}) {
    TrainerTable table = small_table();
    table.optimizer_state = state;
    table.optimizer.weight_decay = 0.1;
    expect_the_steps_of_one(make_policy(1, true), spec_of("icepop"), table, 0.3);
  }
}

// The base is on each rank's device once, for its reference too.
TEST(TorchRanks, TakeTheStepsOfOneWithAnAdapter) {
  for (const OptimizerState state : {OptimizerState::float32, OptimizerState::int8}) {
    TrainerTable table = small_table();
    table.optimizer_state = state;
    const Parameters policy = adapter_over(make_policy());
    expect_the_steps_of_one(policy, spec_of("icepop"), table, 0.05);
    table.reference = "base";
    expect_the_steps_of_one(policy, spec_of(testing::with("grpo", {{"ref_kl", 0.1}})), table, 0.05);
  }
}

// What the sampler of another rank is given is the adapter that rank 0 has, over the rank's base.
TEST(TorchRanks, EachGivesItsSamplerTheNewAdapter) {
  const Parameters policy = adapter_over(make_policy());
  const LossSpec spec = spec_of("icepop");
  std::vector<std::shared_ptr<const PolicySnapshot>> given(4);
  on_ranks(4, [&](Ranks& ranks) {
    auto& own = given[static_cast<size_t>(ranks.rank())];
    if (ranks.rank() > 0) {
      KeptSnapshots snapshots;
      serve_training(ranks, {.like = &policy, .specs = {&spec}, .make = torch_ranks()}, snapshots);
      own = snapshots.take(1);
      return;
    }
    RanksTraining training(ranks, {&spec}, torch_ranks());
    training.keep_snapshots();
    {
      Trainer trainer(policy, spec, small_table(), training.backends());
      EXPECT_EQ(trainer.train_batch(rolled_out(policy, 5, 9, 0.05)).failure, "");
      own = trainer.snapshot(1);
    }
    training.end();
  });
  EXPECT_NE(given[0]->checksum(), checksum(policy));
  for (const auto& each : given) {
    ASSERT_NE(each, nullptr);
    EXPECT_EQ(each->checksum(), given[0]->checksum());
    EXPECT_EQ(each->host().base(), policy.base());
  }
}

TEST(TorchRanks, AStateOfAnyNumberIsLoadedByAnyOther) {
  const LossSpec spec = spec_of("icepop");
  for (const Parameters& policy : {make_policy(2), adapter_over(make_policy(2))}) {
    for (const OptimizerState state : {OptimizerState::float32, OptimizerState::int8}) {
      TrainerTable table = small_table();
      table.optimizer_state = state;
      for (const int saved : {1, 2, 4}) {
        const TestFolder folder;
        std::optional<TrainingState> was;
        const std::vector<Sample> samples = rolled_out(policy, 6, 9, 0.05);
        TokenValues logprobs;
        lead(saved, spec, policy, table, [&](Trainer& trainer) {
          ASSERT_EQ(trainer.train_batch(rolled_out(policy, 5, 9, 0.05)).failure, "");
          trainer.save(folder.path());
          was = trainer.state();
          logprobs = trainer.forward(samples);
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
            EXPECT_EQ(trainer.snapshot(3)->checksum(), checksum(was->policy));
            // What passes read on each rank; rows are summed in another order beside others.
            const TokenValues now_logprobs = trainer.forward(samples);
            for (size_t i = 0; i < samples.size(); ++i) {
              for (size_t t = 0; t < logprobs[i].size(); ++t) {
                EXPECT_NEAR(now_logprobs[i][t], logprobs[i][t], 1e-5) << saved << " to " << loaded;
              }
            }
          });
        }
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

// The same masters in a checkpoint: each rank joins and splits its own part alone.
TEST(TorchRanks, SplitMastersAreSavedAndLoadedInParts) {
  const Parameters policy = make_policy(3), other = make_policy(5);
  const FlatLayout layout(policy.config());
  const auto halves_of = [&](const Parameters& from) {
    SplitMasters masters{at::zeros({layout.size}, at::kBFloat16),
                         at::zeros({layout.size}, at::kShort)};
    copy_to_flat(layout, from, masters);
    return masters;
  };
  const SplitMasters masters = halves_of(policy);
  Parameters expected(policy.config());
  copy_to_host(layout, masters, expected);
  for (const int size : {1, 2, 4, 8}) {
    const TestFolder folder;
    const SplitMasters loaded = halves_of(other);
    on_ranks(size, [&](Ranks& ranks) {
      const FlatRange range = layout.part_of(ranks.rank(), size);
      const auto own_of = [&](const SplitMasters& all) {
        FlatAdamW own;
        own.copy = all.high.narrow(0, range.begin, range.count);
        own.low = all.low.narrow(0, range.begin, range.count);
        own.moments = make_moments(layout, torch::kCPU, OptimizerState::float32, range);
        return own;
      };
      TorchStateShard shard(layout, ranks.rank(), size, [&] { return own_of(masters); });
      StateWriter writer(ranks);
      if (ranks.rank() > 0) {
        writer.begin(shard);
      } else {
        StateSave(ranks, shard, 7).write(folder.path());
      }
      ranks.barrier();
      TorchStateShard empty(layout, ranks.rank(), size, [&] { return own_of(loaded); });
      EXPECT_EQ(load_sharded(ranks, folder.path(), empty), 7);
    });
    testing::expect_near(load_parameters(folder.path()), expected, 0.0, "saved");
    EXPECT_TRUE(at::equal(loaded.high, masters.high)) << size;
    EXPECT_TRUE(at::equal(loaded.low, masters.low)) << size;
  }
}

}  // namespace
}  // namespace leeway
