#include <type_traits>

#include "cuda/device_math.cuh"
#include "cuda/training_rows.h"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

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

// One warp for a row.
template <int kCount, class T>
__global__ void norm_kernel(const T* x, int64_t rows, int64_t width, const T* weight, float eps,
                            T* y, float* inverse) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (row >= rows) return;
  const int64_t first = (threadIdx.x % kWarp) * kCount;
  x += row * width;
  y += row * width;
  float values[kCount], weights[kCount];
  float squares = 0.0f;
  for (int64_t i = first; i < width; i += kWarp * kCount) {
    load<kCount>(x + i, values);
#pragma unroll
    for (int k = 0; k < kCount; ++k) squares += values[k] * values[k];
  }
  const float scale = rsqrtf(warp_sum(squares) / static_cast<float>(width) + eps);
  if (first == 0) inverse[row] = scale;
  for (int64_t i = first; i < width; i += kWarp * kCount) {
    load<kCount>(x + i, values);
    load<kCount>(weight + i, weights);
#pragma unroll
    for (int k = 0; k < kCount; ++k) values[k] = rounded<T>(values[k] * scale) * weights[k];
    store<kCount>(values, y + i);
  }
}

// One thread for kCount pairs of a head.
template <int kCount, class T>
__global__ void turn_kernel(const T* x, int64_t count, int64_t heads, int64_t half,
                            const float* cosines, const float* sines, float sign, T* y) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const int64_t parts = half / kCount;
  const int64_t head = at / parts, i = at % parts * kCount;
  const int64_t angle = head / heads * half + i;
  float a[kCount], b[kCount], c[kCount], s[kCount];
  load<kCount>(x + head * 2 * half + i, a);
  load<kCount>(x + head * 2 * half + half + i, b);
  load<kCount>(cosines + angle, c);
  load<kCount>(sines + angle, s);
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const float sine = sign * s[k], first = a[k];
    a[k] = first * c[k] - b[k] * sine;
    b[k] = b[k] * c[k] + first * sine;
  }
  store<kCount>(a, y + head * 2 * half + i);
  store<kCount>(b, y + head * 2 * half + half + i);
}

template <int kCount, class T>
__global__ void gate_forward_kernel(const T* gate, const T* up, int64_t parts, T* s) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= parts) return;
  float g[kCount], u[kCount];
  load<kCount>(gate + at * kCount, g);
  load<kCount>(up + at * kCount, u);
#pragma unroll
  for (int k = 0; k < kCount; ++k) g[k] = rounded<T>(g[k] / (1.0f + expf(-g[k]))) * u[k];
  store<kCount>(g, s + at * kCount);
}

template <int kCount, class T>
__global__ void gate_backward_kernel(const T* gate, const T* up, const T* d_s, int64_t parts,
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

// Calls body(count) with the numbers that one thread takes at a time, a constant.
template <class Body>
void with_count(int64_t numbers, Body&& body) {
  if (numbers % 8 == 0) {
    body(std::integral_constant<int, 8>());
  } else {
    body(std::integral_constant<int, 1>());
  }
}

template <class T>
const T* as(const void* data) {
  return static_cast<const T*>(data);
}

}  // namespace

void norm_rows(Number number, const void* x, int64_t rows, int64_t width, const void* weight,
               float eps, void* y, float* inverse, cudaStream_t stream) {
  if (rows == 0) return;
  with_type(number, [&](auto zero) {
    using T = decltype(zero);
    with_count(width, [&](auto count) {
      norm_kernel<decltype(count)::value><<<blocks_for(rows, kWarps), kThreads, 0, stream>>>(
          as<T>(x), rows, width, as<T>(weight), eps, static_cast<T*>(y), inverse);
    });
  });
  check_launch("norm_rows");
}

void turn_rows(Number number, const void* x, int64_t rows, int64_t heads, int64_t head_dim,
               const float* cosines, const float* sines, bool back, void* y, cudaStream_t stream) {
  if (rows == 0) return;
  const int64_t half = head_dim / 2;
  with_type(number, [&](auto zero) {
    using T = decltype(zero);
    with_count(half, [&](auto count) {
      constexpr int kCount = decltype(count)::value;
      const int64_t parts = rows * heads * (half / kCount);
      turn_kernel<kCount><<<blocks_for(parts, kThreads), kThreads, 0, stream>>>(
          as<T>(x), parts, heads, half, cosines, sines, back ? -1.0f : 1.0f, static_cast<T*>(y));
    });
  });
  check_launch("turn_rows");
}

void gate_forward(Number number, const void* gate, const void* up, int64_t count, void* s,
                  cudaStream_t stream) {
  if (count == 0) return;
  with_type(number, [&](auto zero) {
    using T = decltype(zero);
    with_count(count, [&](auto numbers) {
      constexpr int kCount = decltype(numbers)::value;
      gate_forward_kernel<kCount><<<blocks_for(count / kCount, kThreads), kThreads, 0, stream>>>(
          as<T>(gate), as<T>(up), count / kCount, static_cast<T*>(s));
    });
  });
  check_launch("gate_forward");
}

void gate_backward(Number number, const void* gate, const void* up, const void* d_s, int64_t count,
                   void* d_gate, void* d_up, cudaStream_t stream) {
  if (count == 0) return;
  with_type(number, [&](auto zero) {
    using T = decltype(zero);
    with_count(count, [&](auto numbers) {
      constexpr int kCount = decltype(numbers)::value;
      gate_backward_kernel<kCount><<<blocks_for(count / kCount, kThreads), kThreads, 0, stream>>>(
          as<T>(gate), as<T>(up), as<T>(d_s), count / kCount, static_cast<T*>(d_gate),
          static_cast<T*>(d_up));
    });
  });
  check_launch("gate_backward");
}

}  // namespace leeway::cuda
