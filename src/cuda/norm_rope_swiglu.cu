#include "cuda/norm_rope_swiglu.h"

#include "cuda/early_launch.cuh"
#include "cuda/pack_heads.h"
#include "cuda/row_math.cuh"
#include "cuda/store_head.cuh"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kNormThreads = 128;
constexpr int64_t kManyRows = 4096;  // that fill a device with a warp each
constexpr int kNormTurns = 4;        // of a thread over a row that is held in registers

// ---------------------------------------------------------------------------------------------
// Kernels

template <class T>
__global__ void embed_kernel(const T* table, const int32_t* ids, int64_t width, T* x) {
  const T* from = table + ids[blockIdx.x] * width;
  T* to = x + blockIdx.x * width;
  for (int64_t i = threadIdx.x; i < width; i += kThreads) to[i] = from[i];
}

// x + delta as it would be stored.
template <int kCount, class T>
__device__ inline void load_sum(const T* x, const T* delta, int64_t i, float* values) {
  load<kCount>(x + i, values);
  if (delta == nullptr) return;
  float deltas[kCount];
  load<kCount>(delta + i, deltas);
#pragma unroll
  for (int k = 0; k < kCount; ++k) values[k] = rounded<T>(values[k] + deltas[k]);
}

// kRowThreads threads for a row: a warp where the row is narrow, else the block. A thread takes
// kCount numbers at a time, kRowThreads * kCount apart. With kHeld the row is held in registers,
// else it is read twice: where the sum overwrites x, a thread reads again what it has itself
// written.
template <int kCount, int kRowThreads, bool kHeld, class T>
__global__ void __launch_bounds__(kNormThreads) rms_norm_kernel(RmsNorm norm) {
  constexpr int kStride = kRowThreads * kCount;
  constexpr int kTurns = kRowThreads == kWarp ? 1 : kNormTurns;
  __shared__ float scratch[kNormThreads / kWarp];
  wait_for_earlier_kernels();
  let_next_kernel_begin();
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kNormThreads / kRowThreads) + threadIdx.x / kRowThreads;
  if (row >= norm.rows) return;  // a whole warp, or nobody
  const int64_t width = norm.width, from = norm.chosen != nullptr ? norm.chosen[row] : row;
  const T* x = static_cast<const T*>(norm.x) + from * width;
  const T* delta = static_cast<const T*>(norm.delta);
  if (delta != nullptr) delta += from * width;
  T* sum = static_cast<T*>(norm.sum);
  if (sum != nullptr) sum += row * width;
  const T* weight = static_cast<const T*>(norm.weight);
  T* y = static_cast<T*>(norm.y) + row * width;

  const int64_t first = threadIdx.x % kRowThreads * kCount;
  float values[kHeld ? kTurns : 1][kCount];
  float squares = 0.0f;
  const auto add = [&](int64_t i, float* here) {
    load_sum<kCount>(x, delta, i, here);
    if (sum != nullptr) store<kCount>(here, sum + i);
    squares = add_squares<kCount>(here, squares);
  };
  const auto finish = [&](int64_t i, float* here, float inverse) {
    float weights[kCount];
    load<kCount>(weight + i, weights);
#pragma unroll
    for (int k = 0; k < kCount; ++k) here[k] = normed<T>(here[k], inverse, weights[k]);
    store<kCount>(here, y + i);
  };

  if constexpr (kHeld) {
#pragma unroll
    for (int n = 0; n < kTurns; ++n) {
      if (first + n * kStride < width) add(first + n * kStride, values[n]);
    }
  } else {
    for (int64_t i = first; i < width; i += kStride) add(i, values[0]);
  }
  if constexpr (kRowThreads == kWarp) {
    squares = warp_sum(squares);
  } else {
    squares = block_sum<kNormThreads>(squares, scratch);
  }
  const float inverse = inverse_norm(squares, width, norm.eps);
  if (norm.inverse != nullptr && first == 0) norm.inverse[row] = inverse;
  if constexpr (kHeld) {
#pragma unroll
    for (int n = 0; n < kTurns; ++n) {
      if (first + n * kStride < width) finish(first + n * kStride, values[n], inverse);
    }
  } else {
    for (int64_t i = first; i < width; i += kStride) {
      if (sum != nullptr) {
        load<kCount>(sum + i, values[0]);
      } else {
        load_sum<kCount>(x, delta, i, values[0]);
      }
      finish(i, values[0], inverse);
    }
  }
}

// The same bits, for many rows of up to kPieces times kPieceColumns: a warp for a row, which waits
// for no other. A piece has what a warp of the block above has.
constexpr int kPieceColumns = 8 * kWarp;
template <int kPieces, class T>
__global__ void __launch_bounds__(kNormThreads) many_norms_kernel(RmsNorm norm) {
  wait_for_earlier_kernels();
  let_next_kernel_begin();
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kNormThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= norm.rows) return;
  const int64_t from = norm.chosen != nullptr ? norm.chosen[row] : row;
  const int width = static_cast<int>(norm.width);
  const int first = static_cast<int>(threadIdx.x) % kWarp * 8;
  const T* x = static_cast<const T*>(norm.x) + from * width;
  const T* delta = static_cast<const T*>(norm.delta);
  Loaded<8, T> loaded[kPieces], deltas[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int column = first + p * kPieceColumns;
    loaded[p].clear(), deltas[p].clear();
    if (column >= width) continue;
    loaded[p].load(x + column);
    if (delta != nullptr) deltas[p].load(delta + from * width + column);
  }
  float values[kPieces][8], squares[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      values[p][k] = loaded[p].at(k);
      if (delta != nullptr) values[p][k] = rounded<T>(values[p][k] + deltas[p].at(k));
    }
    const int column = first + p * kPieceColumns;
    if (norm.sum != nullptr && column < width) {
      store<8>(values[p], static_cast<T*>(norm.sum) + row * width + column);
    }
    squares[p] = add_squares<8>(values[p], 0.0f);
  }
  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) sum += warp_sum(squares[p]);
  const float inverse = inverse_norm(sum, width, norm.eps);
  if (norm.inverse != nullptr && first == 0) norm.inverse[row] = inverse;
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int column = first + p * kPieceColumns;
    if (column >= width) continue;
    float weights[8];
    load<8>(static_cast<const T*>(norm.weight) + column, weights);
#pragma unroll
    for (int k = 0; k < 8; ++k) values[p][k] = normed<T>(values[p][k], inverse, weights[k]);
    store<8>(values[p], static_cast<T*>(norm.y) + row * width + column);
  }
}

// One thread for kCount pairs of a head.
template <int kCount, class T>
__global__ void rope_kernel(const T* x, int64_t count, int64_t heads, int64_t half,
                            const int32_t* positions, RopeAngles angles, float sign, T* y) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const int64_t parts = half / kCount;
  const int64_t head = at / parts, i = at % parts * kCount;
  const int64_t angle = positions[head / heads] * half + i;
  float a[kCount], b[kCount], c[kCount], s[kCount];
  load<kCount>(x + head * 2 * half + i, a);
  load<kCount>(x + head * 2 * half + half + i, b);
  load<kCount>(angles.cosines + angle, c);
  load<kCount>(angles.sines + angle, s);
#pragma unroll
  for (int k = 0; k < kCount; ++k) turn(a[k], b[k], c[k], sign * s[k]);
  store<kCount>(a, y + head * 2 * half + i);
  store<kCount>(b, y + head * 2 * half + half + i);
}

// A warp for kHeadsAtOnce heads of a row: their loads are under way together, and the row's angles
// are read once.
template <int kMostDim, int kHeadsAtOnce, class T>
__global__ void __launch_bounds__(kThreads) store_heads_kernel(HeadStep step) {
  wait_for_earlier_kernels();
  let_next_kernel_begin();
  const int head_dim = static_cast<int>(step.sizes.head_dim), half = head_dim / 2;
  const int query_heads = static_cast<int>(step.sizes.query_heads);
  const int kv_heads = static_cast<int>(step.sizes.kv_heads);
  const int heads = query_heads + 2 * kv_heads;
  const int groups = (heads + kHeadsAtOnce - 1) / kHeadsAtOnce;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const int64_t row = at / groups;
  const int first = static_cast<int>(at % groups) * kHeadsAtOnce;
  if (row >= step.places.rows) return;
  const int position = step.places.positions[row];
  if (position < 0) return;
  const T* from = static_cast<const T*>(step.qkv) + (row * heads + first) * head_dim;
  HeldHead<kMostDim> held[kHeadsAtOnce], angles;
#pragma unroll
  for (int i = 0; i < kHeadsAtOnce; ++i) {
    if (first + i < heads) held[i].load(from + i * head_dim, half);
  }
  const int64_t angle = static_cast<int64_t>(position) * half;
  angles.load_angles(step.angles.cosines + angle, step.angles.sines + angle, half);
  const int64_t page = step.places.pages[step.places.starts[row] + position / kBlockKeys];
  const int64_t place = (page * kBlockKeys + position % kBlockKeys) * kv_heads * head_dim;
#pragma unroll
  for (int i = 0; i < kHeadsAtOnce; ++i) {
    const int head = first + i;
    if (head >= heads) return;
    if (head < query_heads + kv_heads) {
      const void* norm = head < query_heads ? step.query_norm : step.key_norm;
      held[i].scale(static_cast<const T*>(norm), step.eps, half);
      held[i].turn_by(angles);
    }
    T* to = nullptr;
    if (head < query_heads) {
      to = static_cast<T*>(step.q) + (row * query_heads + head) * head_dim;
    } else if (head < query_heads + kv_heads) {
      to = static_cast<T*>(step.keys) + place + (head - query_heads) * head_dim;
    } else {
      to = static_cast<T*>(step.values) + place + (head - query_heads - kv_heads) * head_dim;
    }
    held[i].store(half, to);
  }
}

// The same with queries and keys of a row side by side.
template <class T>
__global__ void pack_heads_kernel(PackedHeads step) {
  const int head_dim = static_cast<int>(step.sizes.head_dim);
  const int query_heads = static_cast<int>(step.sizes.query_heads);
  const int kv_heads = static_cast<int>(step.sizes.kv_heads);
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const int64_t row = at / (query_heads + kv_heads);
  const int head = static_cast<int>(at % (query_heads + kv_heads));
  if (row >= step.rows) return;
  const bool query = head < query_heads;
  const int64_t angle = static_cast<int64_t>(step.positions[row]) * (head_dim / 2);
  store_head(
      static_cast<const T*>(step.qkv) + (row * (query_heads + 2 * kv_heads) + head) * head_dim,
      static_cast<const T*>(query ? step.query_norm : step.key_norm), step.eps,
      step.angles.cosines + angle, step.angles.sines + angle, head_dim,
      query ? static_cast<T*>(step.q) + (row * query_heads + head) * head_dim
            : static_cast<T*>(step.k) + (row * kv_heads + head - query_heads) * head_dim);
}

// One thread for kCount numbers; `parts` of them in a row, `count` in all.
template <int kCount, class T>
__global__ void swiglu_kernel(const T* gate, const T* up, int64_t stride, int64_t parts,
                              int64_t count, T* s) {
  wait_for_earlier_kernels();
  let_next_kernel_begin();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  // The device has no division of 64 bits: it is many instructions, and 32 bits nearly always do.
  const int64_t row =
      count >> 32 == 0 ? static_cast<unsigned>(at) / static_cast<unsigned>(parts) : at / parts;
  const int64_t from = row * stride + (at - row * parts) * kCount;
  float g[kCount], u[kCount];
  load<kCount>(gate + from, g);
  load<kCount>(up + from, u);
#pragma unroll
  for (int k = 0; k < kCount; ++k) g[k] = gated<T>(g[k], u[k]);
  store<kCount>(g, s + at * kCount);
}

template <int kCount, class T>
__global__ void swiglu_backward_kernel(const T* gate, const T* up, const T* d_s, int64_t parts,
                                       T* d_gate, T* d_up) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= parts) return;
  float g[kCount], u[kCount], d[kCount];
  load<kCount>(gate + at * kCount, g);
  load<kCount>(up + at * kCount, u);
  load<kCount>(d_s + at * kCount, d);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const float share = 1.0f / (1.0f + expf(-g[k]));
    const float by_gate = d[k] * u[k] * share * (1.0f + g[k] * (1.0f - share));
    u[k] = d[k] * g[k] * share;
    g[k] = by_gate;
  }
  store<kCount>(g, d_gate + at * kCount);
  store<kCount>(u, d_up + at * kCount);
}

template <class T>
const T* as(const void* data) {
  return static_cast<const T*>(data);
}

}  // namespace

void embed_rows(Dtype dtype, const void* table, const int32_t* ids, int64_t rows, int64_t width,
                void* x, cudaStream_t stream) {
  if (rows == 0) return;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    embed_kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(as<T>(table), ids, width,
                                                                       static_cast<T*>(x));
  });
  check_launch("embed_rows");
}

void rms_norm(Dtype dtype, const RmsNorm& norm, cudaStream_t stream) {
  if (norm.rows == 0) return;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    with_count(norm.width, [&](auto numbers) {
      constexpr int kCount = decltype(numbers)::value;
      const auto launch = [&](auto* kernel, int row_threads) {
        launch_early(kernel, blocks_for(norm.rows * row_threads, kNormThreads), kNormThreads, 0,
                     stream, norm);
      };
      if (kCount == 8 && norm.rows >= kManyRows && norm.width <= 4 * kPieceColumns) {
        if (norm.width <= 2 * kPieceColumns) {
          launch(many_norms_kernel<2, T>, kWarp);
        } else {
          launch(many_norms_kernel<4, T>, kWarp);
        }
      } else if (norm.width <= kWarp * kCount) {
        launch(rms_norm_kernel<kCount, kWarp, true, T>, kWarp);
      } else if (norm.width <= kNormTurns * kNormThreads * kCount) {
        launch(rms_norm_kernel<kCount, kNormThreads, true, T>, kNormThreads);
      } else {
        launch(rms_norm_kernel<kCount, kNormThreads, false, T>, kNormThreads);
      }
    });
  });
  check_launch("rms_norm");
}

void rope(Dtype dtype, const void* x, int64_t rows, int64_t heads, int64_t head_dim,
          const int32_t* positions, const RopeAngles& angles, bool back, void* y,
          cudaStream_t stream) {
  if (rows == 0) return;
  const int64_t half = head_dim / 2;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    with_count(half, [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      const int64_t parts = rows * heads * (half / kCount);
      rope_kernel<kCount><<<blocks_for(parts, kThreads), kThreads, 0, stream>>>(
          as<T>(x), parts, heads, half, positions, angles, back ? -1.0f : 1.0f, static_cast<T*>(y));
    });
  });
  check_launch("rope");
}

void store_heads(Dtype dtype, const HeadStep& step, cudaStream_t stream) {
  if (step.places.rows == 0) return;
  if (packs_side_by_side(step.sizes.head_dim)) {
    store_heads_side_by_side(dtype, step, stream);
    return check_launch("store_heads");
  }
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const HeadSizes& sizes = step.sizes;
    const int64_t heads = sizes.query_heads + 2 * sizes.kv_heads;
    const auto launch = [&](auto* kernel, int64_t at_once) {
      const int64_t warps = step.places.rows * ((heads + at_once - 1) / at_once);
      launch_early(kernel, blocks_for(warps, kWarps), kThreads, 0, stream, step);
    };
    // With few rows a warp for each head is on more multiprocessors.
    constexpr int kWide = static_cast<int>(kMostHeadDim);
    const bool few = step.places.rows < 1024;
    if (sizes.head_dim <= 128) {
      few ? launch(store_heads_kernel<128, 1, T>, 1) : launch(store_heads_kernel<128, 4, T>, 4);
    } else {
      few ? launch(store_heads_kernel<kWide, 1, T>, 1) : launch(store_heads_kernel<kWide, 4, T>, 4);
    }
  });
  check_launch("store_heads");
}

void pack_heads(Dtype dtype, const PackedHeads& step, cudaStream_t stream) {
  if (step.rows == 0) return;
  if (packs_side_by_side(step.sizes.head_dim)) {
    pack_heads_side_by_side(dtype, step, stream);
    return check_launch("pack_heads");
  }
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t heads = step.rows * (step.sizes.query_heads + step.sizes.kv_heads);
    pack_heads_kernel<T><<<blocks_for(heads, kWarps), kThreads, 0, stream>>>(step);
  });
  check_launch("pack_heads");
}

void swiglu(Dtype dtype, const void* gate, const void* up, int64_t stride, int64_t rows,
            int64_t width, void* s, cudaStream_t stream) {
  if (rows == 0 || width == 0) return;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    with_count(width, [&](auto numbers) {
      constexpr int kCount = decltype(numbers)::value;
      const int64_t parts = width / kCount;
      launch_early(swiglu_kernel<kCount, T>, blocks_for(rows * parts, kThreads), kThreads, 0,
                   stream, as<T>(gate), as<T>(up), stride, parts, rows * parts, static_cast<T*>(s));
    });
  });
  check_launch("swiglu");
}

void swiglu_backward(Dtype dtype, const void* gate, const void* up, const void* d_s, int64_t count,
                     void* d_gate, void* d_up, cudaStream_t stream) {
  if (count == 0) return;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    with_count(count, [&](auto numbers) {
      constexpr int kCount = decltype(numbers)::value;
      swiglu_backward_kernel<kCount><<<blocks_for(count / kCount, kThreads), kThreads, 0, stream>>>(
          as<T>(gate), as<T>(up), as<T>(d_s), count / kCount, static_cast<T*>(d_gate),
          static_cast<T*>(d_up));
    });
  });
  check_launch("swiglu_backward");
}

}  // namespace leeway::cuda
