// Selections that look at the whole batch: what M2PO leaves and what kl_cov takes. They sort.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/float32/sequence_math.h"

namespace leeway::cuda {

using float32::LossBatch;
struct LossWorkspace;

// Temporary bytes for sorting and summing `tokens` numbers.
int64_t sorting_bytes(int64_t tokens);

// Sets the flags of tokens M2PO drops; flags hold zeros before.
void select_m2(const LossPlan& plan, const LossBatch& batch, const LossWorkspace& work,
               cudaStream_t stream);

// Sets kSelected on the trained tokens of largest covariance of advantage and log pi.
void select_covariance(const LossPlan& plan, const LossBatch& batch, const LossWorkspace& work,
                       cudaStream_t stream);

}  // namespace leeway::cuda
