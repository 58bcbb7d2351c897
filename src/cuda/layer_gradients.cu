#include "cuda/layer_gradients.h"
#include "cuda/warp_head.cuh"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
// Blocks that rows are dealt to, each with a sum of its own.
constexpr int kParts = 1024;
constexpr int kHeadParts = 768;
constexpr int kHeads = 4;  // of a warp at a time: their loads hide each other's latency

__host__ __device__ inline int64_t rows_of_part(int64_t rows, int parts) {
  return (rows + parts - 1) / parts;
}

// Eight numbers of x, d_y and add, as they are loaded: floats of two rows would not fit a thread's
// registers.
template <class T>
struct NormInputs {
  Eight<T> x, d_y, add;

  __device__ __forceinline__ void load_at(const RmsNormBackward& norm, int64_t at) {
    x = load_eight(static_cast<const T*>(norm.x) + at);
    d_y = load_eight(static_cast<const T*>(norm.d_y) + at);
    if (norm.add != nullptr) add = load_eight(static_cast<const T*>(norm.add) + at);
  }
};

// Adjacent rows are one block's, and the next is on its way while one is computed. A thread has
// eight columns.
template <class T>
__global__ void __launch_bounds__(kMostNormWidth / 8)
    norm_backward_kernel(RmsNormBackward norm, int warps) {
  __shared__ float2 sums[2][kWarp];  // by turns, so that a row synchronizes once
  const int width = static_cast<int>(norm.width), column = static_cast<int>(threadIdx.x) * 8;
  const bool there = column < width;
  const int64_t part = rows_of_part(norm.rows, kParts), first = blockIdx.x * part;
  const int rows = static_cast<int>(first + part < norm.rows ? part : norm.rows - first);
  int64_t at = first * width + column;
  float d_weights[8] = {};
  Eight<T> weights = eight_zeros<T>();
  NormInputs<T> next{weights, weights, weights};
  if (there) {
    weights = load_eight(static_cast<const T*>(norm.weight) + column);
    next.load_at(norm, at);
  }
  for (int row = 0; row < rows; ++row) {
    const NormInputs<T> now = next;
    if (there && row + 1 < rows) next.load_at(norm, at + width);
    float squares = 0.0f, products = 0.0f;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float x = wide(now.x.values[k]);
      squares += x * x;
      products += wide(now.d_y.values[k]) * wide(weights.values[k]) * x;
    }
    float2* shared = sums[row % 2];
    squares = warp_sum(squares), products = warp_sum(products);
    if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = make_float2(squares, products);
    __syncthreads();
    squares = products = 0.0f;
    for (int warp = 0; warp < warps; ++warp) {
      squares += shared[warp].x, products += shared[warp].y;
    }
    const float inverse = inverse_norm(squares, width, norm.eps);
    const float mean = products * inverse / static_cast<float>(width);
    float d_x[8], y[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      const float x = wide(now.x.values[k]), d_y = wide(now.d_y.values[k]);
      const float weight = wide(weights.values[k]), unit = x * inverse;
      d_weights[k] += d_y * unit;
      d_x[k] = wide(now.add.values[k]) + inverse * (d_y * weight - unit * mean);
      y[k] = normed<T>(x, inverse, weight);
    }
    if (there) {
      store<8>(d_x, static_cast<T*>(norm.d_x) + at);
      if (norm.y != nullptr) store<8>(y, static_cast<T*>(norm.y) + at);
    }
    at += width;
  }
  if (there) store<8>(d_weights, norm.workspace + int64_t{blockIdx.x} * width + column);
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

// The gradient of kHeads heads of a row from that of what WarpHead makes of them; the heads at x
// and d_x lie side by side, as do those at d_out, `count` of them. d_norm is the lane's share of
// the norm's gradient.
template <int kTwos, class T>
__device__ __forceinline__ void heads_backward_of(const T* x, const T* d_out, int count,
                                                  const T* norm, const PackedHeads& forward,
                                                  int64_t position, T* d_x,
                                                  WarpHead<kTwos>& d_norm) {
  const int head_dim = static_cast<int>(forward.sizes.head_dim), half = head_dim / 2;
  WarpHead<kTwos> d[kHeads], head[kHeads], weights;
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= count) continue;
    d[h].load_head(d_out + h * head_dim, half);
    if (norm != nullptr) head[h].load_head(x + h * head_dim, half);
  }
  const WarpHead<kTwos> angles = angles_at<kTwos>(forward.angles, position, half);
  if (norm != nullptr) weights.load_head(norm, half);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (h >= count) continue;
    d[h].turn_by(angles, -1.0f);
    if (norm != nullptr) {
      float products = 0.0f;
#pragma unroll
      for (int k = 0; k < 2 * kTwos; ++k) {
        products += d[h].a[k] * weights.a[k] * head[h].a[k];
        products += d[h].b[k] * weights.b[k] * head[h].b[k];
      }
      const float inverse = inverse_norm(warp_sum(head[h].squares()), head_dim, forward.eps);
      const float mean = warp_sum(products) * inverse / static_cast<float>(head_dim);
#pragma unroll
      for (int k = 0; k < 2 * kTwos; ++k) {
        const float unit_a = head[h].a[k] * inverse, unit_b = head[h].b[k] * inverse;
        d_norm.a[k] += d[h].a[k] * unit_a, d_norm.b[k] += d[h].b[k] * unit_b;
        d[h].a[k] = inverse * (d[h].a[k] * weights.a[k] - unit_a * mean);
        d[h].b[k] = inverse * (d[h].b[k] * weights.b[k] - unit_b * mean);
      }
    }
    d[h].store_head(d_x + h * head_dim, half);
  }
}

// Adjacent rows are one block's. A warp takes kHeads queries, keys or values of a row at a time.
template <int kTwos, class T>
__global__ void __launch_bounds__(kThreads, kTwos == 1 ? 3 : 2)
    heads_backward_kernel(HeadsBackward heads) {
  __shared__ float sums[kWarps][8 * kTwos * kWarp];
  const PackedHeads& forward = heads.forward;
  const int head_dim = static_cast<int>(forward.sizes.head_dim), half = head_dim / 2;
  const int query_heads = static_cast<int>(forward.sizes.query_heads);
  const int kv_heads = static_cast<int>(forward.sizes.kv_heads);
  const int all = query_heads + 2 * kv_heads, warp = threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  const int query_parts = (query_heads + kHeads - 1) / kHeads;
  const int kv_parts = (kv_heads + kHeads - 1) / kHeads, parts = query_parts + 2 * kv_parts;
  const auto* query_norm = static_cast<const T*>(forward.query_norm);
  const auto* key_norm = static_cast<const T*>(forward.key_norm);
  WarpHead<kTwos> d_query_norm = {}, d_key_norm = {};
  const int64_t rows = rows_of_part(forward.rows, kHeadParts), first = blockIdx.x * rows;
  const int64_t end = first + rows < forward.rows ? first + rows : forward.rows;
  for (int64_t at = first * parts + warp; at < end * parts; at += kWarps) {
    const int64_t row = at / parts;
    int head = static_cast<int>(at % parts) * kHeads;
    const T* qkv = static_cast<const T*>(forward.qkv) + row * all * head_dim;
    T* d_qkv = static_cast<T*>(heads.d_qkv) + row * all * head_dim;
    if (head < query_parts * kHeads) {
      const T* d_q = static_cast<const T*>(heads.d_q) + row * query_heads * head_dim;
      heads_backward_of(qkv + head * head_dim, d_q + head * head_dim, query_heads - head,
                        query_norm, forward, forward.positions[row], d_qkv + head * head_dim,
                        d_query_norm);
      continue;
    }
    head -= query_parts * kHeads;
    if (head < kv_parts * kHeads) {
      const T* d_k = static_cast<const T*>(heads.d_k) + row * kv_heads * head_dim;
      const int place = (query_heads + head) * head_dim;
      heads_backward_of(qkv + place, d_k + head * head_dim, kv_heads - head, key_norm, forward,
                        forward.positions[row], d_qkv + place, d_key_norm);
      continue;
    }
    head -= kv_parts * kHeads;
    const int count = kv_heads - head < kHeads ? kv_heads - head : kHeads;
    const T* d_v = static_cast<const T*>(heads.d_v) + (row * kv_heads + head) * head_dim;
    T* values = d_qkv + (query_heads + kv_heads + head) * head_dim;
    for (int i = lane * 8; i < count * head_dim; i += kWarp * 8) {
      float eight[8];
      load<8>(d_v + i, eight);
      store<8>(eight, values + i);
    }
  }
  if (query_norm == nullptr) return;
#pragma unroll
  for (int k = 0; k < 2 * kTwos; ++k) {
    const int i = d_query_norm.place(k / 2) + k % 2;
    if (i >= half) continue;
    sums[warp][i] = d_query_norm.a[k];
    sums[warp][half + i] = d_query_norm.b[k];
    sums[warp][head_dim + i] = d_key_norm.a[k];
    sums[warp][head_dim + half + i] = d_key_norm.b[k];
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
    with_twos(head_dim, [&](auto twos) {
      heads_backward_kernel<decltype(twos)::value, T><<<blocks, kThreads, 0, stream>>>(heads);
    });
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
