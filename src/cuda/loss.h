// The loss of given log-probabilities on a CUDA device: loss, gradient and metrics, queued on a
// stream without waiting for it. Torch-free: pointers are to device memory, the workspace is the
// caller's and may be used again for the next call on the same stream.
//
// Results repeat bit for bit on the same device: sums have one order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/float32/sequence_math.h"

namespace leeway::cuda {

using float32::LossBatch;
using float32::Prepared;
using float32::SequenceState;

// What an evaluation keeps between its kernels.
struct LossWorkspace {
  Prepared prepared;
  int32_t* sequence_of = nullptr;  // [N]; only for the head, where scales differ by sequence
  double* mean_weight = nullptr;   // [1]
  double* partials = nullptr;      // [blocks, slots]
  uint32_t* histogram = nullptr;   // [kRatioBins]
  double* padding = nullptr;       // [S]
  // Selections over the whole batch.
  double *keys = nullptr, *sorted_keys = nullptr, *moments = nullptr;
  int32_t *order = nullptr, *sorted_order = nullptr;
  void* sorting = nullptr;
  int64_t sorting_bytes = 0;
};

// Bytes for a batch of N tokens in S sequences, and the layout of such a block of memory.
int64_t loss_workspace_bytes(const LossPlan& plan, int64_t tokens, int64_t sequences);
LossWorkspace lay_out_loss(const LossPlan& plan, int64_t tokens, int64_t sequences, void* memory);

// Scales, and for plans above token level what a sequence decides (which needs the
// log-probabilities; a token-level plan's scales do not). `sequence_of` is filled where scales
// differ. `denominator` is the global one, negative: the batch's own.
void prepare_scales(const LossPlan& plan, const LossBatch& batch, double denominator,
                    const LossWorkspace& work, cudaStream_t stream);

// grad [N] is written (zero where a token does not take part), loss [1], and the row of metrics
// [MetricSums::kFlatSize], which MetricSums::from_flat reads. Grad and metrics may be null. A
// number that takes part and is not finite makes the loss NaN. With `scales_known` prepare_scales
// has run in this workspace. With a plan that routes gradients through a mean, grad is needed.
void policy_loss(const LossPlan& plan, const LossBatch& batch, double denominator, float* grad,
                 float* loss, double* metrics, const LossWorkspace& work, bool scales_known,
                 cudaStream_t stream);

}  // namespace leeway::cuda
