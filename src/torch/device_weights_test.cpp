// Weights from the trainer on a torch device to the engine on it: without the host, with the same
// bits, and of their own version however far training has gone on. Runs on the CPU, and on CUDA as
// well where there is one.

#include "torch/device_weights.h"

#include <gtest/gtest.h>
#include <torch/cuda.h>

#include <limits>

#include "engine/test_support.h"
#include "torch/device_room.h"
#include "torch/torch_sampling.h"
#include "torch/torch_training.h"
#include "trainer/test_support.h"

namespace leeway {
namespace {

using namespace testing;

std::vector<torch::Device> devices() {
  std::vector<torch::Device> list = {torch::kCPU};
  if (torch::cuda::is_available()) list.emplace_back(torch::kCUDA, 0);
  return list;
}

Trainer trainer_of(const Parameters& policy, torch::Device device, torch::ScalarType compute) {
  return Trainer(policy, spec_of("icepop"), small_table(),
                 [device, compute](TrainingWeights weights, const TrainerTable& table) {
                   return make_torch_training(std::move(weights), table, device, compute);
                 });
}

void train(Trainer& trainer, const Parameters& policy, uint64_t seed) {
  ASSERT_EQ(trainer.train_batch(rolled_out(policy, seed, 9, 0.05)).failure, "");
}

Results sampled_by(Engine& engine) {
  for (const Request& request : assorted(6, 3)) engine.submit(request);
  return run_to_the_end(engine);
}

void expect_same(const Results& got, const Results& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [key, sample] : expected) testing::expect_same(got.at(key), sample);
}

TEST(DeviceWeights, GoToTheEngineWithoutTheHostAndSampleTheSame) {
  for (const torch::Device& device : devices()) {
    for (const torch::ScalarType compute : {torch::kFloat, torch::kBFloat16}) {
      for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
        const Parameters policy = tiny_weights(family, 1);
        Trainer trainer = trainer_of(policy, device, compute);
        EngineOptions options = options_of(64);
        options.backend = make_torch_sampling(device, compute);
        const auto first = trainer.snapshot(0);
        Engine engine(*first, options), by_host(policy, 0, options);
        expect_same(sampled_by(engine), sampled_by(by_host));
        train(trainer, policy, 5);
        const auto second = trainer.snapshot(1);
        EXPECT_EQ(second->not_finite_text(), "");
        engine.update_weights(second);
        const Results results = sampled_by(engine);
        EXPECT_FALSE(first->has_host());
        EXPECT_FALSE(second->has_host());
        by_host.update_weights(std::make_shared<const PolicySnapshot>(trainer.parameters(), 1));
        expect_same(results, sampled_by(by_host));
      }
    }
  }
}

TEST(DeviceWeights, StayWhenTrainingGoesOnAndWhenItsTrainerIsGone) {
  for (const torch::Device& device : devices()) {
    for (const torch::ScalarType compute : {torch::kFloat, torch::kBFloat16}) {
      const Parameters policy = tiny_weights(Family::llama, 2);
      std::vector<std::shared_ptr<const PolicySnapshot>> snapshots;
      std::vector<Parameters> expected;
      {
        Trainer trainer = trainer_of(policy, device, compute);
        for (uint64_t version = 0; version < 3; ++version) {
          if (version > 0) train(trainer, policy, version);
          snapshots.push_back(trainer.snapshot(static_cast<PolicyVersion>(version)));
          expected.push_back(trainer.parameters());
        }
      }
      for (size_t version = 0; version < 3; ++version) {
        const PolicySnapshot& snapshot = *snapshots[version];
        EXPECT_EQ(snapshot.version(), static_cast<int64_t>(version));
        EXPECT_EQ(snapshot.checksum(), checksum(expected[version]));
        EXPECT_TRUE(same_bits(snapshot.host(), expected[version]));
        EXPECT_EQ(same_bits(snapshot.host(), policy), version == 0);
      }
    }
  }
}

// What a trainer gives where the device has no room for all digits: a sampler in half precision
// does not see the difference.
TEST(DeviceWeights, ThatAreRoundedSampleAsThoseTheyAreOf) {
  for (const torch::Device& device : devices()) {
    const Parameters policy = tiny_weights(Family::qwen3, 4);
    const FlatLayout layout(policy.config());
    const at::Tensor flat = at::zeros({layout.size}, at::device(device).dtype(at::kFloat));
    copy_to_flat(layout, policy, flat);
    std::vector<Results> results;
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
      const PolicySnapshot snapshot(policy.config(),
                                    std::make_unique<TorchDeviceWeights>(layout, flat.to(type)), 3);
      EXPECT_EQ(snapshot.is_rounded(), type == at::kBFloat16);
      EXPECT_EQ(snapshot.not_finite_text(), "");
      EngineOptions options = options_of(64);
      options.backend = make_torch_sampling(device, torch::kBFloat16);
      Engine engine(snapshot, options);
      results.push_back(sampled_by(engine));
    }
    expect_same(results[0], results[1]);
  }
}

TEST(DeviceWeights, AreFullWhereTwoCopiesFitThenRoundedThenOnTheHost) {
  constexpr int64_t kWeights = 1000;
  SnapshotRoom room = {.weights = kWeights};
  const auto form = [&](int64_t spare, bool last_is_there) {
    room.spare = spare, room.last_is_there = last_is_there;
    return snapshot_form(room);
  };
  // Without the right to round there is nothing to fall back to.
  EXPECT_EQ(form(4 * kWeights, false), SnapshotForm::full);
  EXPECT_EQ(form(4 * kWeights - 1, false), SnapshotForm::on_host);
  EXPECT_EQ(form(4 * kWeights - 1, true), SnapshotForm::on_host);

  room.may_round = true;
  EXPECT_EQ(form(8 * kWeights, false), SnapshotForm::full);
  EXPECT_EQ(form(8 * kWeights - 1, false), SnapshotForm::rounded);
  EXPECT_EQ(form(4 * kWeights, true), SnapshotForm::full);
  EXPECT_EQ(form(4 * kWeights - 1, true), SnapshotForm::rounded);
  EXPECT_EQ(form(2 * kWeights, false), SnapshotForm::rounded);
  EXPECT_EQ(form(2 * kWeights - 1, false), SnapshotForm::on_host);
  EXPECT_EQ(form(-1, true), SnapshotForm::on_host);

  // What comes back where a full copy may be kept; a rounded one is gone by then.
  room.keep_free = 500;
  EXPECT_EQ(form(8 * kWeights + 500, false), SnapshotForm::full);
  EXPECT_EQ(form(8 * kWeights + 499, false), SnapshotForm::rounded);
  EXPECT_EQ(form(2 * kWeights, false), SnapshotForm::rounded);
}

TEST(DeviceWeights, ThatAreNotFiniteAreFoundOnTheDevice) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const torch::Device& device : devices()) {
    for (const float bad : {kNan, infinity, -infinity}) {
      for (const size_t place : {size_t{0}, size_t{3}}) {
        Parameters weights = tiny_weights(Family::qwen2, 2);
        weights.of(place).back() = bad;
        const FlatLayout layout(weights.config());
        const at::Tensor flat = at::zeros({layout.size}, at::device(device).dtype(at::kFloat));
        copy_to_flat(layout, weights, flat);
        const TorchDeviceWeights found(layout, flat);
        EXPECT_NE(found.not_finite_text(), "");
        EXPECT_EQ(found.not_finite_text(), not_finite_text(weights));
      }
    }
  }
}

}  // namespace
}  // namespace leeway
