// Ranks with a part of weights and gradients each, as threads whose devices are the CPU, against
// one trainer and against ranks whose weights are whole.

#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <optional>

#include "model/config_keys.h"
#include "torch/device_weights.h"
#include "torch/torch_ranks_test_support.h"

namespace leeway {
namespace {

using at::Tensor;
using testing::HostGroup;
using testing::lead;
using testing::make_policy;
using testing::rolled_out;
using testing::small_table;
using testing::spec_of;
using testing::TestFolder;
using testing::torch_ranks;

TrainerTable sharded_table() {
  TrainerTable table = small_table();
  table.sharding = Sharding::weights;
  table.optimizer.weight_decay = 0.1;
  return table;
}

// Enough layers that some come into the place of others, in either direction.
Parameters policy_of(Family family, bool tied, bool bias = false) {
  ModelConfig config = testing::small_config(family, tied, bias);
  config.num_hidden_layers = 5;
  Parameters policy = testing::small_parameters(config, 1);
  testing::roughen(policy, 2);
  return policy;
}

// Batches of different sizes: with four ranks some have several micro-batches, others none.
constexpr size_t kSizes[] = {9, 1, 12};

struct Trained {
  std::vector<BatchResult> batches;
  TrainingState state;
};

Trained train(Trainer& trainer, const Parameters& policy) {
  std::vector<BatchResult> batches;
  for (size_t i = 0; i < std::size(kSizes); ++i) {
    batches.push_back(trainer.train_batch(rolled_out(policy, i, kSizes[i])));
  }
  return {std::move(batches), trainer.state()};
}

Trained train_alone(const LossSpec& spec, const Parameters& policy, const TrainerTable& table) {
  Trainer trainer(policy, spec, table, testing::one_torch_trainer());
  return train(trainer, policy);
}

// Both are float32, but add in another order; AdamW divides gradients near zero by their own size,
// so that what an order changes of them is seen in the weights.
void expect_near(const Trained& got, const Trained& expected, const std::string& where) {
  for (size_t i = 0; i < expected.batches.size(); ++i) {
    const BatchResult &result = got.batches[i], &other = expected.batches[i];
    ASSERT_EQ(result.failure, "") << where;
    EXPECT_NEAR(result.loss, other.loss, 1e-4 * (1.0 + std::abs(other.loss))) << where;
    EXPECT_NEAR(result.grad_norm, other.grad_norm, 1e-3 * other.grad_norm) << where;
    EXPECT_EQ(result.passes.tokens, other.passes.tokens) << where;
  }
  EXPECT_EQ(got.state.optimizer.steps(), expected.state.optimizer.steps()) << where;
  testing::expect_near(got.state.policy, expected.state.policy, 2e-3, where + ", weights");
  testing::expect_near(got.state.optimizer.first_moment(), expected.state.optimizer.first_moment(),
                       2e-2, where + ", first moment");
  testing::expect_near(got.state.optimizer.second_moment(),
                       expected.state.optimizer.second_moment(), 2e-2, where + ", second moment");
}

TEST(ShardedRanks, TakeTheStepsOfOne) {
  const LossSpec spec = spec_of("icepop");
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    for (const bool tied : {false, true}) {
      const Parameters policy = policy_of(family, tied, family == Family::llama);
      TrainerTable table = sharded_table();
      table.max_tokens = 24;
      const Trained expected = train_alone(spec, policy, table);
      for (const int size : {1, 2, 4}) {
        for (const Recompute recompute : {Recompute::off, Recompute::selective, Recompute::layer}) {
          if (size == 1 && recompute != Recompute::off) continue;
          table.recompute_activations = recompute;
          const std::string where = std::string(keys_of(family).model_type) +
                                    (tied ? ", tied, " : ", ") + std::to_string(size) + " ranks, " +
                                    name_of(recompute);
          lead(size, spec, policy, table,
               [&](Trainer& trainer) { expect_near(train(trainer, policy), expected, where); });
        }
      }
    }
  }
}

// Reference and teacher are in parts too, and passes that only score are shared.
TEST(ShardedRanks, ScoreAsOneDoes) {
  const TestFolder folder;
  const Parameters policy = policy_of(Family::llama, false), other = make_policy(7);
  save_parameters(other, folder.path());
  TrainerTable table = sharded_table();
  table.reference = folder.path();
  table.prox_forward = ProxForward::always;
  table.minibatches = 2, table.optimizer_steps = OptimizerSteps::minibatch;
  table.max_tokens = 24;
  for (const LossSpec& spec : {spec_of(testing::with("grpo", {{"ref_kl", 0.1}})), spec_of("m2po"),
                               spec_of(testing::with("verl/kl_cov", {{"kl_cov_ratio", 0.2}}))}) {
    TrainerTable of_spec = table;
    if (!spec.reads(Stream::ref)) of_spec.reference = "initial";
    const Trained expected = train_alone(spec, policy, of_spec);
    for (const int size : {2, 4}) {
      lead(size, spec, policy, of_spec, [&](Trainer& trainer) {
        expect_near(train(trainer, policy), expected, spec.preset + ", " + std::to_string(size));
      });
    }
  }
}

// In bf16 masters are split and an order of sums can change a weight by a rounding: what differs is
// small beside the steps of 5e-3 that were taken.
TEST(ShardedRanks, InHalfPrecisionAreNearEachOther) {
  const LossSpec spec = spec_of("icepop");
  const Parameters policy = policy_of(Family::qwen3, false);
  for (const OptimizerState state : {OptimizerState::float32, OptimizerState::int8}) {
    TrainerTable table = sharded_table();
    table.optimizer_state = state;
    std::optional<Trained> expected;
    for (const int size : {1, 2, 4}) {
      lead(
          size, spec, policy, table,
          [&](Trainer& trainer) {
            Trained got = train(trainer, policy);
            if (!expected) {
              expected = std::move(got);
              return;
            }
            for (size_t i = 0; i < got.batches.size(); ++i) {
              const BatchResult &result = got.batches[i], &other = expected->batches[i];
              EXPECT_NEAR(result.loss, other.loss, 2e-2 * (1.0 + std::abs(other.loss)));
              EXPECT_NEAR(result.grad_norm, other.grad_norm, 2e-2 * other.grad_norm);
            }
            testing::expect_near(got.state.policy, expected->state.policy, 2e-2, "weights");
          },
          torch_ranks(torch::kBFloat16));
    }
  }
}

TEST(ShardedRanks, StatesAreThoseOfOthers) {
  const LossSpec spec = spec_of("icepop");
  const Parameters policy = make_policy(2);
  struct Kind {
    int size;
    Sharding sharding;
  };
  const Kind kinds[] = {{1, Sharding::optimizer},
                        {2, Sharding::weights},
                        {4, Sharding::weights},
                        {2, Sharding::optimizer}};
  for (const Kind& saved : kinds) {
    const TestFolder folder;
    std::optional<TrainingState> was;
    TrainerTable table = sharded_table();
    table.sharding = saved.sharding;
    lead(saved.size, spec, policy, table, [&](Trainer& trainer) {
      ASSERT_EQ(trainer.train_batch(rolled_out(policy, 5, 9)).failure, "");
      trainer.save(folder.path());
      was = trainer.state();
    });
    for (const Kind& loaded : kinds) {
      if (saved.sharding == loaded.sharding && saved.sharding == Sharding::optimizer) continue;
      table.sharding = loaded.sharding;
      lead(loaded.size, spec, policy, table, [&](Trainer& trainer) {
        trainer.load(folder.path());
        const TrainingState now = trainer.state();
        EXPECT_EQ(now.optimizer.steps(), 1);
        testing::expect_near(now.policy, was->policy, 0.0, "weights");
        testing::expect_near(now.optimizer.first_moment(), was->optimizer.first_moment(), 0.0,
                             "first moment");
        testing::expect_near(now.optimizer.second_moment(), was->optimizer.second_moment(), 0.0,
                             "second moment");
        // What passes read has been loaded too.
        EXPECT_EQ(trainer.train_batch(rolled_out(policy, 6, 9)).failure, "");
      });
    }
  }
}

// In bf16 what a rank's sampler gets is what its passes read: the leader's weights, rounded.
TEST(ShardedRanks, GiveTheirSamplersAllWeights) {
  const LossSpec spec = spec_of("icepop");
  for (const bool tied : {false, true}) {
    const Parameters policy = policy_of(Family::qwen3, tied);
    const MakeRankBackend make = torch_ranks(torch::kBFloat16);
    std::optional<Parameters> of_leader;
    std::mutex mutex;
    std::vector<Parameters> of_others;
    testing::on_ranks(4, [&](Ranks& ranks) {
      if (ranks.rank() > 0) {
        KeptSnapshots snapshots;
        serve_training(ranks, {.like = &policy, .specs = {&spec}, .make = make}, snapshots);
        const auto kept = snapshots.take(1);
        ASSERT_NE(kept, nullptr);
        Parameters host(policy.config());
        kept->device()->copy_to(host);
        const std::lock_guard lock(mutex);
        of_others.push_back(std::move(host));
        return;
      }
      RanksTraining training(ranks, {&spec}, make);
      training.keep_snapshots();
      {
        Trainer trainer(policy, spec, sharded_table(), training.backends());
        ASSERT_EQ(trainer.train_batch(rolled_out(policy, 5, 9)).failure, "");
        const auto snapshot = trainer.snapshot(1);
        of_leader = trainer.parameters();
        ASSERT_NE(snapshot->device(), nullptr);
        Parameters host(policy.config());
        snapshot->device()->copy_to(host);
        EXPECT_TRUE(testing::same_bits(host, *of_leader));
      }
      training.end();
    });
    ASSERT_EQ(of_others.size(), 3u);
    for (const Parameters& other : of_others) {
      for (size_t i = 0; i < other.flat().size(); ++i) {
        ASSERT_EQ(other.flat()[i], static_cast<float>(at::BFloat16(of_leader->flat()[i]))) << i;
      }
    }
  }
}

// Ratios that overflow float, in samples of one rank.
std::vector<Sample> overflowing(const Parameters& policy, size_t sample) {
  std::vector<Sample> samples = rolled_out(policy, 50, 8);
  for (size_t t = 0; t < samples[sample].ids.size(); ++t) {
    if (samples[sample].loss_mask[t] != 0) samples[sample].rollout[t] = -300.0f;
  }
  samples[sample].advantages = {1.0f};
  return samples;
}

// The rank that fails takes part in what the others still do, wherever its pass ends.
TEST(ShardedRanks, AFailedBatchLeavesThemAsTheyWere) {
  const Parameters policy = make_policy();
  const LossSpec spec = spec_of("is");
  for (const Sharding sharding : {Sharding::weights, Sharding::optimizer}) {
    for (const int64_t max_tokens : {1, 1000}) {
      for (const double entropy_bonus : {0.0, 0.1}) {
        TrainerTable table = sharded_table();
        table.sharding = sharding;
        table.max_tokens = max_tokens, table.entropy_bonus = entropy_bonus;
        Trainer control(policy, spec, table, testing::one_torch_trainer());
        ASSERT_EQ(control.train_batch(rolled_out(policy, 1, 8)).failure, "");
        for (const size_t sample : {0, 4, 7}) {
          lead(2, spec, policy, table, [&](Trainer& trainer) {
            EXPECT_NE(trainer.train_batch(overflowing(policy, sample)).failure, "");
            EXPECT_TRUE(testing::same_bits(trainer.parameters(), policy));
            EXPECT_EQ(trainer.train_batch(rolled_out(policy, 1, 8)).failure, "");
            testing::expect_near(trainer.parameters(), control.parameters(), 2e-3, "weights");
          });
        }
      }
    }
  }
}

// Ends its rank at one of the calls within passes.
class LosingGroup final : public HostGroup {
 public:
  LosingGroup(Ranks& ranks, int calls) : HostGroup(ranks), ranks_(ranks), calls_(calls) {}
  void reduce_parts(const at::Tensor& whole, std::span<const int64_t> bounds) override {
    count();
    HostGroup::reduce_parts(whole, bounds);
  }
  void gather_parts(const at::Tensor& whole, std::span<const int64_t> bounds) override {
    count();
    HostGroup::gather_parts(whole, bounds);
  }

 private:
  void count() {
    if (--calls_ == 0) ranks_.abort("rank 1: gone");
  }
  Ranks& ranks_;
  int calls_;
};

TEST(ShardedRanks, AreEndedByALossWithinAPass) {
  const Parameters policy = make_policy();
  const LossSpec spec = spec_of("icepop");
  for (const Sharding sharding : {Sharding::weights, Sharding::optimizer}) {
    for (const int calls : {1, 2, 3, 4, 6, 8}) {
      // A pass of whole weights has a sum for each piece, and no more.
      if (sharding == Sharding::optimizer && calls > 3) continue;
      const MakeRankBackend make =
          torch_ranks(torch::kFloat, [&](Ranks& ranks) -> std::unique_ptr<DeviceGroup> {
            if (ranks.rank() != 1) return std::make_unique<HostGroup>(ranks);
            return std::make_unique<LosingGroup>(ranks, calls);
          });
      TrainerTable table = sharded_table();
      table.sharding = sharding;
      std::atomic<int> lost = 0;
      testing::on_ranks(4, [&](Ranks& ranks) {
        std::string reason;
        try {
          if (ranks.rank() > 0) {
            KeptSnapshots snapshots;
            serve_training(ranks, {.like = &policy, .specs = {&spec}, .make = make}, snapshots);
          } else {
            RanksTraining training(ranks, {&spec}, make);
            Trainer trainer(policy, spec, table, training.backends());
            trainer.train_batch(rolled_out(policy, 3, 12));
          }
        } catch (const Lost& error) {
          reason = error.what();
        }
        if (reason.find("rank 1: gone") != std::string::npos) ++lost;
      });
      EXPECT_EQ(lost, 4) << calls;
    }
  }
}

}  // namespace
}  // namespace leeway
