// Which models the kernels of a GPU take (src/cuda), known without a GPU: a run that one could not
// compute is refused when it is configured.
#pragma once

#include <string>

#include "model/model_config.h"

namespace leeway {

// The head's kernel holds a row of logits: bytes / size of a logit.
inline constexpr int64_t kMostGpuRowBytes = int64_t{8} * (224 << 10);
inline constexpr int64_t kMostGpuHeadDim = 256;     // of keys and values in pages
inline constexpr int64_t kMostGpuNormWidth = 8192;  // of a row whose norm has a gradient

// Why an engine on a GPU cannot sample such a model, without a remedy, which depends on whose
// engine it is; empty: it can.
std::string why_gpu_cannot_sample(const ModelConfig& config);
// Why a trainer on a GPU cannot train it, in passes in bf16 (`half`) or float32; empty: it can.
std::string why_gpu_cannot_train(const ModelConfig& config, bool half);
// Why the training kernels of passes in bf16 do not take its sizes; empty: they do. PyTorch's
// operations compute passes then, but not those of adapters and of weights in parts.
std::string why_gpu_has_no_training_kernels(const ModelConfig& config);
// Why an adapter of that rank is not computed on a GPU, with the next rank that is; empty: it is.
std::string why_gpu_takes_no_rank(int64_t rank);

}  // namespace leeway
