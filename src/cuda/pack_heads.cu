#include "cuda/norm_rope_swiglu.h"
#include "cuda/warp_head.cuh"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kHeads = 8;  // of a warp: their loads hide each other's latency

int64_t parts_of(int64_t heads) { return (heads + kHeads - 1) / kHeads; }

// A warp for kHeads queries or keys of a row.
template <int kTwos, class T>
__global__ void __launch_bounds__(kThreads)
    pack_heads_kernel(PackedHeads step, int query_parts, int parts) {
  const int head_dim = static_cast<int>(step.sizes.head_dim), half = head_dim / 2;
  const int query_heads = static_cast<int>(step.sizes.query_heads);
  const int kv_heads = static_cast<int>(step.sizes.kv_heads);
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const int64_t row = at / parts;
  const int part = static_cast<int>(at % parts);
  if (row >= step.rows) return;
  const bool query = part < query_parts;
  const int first = (query ? part : part - query_parts) * kHeads;
  const int heads = query ? query_heads : kv_heads;
  const T* from = static_cast<const T*>(step.qkv) +
                  (row * (query_heads + 2 * kv_heads) + (query ? 0 : query_heads)) * head_dim;
  T* to = static_cast<T*>(query ? step.q : step.k) + row * heads * head_dim;
  const T* norm = static_cast<const T*>(query ? step.query_norm : step.key_norm);

  WarpHead<kTwos> head[kHeads], weights;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (first + h < heads) head[h].load_head(from + (first + h) * head_dim, half);
  }
  const WarpHead<kTwos> angles = angles_at<kTwos>(step.angles, step.positions[row], half);
  if (norm != nullptr) weights.load_head(norm, half);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (first + h >= heads) continue;
    if (norm != nullptr) {
      const float squares = warp_sum(head[h].squares());
      head[h].template norm_by<T>(inverse_norm(squares, head_dim, step.eps), weights);
    }
    head[h].turn_by(angles);
    head[h].store_head(to + (first + h) * head_dim, half);
  }
}

}  // namespace

void pack_heads(Dtype dtype, const PackedHeads& step, cudaStream_t stream) {
  if (step.rows == 0) return;
  const int64_t query_parts = parts_of(step.sizes.query_heads);
  const int64_t parts = query_parts + parts_of(step.sizes.kv_heads);
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    with_twos(step.sizes.head_dim, [&](auto twos) {
      pack_heads_kernel<decltype(twos)::value, T>
          <<<blocks_for(step.rows * parts, kWarps), kThreads, 0, stream>>>(
              step, static_cast<int>(query_parts), static_cast<int>(parts));
    });
  });
  check_launch("pack_heads");
}

}  // namespace leeway::cuda
