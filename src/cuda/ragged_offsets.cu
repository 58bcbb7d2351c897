#include "cuda/ragged_offsets.h"

#include "cuda/device.h"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void ragged_offsets_kernel(RaggedSequences sequences, int64_t count, RaggedOffsets to) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i > count) return;
  const bool there = i < sequences.count;
  const int64_t begin = there ? sequences.first_rows[i] : sequences.rows;
  for (int kind = 0; kind < RaggedOffsets::kKinds; ++kind) {
    to.starts[kind * (count + 1) + i] = begin * to.widths[kind];
  }
  if (i == count) return;
  to.lengths[i] = there ? sequences.lengths[i] : 0;
}

}  // namespace

void make_ragged_offsets(const RaggedSequences& sequences, int64_t count, const RaggedOffsets& to,
                         cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((count + 1 + kThreads - 1) / kThreads);
  ragged_offsets_kernel<<<blocks, kThreads, 0, stream>>>(sequences, count, to);
  check_launch("ragged_offsets");
}

}  // namespace leeway::cuda
