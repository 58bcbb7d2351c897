#include "cuda/norm_rope_swiglu.h"

#include <type_traits>

#include "cuda/device_math.cuh"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kNormThreads = 128;
constexpr int kNormTurns = 4;  // of a thread over a row that is held in registers

// kCount numbers side by side as float32; kCount is 8, 16-byte aligned, or 1.
template <int kCount, class T>
__device__ inline void load(const T* from, float* to) {
  if constexpr (kCount == 8) {
    const Eight<T> loaded = load_eight(from);
#pragma unroll
    for (int i = 0; i < 8; ++i) to[i] = wide(loaded.values[i]);
  } else {
    to[0] = wide(from[0]);
  }
}
template <int kCount, class T>
__device__ inline void store(const float* from, T* to) {
  if constexpr (kCount == 8) {
    Eight<T> stored;
#pragma unroll
    for (int i = 0; i < 8; ++i) stored.values[i] = narrow<T>(from[i]);
    const auto* source = reinterpret_cast<const uint4*>(&stored);
    auto* target = reinterpret_cast<uint4*>(to);
#pragma unroll
    for (unsigned i = 0; i < sizeof(stored) / sizeof(uint4); ++i) target[i] = source[i];
  } else {
    to[0] = narrow<T>(from[0]);
  }
}

// Calls body(count) with the numbers that one thread takes at a time, a constant.
template <class Body>
void with_count(int64_t numbers, Body&& body) {
  if (numbers % 8 == 0) {
    body(std::integral_constant<int, 8>());
  } else {
    body(std::integral_constant<int, 1>());
  }
}

// ---------------------------------------------------------------------------------------------
// The three formulas

// A row's squares are summed in an order that its width alone decides: a thread takes its numbers
// as they lie, then lanes, then warps.
template <int kCount>
__device__ inline float add_squares(const float* values, float sum) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) sum = fmaf(values[k], values[k], sum);
  return sum;
}
__device__ inline float inverse_norm(float squares, int64_t width, float eps) {
  return rsqrtf(squares / static_cast<float>(width) + eps);
}
template <class T>
__device__ inline float normed(float x, float inverse, float weight) {
  return rounded<T>(x * inverse) * weight;
}

__device__ inline void turn(float& a, float& b, float cosine, float sine) {
  const float first = a;
  a = fmaf(first, cosine, -b * sine);
  b = fmaf(b, cosine, first * sine);
}

template <class T>
__device__ inline float gated(float gate, float up) {
  return rounded<T>(gate / (1.0f + expf(-gate))) * up;
}

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

// One warp for a head: norm it as rms_norm does, turn its pairs (i, i + head_dim / 2) as rope does,
// write it. `shared` has room for a head.
template <class T>
__device__ void store_head(const T* from, const T* norm, float eps, const float* cosines,
                           const float* sines, int head_dim, float* shared, T* to) {
  constexpr int kCount = 8;
  const int half = head_dim / 2;
  const int lane = threadIdx.x % kWarp, first = lane * kCount;
  const bool there = first < head_dim;
  float values[kCount], weights[kCount];
  if (there) load<kCount>(from + first, values);
  if (norm != nullptr) {
    const float squares = warp_sum(there ? add_squares<kCount>(values, 0.0f) : 0.0f);
    const float inverse = inverse_norm(squares, head_dim, eps);
    if (there) {
      load<kCount>(norm + first, weights);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        values[k] = rounded<T>(normed<T>(values[k], inverse, weights[k]));
      }
    }
  }
  if (there) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) shared[first + k] = values[k];
  }
  __syncwarp();
  for (int i = lane; i < half; i += kWarp) {
    float a = shared[i], b = shared[i + half];
    turn(a, b, cosines[i], sines[i]);
    to[i] = narrow<T>(a);
    to[i + half] = narrow<T>(b);
  }
}

// A warp for each head of a row: blocks along y take kWarps heads each.
template <class T>
__global__ void store_heads_kernel(HeadStep step) {
  __shared__ float heads_of_warps[kWarps][kMostHeadDim];
  const int64_t row = blockIdx.x;
  const int position = step.places.positions[row];
  if (position < 0) return;
  const int head_dim = static_cast<int>(step.sizes.head_dim);
  const int query_heads = static_cast<int>(step.sizes.query_heads);
  const int kv_heads = static_cast<int>(step.sizes.kv_heads);
  const int heads = query_heads + 2 * kv_heads;
  const int64_t page = step.places.pages[step.places.starts[row] + position / kBlockKeys];
  const int64_t place = (page * kBlockKeys + position % kBlockKeys) * kv_heads * head_dim;
  const float* cosines = step.angles.cosines + static_cast<int64_t>(position) * (head_dim / 2);
  const float* sines = step.angles.sines + static_cast<int64_t>(position) * (head_dim / 2);
  const T* qkv = static_cast<const T*>(step.qkv) + row * heads * head_dim;
  T* q = static_cast<T*>(step.q) + row * query_heads * head_dim;
  T* keys = static_cast<T*>(step.keys) + place;
  T* values = static_cast<T*>(step.values) + place;
  const auto* query_norm = static_cast<const T*>(step.query_norm);
  const auto* key_norm = static_cast<const T*>(step.key_norm);
  const int warp = threadIdx.x / kWarp;
  float* shared = heads_of_warps[warp];
  const int head = static_cast<int>(blockIdx.y) * kWarps + warp;
  if (head >= heads) return;
  const T* from = qkv + head * head_dim;
  if (head < query_heads) {
    store_head(from, query_norm, step.eps, cosines, sines, head_dim, shared, q + head * head_dim);
  } else if (head < query_heads + kv_heads) {
    store_head(from, key_norm, step.eps, cosines, sines, head_dim, shared,
               keys + (head - query_heads) * head_dim);
  } else {
    T* to = values + (head - query_heads - kv_heads) * head_dim;
    for (int i = threadIdx.x % kWarp; i < head_dim; i += kWarp) to[i] = from[i];
  }
}

// One thread for kCount numbers; `parts` of them in a row, `count` in all.
template <int kCount, class T>
__global__ void swiglu_kernel(const T* gate, const T* up, int64_t stride, int64_t parts,
                              int64_t count, T* s) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const int64_t from = at / parts * stride + at % parts * kCount;
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
        kernel<<<blocks_for(norm.rows * row_threads, kNormThreads), kNormThreads, 0, stream>>>(
            norm);
      };
      if (norm.width <= kWarp * kCount) {
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
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t heads = step.sizes.query_heads + 2 * step.sizes.kv_heads;
    const dim3 grid(static_cast<unsigned>(step.places.rows), blocks_for(heads, kWarps));
    store_heads_kernel<T><<<grid, kThreads, 0, stream>>>(step);
  });
  check_launch("store_heads");
}

void swiglu(Dtype dtype, const void* gate, const void* up, int64_t stride, int64_t rows,
            int64_t width, void* s, cudaStream_t stream) {
  if (rows == 0 || width == 0) return;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    with_count(width, [&](auto numbers) {
      constexpr int kCount = decltype(numbers)::value;
      const int64_t parts = width / kCount;
      swiglu_kernel<kCount><<<blocks_for(rows * parts, kThreads), kThreads, 0, stream>>>(
          as<T>(gate), as<T>(up), stride, parts, rows * parts, static_cast<T*>(s));
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
