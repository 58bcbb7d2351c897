#include "torch/cuda_backends.h"

#include <torch/cuda.h>
#include <torch/types.h>

#include <utility>

#include "leeway/error.h"
#include "torch/device_room.h"
#include "torch/nccl_group.h"
#include "torch/torch_errors.h"
#include "torch/torch_sampling.h"
#include "torch/torch_training.h"
#include "torch/weight_sharing.h"

namespace leeway {
namespace {

torch::Device first_gpu() { return {torch::kCUDA, 0}; }
torch::ScalarType type_of(bool half) { return half ? torch::kBFloat16 : torch::kFloat; }

std::string why_no_cuda() {
#ifndef LEEWAY_CUDA
  return "leeway is built with a PyTorch without CUDA; build it with one that has it "
         "(docs/dependencies.md)";
#endif
  if (torch::cuda::is_available()) return "";
  return "PyTorch finds no GPU here; run on a machine that has one and whose driver is at work "
         "(nvidia-smi)";
}

int64_t free_memory() {
  return with_plain_errors([] { return free_bytes(first_gpu()); });
}

MakeTrainingBackend cuda_training(bool half, SnapshotUse snapshots) {
  return [half, snapshots](TrainingWeights weights, const TrainerTable& table) {
    return make_torch_training(std::move(weights), table, first_gpu(), type_of(half), snapshots);
  };
}

MakeRankBackend cuda_rank_training(bool half) {
  if (const std::string problem = why_no_nccl(); !problem.empty()) throw Error(problem);
  return [half](Ranks& ranks, TrainingWeights weights, const TrainerTable& table) {
    auto group = with_plain_errors([&] { return make_nccl_group(ranks, first_gpu()); });
    return make_torch_rank(ranks, std::move(group), std::move(weights), table, first_gpu(),
                           type_of(half));
  };
}

MakeSamplingBackend cuda_sampling(Precision precision) {
  LEEWAY_CHECK(precision != Precision::int8, "int8 is for CPUs");
  return make_torch_sampling(first_gpu(), type_of(precision != Precision::float32),
                             {.fp8 = precision == Precision::fp8});
}

WeightSharing cuda_sharing() { return cuda_weight_sharing(first_gpu()); }

}  // namespace
}  // namespace leeway

extern "C" __attribute__((visibility("default"))) const leeway::CudaBackends*
leeway_cuda_backends() {
  static const leeway::CudaBackends backends = {
      LEEWAY_VERSION,        leeway::why_no_cuda,
      leeway::free_memory,   leeway::use_expandable_segments,
      leeway::cuda_training, leeway::cuda_rank_training,
      leeway::cuda_sampling, leeway::cuda_sharing};
  return &backends;
}
