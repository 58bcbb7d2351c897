#include "model/gpu_sizes.h"

#include <fmt/format.h>

#include <cstdint>

namespace leeway {

std::string why_gpu_cannot_sample(const ModelConfig& config) {
  if (config.head_dim % 8 == 0 && config.head_dim <= kMostGpuHeadDim) return "";
  return fmt::format("head_dim is {}: sampling on CUDA takes multiples of 8 up to {}",
                     config.head_dim, kMostGpuHeadDim);
}

std::string why_gpu_cannot_train(const ModelConfig& config, bool half) {
  const int64_t most = kMostGpuRowBytes / (half ? 2 : 4);
  if (config.vocab_size <= most) return "";
  const bool fits_half = !half && config.vocab_size <= kMostGpuRowBytes / 2;
  return fmt::format("vocab_size is {}: training on CUDA in {} takes at most {}; {}",
                     config.vocab_size, half ? "bf16" : "float32", most,
                     fits_half ? "set trainer.precision = \"bf16\"" : "set model.device = \"cpu\"");
}

std::string why_gpu_has_no_training_kernels(const ModelConfig& config) {
  const auto problem = [](const char* name, int64_t size, int64_t most) {
    if (size % 8 == 0 && size <= most) return std::string();
    const std::string bound = most < INT64_MAX ? fmt::format(" up to {}", most) : "";
    return fmt::format("{} is {}: the kernels for passes in bf16 take multiples of 8{}", name, size,
                       bound);
  };
  std::string why = problem("head_dim", config.head_dim, kMostGpuHeadDim);
  if (why.empty()) why = problem("hidden_size", config.hidden_size, kMostGpuNormWidth);
  if (why.empty()) why = problem("intermediate_size", config.intermediate_size, INT64_MAX);
  return why;
}

std::string why_gpu_takes_no_rank(int64_t rank) {
  if (rank % 8 == 0) return "";
  return fmt::format(
      "an adapter of rank {}: on CUDA the rank must be a multiple of 8, as {}; there sampling and "
      "training give the same bits",
      rank, (rank + 7) / 8 * 8);
}

}  // namespace leeway
