#include "model/gpu_sizes.h"

#include <fmt/format.h>

namespace leeway {

std::string why_gpu_cannot_sample(const ModelConfig& config) {
  if (config.head_dim % 8 == 0 && config.head_dim <= kMostGpuHeadDim) return "";
  return fmt::format(
      "head_dim is {}: sampling on CUDA takes multiples of 8 up to {}; sample on the CPU",
      config.head_dim, kMostGpuHeadDim);
}

std::string why_gpu_cannot_train(const ModelConfig& config, bool half) {
  const int64_t most = kMostGpuRowBytes / (half ? 2 : 4);
  if (config.vocab_size <= most) return "";
  const bool fits_half = !half && config.vocab_size <= kMostGpuRowBytes / 2;
  return fmt::format("vocab_size is {}: training on CUDA in {} takes at most {}; {}",
                     config.vocab_size, half ? "bf16" : "float32", most,
                     fits_half ? "set trainer.precision = \"bf16\"" : "train on the CPU");
}

}  // namespace leeway
