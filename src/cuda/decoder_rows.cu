#include "cuda/decoder_rows.h"
#include "cuda/device_math.cuh"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMostPairs = kMostHeadDim / 2 / kWarp;  // of a head, for each lane

template <class T>
__global__ void embed_kernel(const T* table, const int32_t* ids, int64_t width, T* x) {
  const T* from = table + ids[blockIdx.x] * width;
  T* to = x + blockIdx.x * width;
  for (int64_t i = threadIdx.x; i < width; i += kThreads) to[i] = from[i];
}

// One block per row. In the second pass each thread reads only what it wrote itself in the first.
template <class T>
__global__ void add_rms_norm_kernel(T* x, const T* delta, int64_t width, const T* weight, float eps,
                                    T* y) {
  __shared__ float scratch[kThreads / kWarp];
  x += blockIdx.x * width;
  y += blockIdx.x * width;
  if (delta != nullptr) delta += blockIdx.x * width;
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < width; i += kThreads) {
    float value = wide(x[i]);
    if (delta != nullptr) {
      value = rounded<T>(value + wide(delta[i]));
      x[i] = narrow<T>(value);
    }
    squares += value * value;
  }
  const float mean = block_sum<kThreads>(squares, scratch) / static_cast<float>(width);
  const float inverse = rsqrtf(mean + eps);
  for (int64_t i = threadIdx.x; i < width; i += kThreads) {
    y[i] = narrow<T>(rounded<T>(wide(x[i]) * inverse) * wide(weight[i]));
  }
}

template <class T>
__global__ void chosen_rms_norm_kernel(const T* x, const T* delta, const int32_t* chosen,
                                       int64_t width, const T* weight, float eps, T* y) {
  __shared__ float scratch[kThreads / kWarp];
  const int64_t row = chosen[blockIdx.x];
  x += row * width;
  delta += row * width;
  y += blockIdx.x * width;
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < width; i += kThreads) {
    const float value = rounded<T>(wide(x[i]) + wide(delta[i]));
    squares += value * value;
  }
  const float mean = block_sum<kThreads>(squares, scratch) / static_cast<float>(width);
  const float inverse = rsqrtf(mean + eps);
  for (int64_t i = threadIdx.x; i < width; i += kThreads) {
    const float value = rounded<T>(wide(x[i]) + wide(delta[i]));
    y[i] = narrow<T>(rounded<T>(value * inverse) * wide(weight[i]));
  }
}

// One warp per head: apply the norm, rotate the pairs (i, i + head_dim / 2), write it.
template <class T>
__device__ void turn_head(const T* from, const T* norm, float eps, const float* cosines,
                          const float* sines, int head_dim, T* to) {
  const int half = head_dim / 2;
  const int lane = threadIdx.x % kWarp;
  float a[kMostPairs], b[kMostPairs];
  float squares = 0.0f;
#pragma unroll
  for (int n = 0; n < kMostPairs; ++n) {
    const int i = lane + n * kWarp;
    a[n] = i < half ? wide(from[i]) : 0.0f;
    b[n] = i < half ? wide(from[i + half]) : 0.0f;
    squares += a[n] * a[n] + b[n] * b[n];
  }
  float inverse = 1.0f;
  if (norm != nullptr) inverse = rsqrtf(warp_sum(squares) / static_cast<float>(head_dim) + eps);
#pragma unroll
  for (int n = 0; n < kMostPairs; ++n) {
    const int i = lane + n * kWarp;
    if (i >= half) continue;
    if (norm != nullptr) {
      a[n] = rounded<T>(rounded<T>(a[n] * inverse) * wide(norm[i]));
      b[n] = rounded<T>(rounded<T>(b[n] * inverse) * wide(norm[i + half]));
    }
    to[i] = narrow<T>(a[n] * cosines[i] - b[n] * sines[i]);
    to[i + half] = narrow<T>(b[n] * cosines[i] + a[n] * sines[i]);
  }
}

// One block per row; the warps share its heads.
template <class T>
__global__ void store_heads_kernel(HeadStep step) {
  const int64_t row = blockIdx.x;
  const int position = step.places.positions[row];
  if (position < 0) return;
  const int head_dim = static_cast<int>(step.sizes.head_dim);
  const int query_heads = static_cast<int>(step.sizes.query_heads);
  const int kv_heads = static_cast<int>(step.sizes.kv_heads);
  const int heads = query_heads + 2 * kv_heads;
  const int64_t page = step.places.pages[step.places.starts[row] + position / kPageKeys];
  const int64_t place = (page * kPageKeys + position % kPageKeys) * kv_heads * head_dim;
  const float* cosines = step.cosines + static_cast<int64_t>(position) * (head_dim / 2);
  const float* sines = step.sines + static_cast<int64_t>(position) * (head_dim / 2);
  const T* qkv = static_cast<const T*>(step.qkv) + row * heads * head_dim;
  T* q = static_cast<T*>(step.q) + row * query_heads * head_dim;
  T* keys = static_cast<T*>(step.keys) + place;
  T* values = static_cast<T*>(step.values) + place;
  const auto* query_norm = static_cast<const T*>(step.query_norm);
  const auto* key_norm = static_cast<const T*>(step.key_norm);
  for (int head = threadIdx.x / kWarp; head < heads; head += kThreads / kWarp) {
    const T* from = qkv + head * head_dim;
    if (head < query_heads) {
      turn_head(from, query_norm, step.eps, cosines, sines, head_dim, q + head * head_dim);
    } else if (head < query_heads + kv_heads) {
      turn_head(from, key_norm, step.eps, cosines, sines, head_dim,
                keys + (head - query_heads) * head_dim);
    } else {
      T* to = values + (head - query_heads - kv_heads) * head_dim;
      for (int i = threadIdx.x % kWarp; i < head_dim; i += kWarp) to[i] = from[i];
    }
  }
}

template <class T>
__global__ void gate_kernel(const T* gate_up, int64_t count, int64_t width, T* s) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const int64_t row = at / width, i = at % width;
  const float gate = wide(gate_up[row * 2 * width + i]);
  const float up = wide(gate_up[row * 2 * width + width + i]);
  s[at] = narrow<T>(rounded<T>(gate / (1.0f + expf(-gate))) * up);
}

__global__ void copy_pages_kernel(uint4* pages, int64_t store_words, int64_t page_words,
                                  const int32_t* pairs) {
  uint4* store = pages + blockIdx.y * store_words;
  const uint4* from = store + pairs[2 * blockIdx.x] * page_words;
  uint4* to = store + pairs[2 * blockIdx.x + 1] * page_words;
  for (int64_t i = threadIdx.x; i < page_words; i += kThreads) to[i] = from[i];
}

}  // namespace

void embed_rows(Number number, const void* table, const int32_t* ids, int64_t rows, int64_t width,
                void* x, cudaStream_t stream) {
  if (rows == 0) return;
  with_type(number, [&](auto type) {
    using T = decltype(type);
    embed_kernel<T><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
        static_cast<const T*>(table), ids, width, static_cast<T*>(x));
  });
  check_launch("embed_rows");
}

void add_rms_norm(Number number, void* x, const void* delta, int64_t rows, int64_t width,
                  const void* weight, float eps, void* y, cudaStream_t stream) {
  if (rows == 0) return;
  with_type(number, [&](auto type) {
    using T = decltype(type);
    add_rms_norm_kernel<T><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
        static_cast<T*>(x), static_cast<const T*>(delta), width, static_cast<const T*>(weight), eps,
        static_cast<T*>(y));
  });
  check_launch("add_rms_norm");
}

void chosen_rms_norm(Number number, const void* x, const void* delta, const int32_t* chosen,
                     int64_t count, int64_t width, const void* weight, float eps, void* y,
                     cudaStream_t stream) {
  if (count == 0) return;
  with_type(number, [&](auto type) {
    using T = decltype(type);
    chosen_rms_norm_kernel<T><<<static_cast<unsigned>(count), kThreads, 0, stream>>>(
        static_cast<const T*>(x), static_cast<const T*>(delta), chosen, width,
        static_cast<const T*>(weight), eps, static_cast<T*>(y));
  });
  check_launch("chosen_rms_norm");
}

void store_heads(Number number, const HeadStep& step, cudaStream_t stream) {
  if (step.places.rows == 0) return;
  with_type(number, [&](auto type) {
    using T = decltype(type);
    store_heads_kernel<T><<<static_cast<unsigned>(step.places.rows), kThreads, 0, stream>>>(step);
  });
  check_launch("store_heads");
}

void gate_rows(Number number, const void* gate_up, int64_t rows, int64_t width, void* s,
               cudaStream_t stream) {
  if (rows == 0) return;
  with_type(number, [&](auto type) {
    using T = decltype(type);
    gate_kernel<T><<<blocks_for(rows * width, kThreads), kThreads, 0, stream>>>(
        static_cast<const T*>(gate_up), rows * width, width, static_cast<T*>(s));
  });
  check_launch("gate_rows");
}

void copy_pages(void* pages, int64_t stores, int64_t store_bytes, int64_t page_bytes,
                const int32_t* pairs, int64_t count, cudaStream_t stream) {
  if (count == 0) return;
  constexpr auto kWord = static_cast<int64_t>(sizeof(uint4));
  const dim3 grid(static_cast<unsigned>(count), static_cast<unsigned>(stores));
  copy_pages_kernel<<<grid, kThreads, 0, stream>>>(static_cast<uint4*>(pages), store_bytes / kWord,
                                                   page_bytes / kWord, pairs);
  check_launch("copy_pages");
}

}  // namespace leeway::cuda
