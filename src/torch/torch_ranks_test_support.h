// Shared by the tests of ranks with a torch device each: threads whose devices are the CPU.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "ranks/local_ranks.h"
#include "torch/host_group.h"
#include "torch/torch_training.h"
#include "trainer/ranks_backend.h"
#include "trainer/test_support.h"

namespace leeway::testing {

inline MakeTrainingBackend one_torch_trainer() {
  return [](TrainingWeights weights, const TrainerTable& table) {
    return make_torch_training(std::move(weights), table, torch::kCPU, torch::kFloat);
  };
}

// What moves numbers between a rank and the others.
using MakeGroup = std::function<std::unique_ptr<DeviceGroup>(Ranks&)>;
inline std::unique_ptr<DeviceGroup> host_group(Ranks& ranks) {
  return std::make_unique<HostGroup>(ranks);
}

inline MakeRankBackend torch_ranks(torch::ScalarType compute = torch::kFloat,
                                   const MakeGroup& group = host_group) {
  return [compute, group](Ranks& ranks, TrainingWeights weights, const TrainerTable& table) {
    return make_torch_rank(ranks, group(ranks), std::move(weights), table, torch::kCPU, compute);
  };
}

// Runs `work` on all ranks, each a thread.
inline void on_ranks(int size, const std::function<void(Ranks&)>& work) {
  const auto ranks = make_local_ranks(size);
  std::vector<std::thread> threads;
  for (const auto& each : ranks) threads.emplace_back([&] { work(*each); });
  for (std::thread& thread : threads) thread.join();
}

// Trains on rank 0; the others serve.
inline void lead(int size, const LossSpec& spec, const Parameters& policy,
                 const TrainerTable& table, const std::function<void(Trainer&)>& work,
                 const MakeRankBackend& make = torch_ranks()) {
  // Of weights in parts the others know the shape alone.
  const Parameters like =
      table.sharding == Sharding::weights ? Parameters::shape_of(policy.config()) : policy;
  on_ranks(size, [&](Ranks& ranks) {
    if (ranks.rank() > 0) {
      KeptSnapshots snapshots;
      serve_training(ranks, {.like = &like, .specs = {&spec}, .make = make}, snapshots);
      return;
    }
    RanksTraining training(ranks, {&spec}, make);
    {
      Trainer trainer(policy, spec, table, training.backends());
      work(trainer);
    }
    training.end();
  });
}

}  // namespace leeway::testing
