#include "torch/cuda_backends.h"

#include <torch/cuda.h>
#include <torch/types.h>

#include <utility>

#include "torch/torch_sampling.h"
#include "torch/torch_training.h"

namespace leeway {
namespace {

torch::Device first_gpu() { return {torch::kCUDA, 0}; }
torch::ScalarType type_of(bool half) { return half ? torch::kBFloat16 : torch::kFloat; }

}  // namespace

std::string why_no_cuda() {
  if (torch::cuda::is_available()) return "";
  return "PyTorch finds no GPU here; run on a machine that has one and whose driver is at work "
         "(nvidia-smi)";
}

MakeTrainingBackend cuda_training(bool half) {
  return [half](TrainingWeights weights, const TrainerTable& table) {
    return make_torch_training(std::move(weights), table, first_gpu(), type_of(half));
  };
}

MakeSamplingBackend cuda_sampling(bool half) {
  return make_torch_sampling(first_gpu(), type_of(half));
}

}  // namespace leeway
