#include "cuda/layer_gradients.h"
#include "cuda/row_math.cuh"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
// Blocks that rows are dealt to, each with a sum of its own.
constexpr int kParts = 1024;
constexpr int kHeadParts = 768;

__host__ __device__ inline int64_t rows_of_part(int64_t rows, int parts) {
  return (rows + parts - 1) / parts;
}

// Adjacent rows are one block's. A thread has eight columns.
template <class T>
__global__ void norm_backward_kernel(RmsNormBackward norm, int warps) {
  __shared__ float2 sums[2][kWarp];  // by turns, so that a row synchronizes once
  const int64_t width = norm.width, column = int64_t{threadIdx.x} * 8;
  const bool there = column < width;
  const T* x = static_cast<const T*>(norm.x) + column;
  const T* d_y = static_cast<const T*>(norm.d_y) + column;
  const T* add = static_cast<const T*>(norm.add);
  T* d_x = static_cast<T*>(norm.d_x) + column;
  T* y = static_cast<T*>(norm.y);
  float weights[8] = {}, d_weights[8] = {};
  if (there) load<8>(static_cast<const T*>(norm.weight) + column, weights);
  const int64_t part = rows_of_part(norm.rows, kParts), first = blockIdx.x * part;
  const int64_t end = first + part < norm.rows ? first + part : norm.rows;
  for (int64_t row = first; row < end; ++row) {
    float values[8] = {}, gradients[8] = {}, others[8] = {};
    if (there) {
      load<8>(x + row * width, values);
      load<8>(d_y + row * width, gradients);
      if (add != nullptr) load<8>(add + row * width + column, others);
    }
    float squares = 0.0f, products = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      squares += values[k] * values[k];
      products += gradients[k] * weights[k] * values[k];
    }
    float2* shared = sums[(row - first) % 2];
    squares = warp_sum(squares), products = warp_sum(products);
    if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = make_float2(squares, products);
    __syncthreads();
    squares = products = 0.0f;
    for (int warp = 0; warp < warps; ++warp) {
      squares += shared[warp].x, products += shared[warp].y;
    }
    const float inverse = inverse_norm(squares, width, norm.eps);
    const float mean = products * inverse / static_cast<float>(width);
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float unit = values[k] * inverse;
      d_weights[k] += gradients[k] * unit;
      others[k] += inverse * (gradients[k] * weights[k] - unit * mean);
      values[k] = normed<T>(values[k], inverse, weights[k]);
    }
    if (there) {
      store<8>(others, d_x + row * width);
      if (y != nullptr) store<8>(values, y + row * width + column);
    }
  }
  if (there) store<8>(d_weights, norm.workspace + blockIdx.x * width + column);
}

// Where sums over rows go: columns before `width` to the first, as many more to the second.
struct SummedWeights {
  float *first, *second;  // the second may be null
  int64_t width;
};

// weights[column] += the sum of parts[.., column], kWarp columns a block.
__global__ void add_parts_kernel(const float* __restrict__ parts, int64_t count, int64_t columns,
                                 SummedWeights weights) {
  __shared__ float sums[kWarp][kWarp];
  const int64_t column = int64_t{blockIdx.x} * kWarp + threadIdx.x;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 8
    for (int64_t i = threadIdx.y; i < count; i += kWarp) sum += parts[i * columns + column];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || column >= columns) return;
  sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarp; ++i) sum += sums[i][threadIdx.x];
  if (column < weights.width) {
    weights.first[column] += sum;
  } else {
    weights.second[column - weights.width] += sum;
  }
}

void add_parts(const float* parts, int64_t count, const SummedWeights& weights,
               cudaStream_t stream) {
  const int64_t columns = weights.second == nullptr ? weights.width : 2 * weights.width;
  add_parts_kernel<<<blocks_for(columns, kWarp), dim3(kWarp, kWarp), 0, stream>>>(parts, count,
                                                                                  columns, weights);
  check_launch("the sum over rows");
}

// One warp for a head. Lanes have pairs side by side, two at a time; d_norm [4 kTwos] is the lane's
// share of the norm's gradient.
template <int kTwos, class T>
__device__ __forceinline__ void head_backward(const T* __restrict__ x, const T* __restrict__ d_out,
                                              const T* __restrict__ norm, float eps,
                                              const float* __restrict__ cosines,
                                              const float* __restrict__ sines, int head_dim,
                                              T* __restrict__ d_x, float* d_norm) {
  const int half = head_dim / 2, lane = threadIdx.x % kWarp;
  float a[2 * kTwos] = {}, b[2 * kTwos] = {};      // the head
  float d_a[2 * kTwos] = {}, d_b[2 * kTwos] = {};  // its gradient
  float w_a[2 * kTwos] = {}, w_b[2 * kTwos] = {};
  float squares = 0.0f, products = 0.0f;
#pragma unroll
  for (int n = 0; n < kTwos; ++n) {
    const int i = (lane + n * kWarp) * 2;
    if (i >= half) continue;
    float c[2], s[2];
    load<2>(d_out + i, d_a + 2 * n), load<2>(d_out + half + i, d_b + 2 * n);
    if (norm != nullptr) {
      load<2>(x + i, a + 2 * n), load<2>(x + half + i, b + 2 * n);
      load<2>(norm + i, w_a + 2 * n), load<2>(norm + half + i, w_b + 2 * n);
    }
    load<2>(cosines + i, c), load<2>(sines + i, s);
#pragma unroll
    for (int k = 2 * n; k < 2 * n + 2; ++k) {
      turn(d_a[k], d_b[k], c[k - 2 * n], -s[k - 2 * n]);
      squares += a[k] * a[k] + b[k] * b[k];
      products += d_a[k] * w_a[k] * a[k] + d_b[k] * w_b[k] * b[k];
    }
  }
  if (norm != nullptr) {
    const float inverse = inverse_norm(warp_sum(squares), head_dim, eps);
    const float mean = warp_sum(products) * inverse / static_cast<float>(head_dim);
#pragma unroll
    for (int k = 0; k < 2 * kTwos; ++k) {
      const float unit_a = a[k] * inverse, unit_b = b[k] * inverse;
      d_norm[2 * k] += d_a[k] * unit_a;
      d_norm[2 * k + 1] += d_b[k] * unit_b;
      d_a[k] = inverse * (d_a[k] * w_a[k] - unit_a * mean);
      d_b[k] = inverse * (d_b[k] * w_b[k] - unit_b * mean);
    }
  }
#pragma unroll
  for (int n = 0; n < kTwos; ++n) {
    const int i = (lane + n * kWarp) * 2;
    if (i >= half) continue;
    store<2>(d_a + 2 * n, d_x + i), store<2>(d_b + 2 * n, d_x + half + i);
  }
}

// Adjacent rows are one block's, and a row's heads are dealt to its warps. kTwos is enough for half
// a head.
template <int kTwos, class T>
__global__ void __launch_bounds__(kThreads, kTwos == 1 ? 6 : 4)
    heads_backward_kernel(HeadsBackward heads) {
  __shared__ float sums[kWarps][8 * kTwos * kWarp];
  const PackedHeads& forward = heads.forward;
  const int head_dim = static_cast<int>(forward.sizes.head_dim), half = head_dim / 2;
  const int query_heads = static_cast<int>(forward.sizes.query_heads);
  const int kv_heads = static_cast<int>(forward.sizes.kv_heads);
  const int all = query_heads + 2 * kv_heads, warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const auto* query_norm = static_cast<const T*>(forward.query_norm);
  const auto* key_norm = static_cast<const T*>(forward.key_norm);
  float d_query_norm[4 * kTwos] = {}, d_key_norm[4 * kTwos] = {};
  const int64_t part = rows_of_part(forward.rows, kHeadParts), first = blockIdx.x * part;
  const int64_t end = first + part < forward.rows ? first + part : forward.rows;
  for (int64_t row = first; row < end; ++row) {
    const int64_t angle = static_cast<int64_t>(forward.positions[row]) * half;
    const float* cosines = forward.angles.cosines + angle;
    const float* sines = forward.angles.sines + angle;
    const T* qkv = static_cast<const T*>(forward.qkv) + row * all * head_dim;
    T* d_qkv = static_cast<T*>(heads.d_qkv) + row * all * head_dim;
    const T* d_q = static_cast<const T*>(heads.d_q) + row * query_heads * head_dim;
    const T* d_k = static_cast<const T*>(heads.d_k) + row * kv_heads * head_dim;
    const T* d_v = static_cast<const T*>(heads.d_v) + row * kv_heads * head_dim;
#pragma unroll 2
    for (int head = warp; head < query_heads; head += kWarps) {
      head_backward<kTwos>(qkv + head * head_dim, d_q + head * head_dim, query_norm, forward.eps,
                           cosines, sines, head_dim, d_qkv + head * head_dim, d_query_norm);
    }
    for (int head = warp; head < kv_heads; head += kWarps) {
      const int place = (query_heads + head) * head_dim;
      head_backward<kTwos>(qkv + place, d_k + head * head_dim, key_norm, forward.eps, cosines,
                           sines, head_dim, d_qkv + place, d_key_norm);
    }
    T* values = d_qkv + (query_heads + kv_heads) * head_dim;
    for (int i = threadIdx.x * 8; i < kv_heads * head_dim; i += kThreads * 8) {
      float eight[8];
      load<8>(d_v + i, eight);
      store<8>(eight, values + i);
    }
  }
  if (query_norm == nullptr) return;
#pragma unroll
  for (int k = 0; k < 2 * kTwos; ++k) {
    const int i = (lane + k / 2 * kWarp) * 2 + k % 2;
    if (i >= half) continue;
    sums[warp][i] = d_query_norm[2 * k];
    sums[warp][half + i] = d_query_norm[2 * k + 1];
    sums[warp][head_dim + i] = d_key_norm[2 * k];
    sums[warp][head_dim + half + i] = d_key_norm[2 * k + 1];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * head_dim; i += kThreads) {
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) sum += sums[w][i];
    heads.workspace[int64_t{blockIdx.x} * 2 * head_dim + i] = sum;
  }
}

// One thread for eight numbers of a row; `parts` such eights in a row, `count` in all.
template <class T>
__global__ void swiglu_rows_backward_kernel(const T* gate_up, const T* d_s, int64_t parts,
                                            int64_t count, T* d_gate_up, T* s) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= count) return;
  const int64_t width = parts * 8, gate = at / parts * 2 * width + at % parts * 8;
  float g[8], u[8], d[8], out[8];
  load<8>(gate_up + gate, g);
  load<8>(gate_up + gate + width, u);
  load<8>(d_s + at * 8, d);
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    out[k] = gated<T>(g[k], u[k]);
    const float share = 1.0f / (1.0f + expf(-g[k]));
    const float by_gate = d[k] * u[k] * share * (1.0f + g[k] * (1.0f - share));
    u[k] = d[k] * g[k] * share;
    g[k] = by_gate;
  }
  store<8>(out, s + at * 8);
  store<8>(g, d_gate_up + gate);
  store<8>(u, d_gate_up + gate + width);
}

// One block for each place of the sorted ids; those that begin no run of equal ids have no work.
template <class T>
__global__ void embed_backward_kernel(const int32_t* sorted, const int64_t* order, const T* d_x,
                                      int64_t rows, int64_t width, float* d_table) {
  const int64_t begin = blockIdx.x;
  const int32_t id = sorted[begin];
  if (begin > 0 && sorted[begin - 1] == id) return;
  int64_t end = begin + 1;
  while (end < rows && sorted[end] == id) ++end;
  for (int64_t column = int64_t{threadIdx.x} * 8; column < width; column += kThreads * 8) {
    float* to = d_table + id * width + column;
    float sum[8], row[8];
    load<8>(to, sum);
    for (int64_t i = begin; i < end; ++i) {
      load<8>(d_x + order[i] * width + column, row);
#pragma unroll
      for (int k = 0; k < 8; ++k) sum[k] += row[k];
    }
    store<8>(sum, to);
  }
}

}  // namespace

int64_t row_sum_workspace(int64_t width) { return kParts * width; }

void rms_norm_backward(Dtype dtype, const RmsNormBackward& norm, cudaStream_t stream) {
  if (norm.rows == 0) return;
  const int warps = static_cast<int>((norm.width / 8 + kWarp - 1) / kWarp);
  const unsigned blocks = blocks_for(norm.rows, rows_of_part(norm.rows, kParts));
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    norm_backward_kernel<T><<<blocks, warps * kWarp, 0, stream>>>(norm, warps);
  });
  check_launch("rms_norm_backward");
  add_parts(norm.workspace, blocks, {norm.d_weight, nullptr, norm.width}, stream);
}

void heads_backward(Dtype dtype, const HeadsBackward& heads, cudaStream_t stream) {
  const int64_t rows = heads.forward.rows, head_dim = heads.forward.sizes.head_dim;
  if (rows == 0) return;
  const unsigned blocks = blocks_for(rows, rows_of_part(rows, kHeadParts));
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    if (head_dim <= kMostHeadDim / 2) {
      heads_backward_kernel<1, T><<<blocks, kThreads, 0, stream>>>(heads);
    } else {
      heads_backward_kernel<2, T><<<blocks, kThreads, 0, stream>>>(heads);
    }
  });
  check_launch("heads_backward");
  if (heads.forward.query_norm == nullptr) return;
  add_parts(heads.workspace, blocks, {heads.d_query_norm, heads.d_key_norm, head_dim}, stream);
}

void swiglu_rows_backward(Dtype dtype, const void* gate_up, const void* d_s, int64_t rows,
                          int64_t width, void* d_gate_up, void* s, cudaStream_t stream) {
  const int64_t count = rows * width / 8;
  if (count == 0) return;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    swiglu_rows_backward_kernel<T><<<blocks_for(count, kThreads), kThreads, 0, stream>>>(
        static_cast<const T*>(gate_up), static_cast<const T*>(d_s), width / 8, count,
        static_cast<T*>(d_gate_up), static_cast<T*>(s));
  });
  check_launch("swiglu_rows_backward");
}

void embed_backward(Dtype dtype, const int32_t* sorted, const int64_t* order, const void* d_x,
                    int64_t rows, int64_t width, float* d_table, cudaStream_t stream) {
  if (rows == 0) return;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    embed_backward_kernel<T><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
        sorted, order, static_cast<const T*>(d_x), rows, width, d_table);
  });
  check_launch("embed_backward");
}

}  // namespace leeway::cuda
