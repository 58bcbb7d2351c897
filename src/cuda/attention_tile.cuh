// What a warp does with one tile of keys and values that lie in shared memory, and how chunks of
// tiles are joined. Arithmetic that reaches a result is spelled in intrinsics, so that the compiler
// contracts it alike wherever it is inlined.
#pragma once

#include <cstdint>

#include "cuda/device_math.cuh"

namespace leeway::cuda {

inline constexpr int kTileKeys = 64;
inline constexpr int kChunkKeys = 512;

__device__ __forceinline__ float power_of_two(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

__device__ __forceinline__ void load_matrices(uint32_t* to, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrices_turned(uint32_t* to, uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}
// c [16, 8] += a [16, 16] b [16, 8]
__device__ __forceinline__ void multiply_add(float* c, const uint32_t* a, uint32_t b0,
                                             uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ uint32_t pair_of(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// A tile [kTileKeys, kDim] of bf16 in shared memory, in pieces of 16 bytes. The pieces of a key are
// permuted so that the eight rows of a matrix lie in different banks.
template <int kDim>
struct TileLayout {
  static constexpr int kPieces = kDim / 8;
  static constexpr int kBytes = kTileKeys * kDim * 2;
  __device__ static __forceinline__ uint32_t place(uint32_t tile, int key, int piece) {
    constexpr int kShared = kPieces >= 8 ? 1 : 8 / kPieces;  // keys in 128 bytes
    constexpr int kMask = kPieces >= 8 ? 7 : kPieces - 1;
    return tile + static_cast<uint32_t>(key * kPieces + (piece ^ (key / kShared & kMask))) * 16;
  }
};

// Rows g = lane / 4 and g + 8 of a warp's 16: what the keys of a chunk so far give. A lane has the
// dimensions 8 n + 2 (lane % 4) and the next of both rows; its sums are of its own keys.
template <int kDim>
struct ChunkState {
  float out[kDim / 8][4];
  float most[2], sum[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;
    }
    most[0] = most[1] = -INFINITY;
    sum[0] = sum[1] = 0.0f;
  }
};

// The value of all four lanes of a row.
__device__ __forceinline__ float row_largest(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// A tile's scores become weights. `most` and `sum` of the lane's two rows are those of the chunk
// before and after the tile; what the chunk has given so far is to be multiplied by `shrink`. The
// tile's keys begin at position `first`; `last` are the last positions that the rows see. `scale`
// is log2(e) over the root of the head's dimensions.
__device__ __forceinline__ void weigh_tile(float (&scores)[kTileKeys / 8][4], int first,
                                           const int* last, float scale, float* most, float* sum,
                                           float* shrink) {
  if (first + kTileKeys - 1 > min(last[0], last[1])) {
#pragma unroll
    for (int n = 0; n < kTileKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + n * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i % 2 > last[i / 2]) {
          scores[n][i] = -INFINITY;
        }
      }
    }
  }

#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = most[r];
#pragma unroll
    for (int n = 0; n < kTileKeys / 8; ++n) {
      largest = fmaxf(largest, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
    }
    largest = row_largest(largest);
    // A row that has seen nothing yet has weights of zero.
    const float base = largest == -INFINITY ? 0.0f : largest;
    shrink[r] = power_of_two(__fmul_rn(__fsub_rn(most[r], base), scale));
    most[r] = largest;
    float of_tile = 0.0f;
#pragma unroll
    for (int n = 0; n < kTileKeys / 8; ++n) {
      float &low = scores[n][2 * r], &high = scores[n][2 * r + 1];
      low = power_of_two(__fmul_rn(__fsub_rn(low, base), scale));
      high = power_of_two(__fmul_rn(__fsub_rn(high, base), scale));
      of_tile = __fadd_rn(of_tile, __fadd_rn(low, high));
    }
    sum[r] = __fmaf_rn(sum[r], shrink[r], of_tile);
  }
}

// The weights in bf16, as a product with the values takes them.
__device__ __forceinline__ void pack_weights(const float (&weights)[kTileKeys / 8][4],
                                             uint32_t (&packed)[kTileKeys / 16][4]) {
#pragma unroll
  for (int n = 0; n < kTileKeys / 8; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      packed[n / 2][n % 2 * 2 + r] = pair_of(weights[n][2 * r], weights[n][2 * r + 1]);
    }
  }
}

template <int kDim>
__device__ __forceinline__ void shrink_out(ChunkState<kDim>& state, const float* shrink) {
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) state.out[n][i] = __fmul_rn(state.out[n][i], shrink[i / 2]);
  }
}

// A tile by a warp's own products. `query(k, words)` gives columns 16 k .. 16 k + 15 of the 16
// rows' queries; the rest is as above.
template <int kDim, class Query>
__device__ __forceinline__ void attend_tile(ChunkState<kDim>& state, const Query& query,
                                            uint32_t keys, uint32_t values, int first,
                                            const int* last, float scale) {
  using Layout = TileLayout<kDim>;
  const int lane = threadIdx.x % kWarp;
  float scores[kTileKeys / 8][4];
#pragma unroll
  for (int n = 0; n < kTileKeys / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
  }
  const int key_row = lane / 16 * 8 + lane % 8, key_piece = lane / 8 % 2;
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    uint32_t words[4];
    query(k, words);
#pragma unroll
    for (int n = 0; n < kTileKeys / 16; ++n) {
      uint32_t b[4];
      load_matrices(b, Layout::place(keys, n * 16 + key_row, 2 * k + key_piece));
      multiply_add(scores[2 * n], words, b[0], b[1]);
      multiply_add(scores[2 * n + 1], words, b[2], b[3]);
    }
  }

  float shrink[2];
  uint32_t weights[kTileKeys / 16][4];
  weigh_tile(scores, first, last, scale, state.most, state.sum, shrink);
  pack_weights(scores, weights);
  shrink_out(state, shrink);

  const int value_row = lane / 8 % 2 * 8 + lane % 8, value_piece = lane / 16;
#pragma unroll
  for (int k = 0; k < kTileKeys / 16; ++k) {
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      uint32_t b[4];
      load_matrices_turned(b, Layout::place(values, k * 16 + value_row, 2 * n + value_piece));
      multiply_add(state.out[2 * n], weights[k], b[0], b[1]);
      multiply_add(state.out[2 * n + 1], weights[k], b[2], b[3]);
    }
  }
}

// What chunks before have given, and how the next one is joined to it.
struct JoinFactors {
  float total, chunk;
};
__device__ __forceinline__ JoinFactors join_largest(float& most, float chunk_most, float scale) {
  const float larger = fmaxf(most, chunk_most);
  const float base = larger == -INFINITY ? 0.0f : larger;
  const JoinFactors factors = {power_of_two(__fmul_rn(__fsub_rn(most, base), scale)),
                               power_of_two(__fmul_rn(__fsub_rn(chunk_most, base), scale))};
  most = larger;
  return factors;
}
__device__ __forceinline__ float joined(float total, float chunk, const JoinFactors& factors) {
  return __fmaf_rn(chunk, factors.chunk, __fmul_rn(total, factors.total));
}
__device__ __forceinline__ float log_sum(float most, float sum, float scale) {
  return __fmul_rn(__fadd_rn(__fmul_rn(most, scale), log2f(sum)), kLn2);
}

}  // namespace leeway::cuda
