#include <algorithm>

#include "cuda/head_lanes.cuh"
#include "cuda/layer_gradients.h"

namespace leeway::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
// Blocks that rows are dealt to, at most, each with a sum of its own.
constexpr int kParts = 1024;
constexpr int kHeadBlocks = 264;
constexpr int kHeadPartsAtOnce = 4;  // of a row that a warp has at a time
constexpr int kHeadCount = 4;        // numbers of half a head that a lane has
constexpr int kNormBlocks = 264;
constexpr int kWarpColumns = 8 * kWarp;  // of a row, at a time
constexpr int kMostPieces = 4;           // of as many columns, where a warp has a row

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

// The same for rows of up to kPieces times kWarpColumns: one warp computes a whole row, so that its
// sums need no barrier of the block.
template <int kPieces, class T>
__global__ void __launch_bounds__(kThreads, 2) narrow_norm_backward_kernel(RmsNormBackward norm) {
  __shared__ float sums[kWarps][kPieces * kWarpColumns];
  const int width = static_cast<int>(norm.width);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int first = static_cast<int>(threadIdx.x) % kWarp * 8;
  float d_weights[kPieces][8] = {};
  Loaded<8, T> weights[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    const int column = first + p * kWarpColumns;
    weights[p].clear();
    if (column < width) weights[p].load(static_cast<const T*>(norm.weight) + column);
  }
  const T *all_x = static_cast<const T*>(norm.x), *all_d_y = static_cast<const T*>(norm.d_y);
  const T* all_add = static_cast<const T*>(norm.add);
  for (int64_t row = int64_t{blockIdx.x} * kWarps + warp; row < norm.rows;
       row += int64_t{gridDim.x} * kWarps) {
    Loaded<8, T> x[kPieces], d_y[kPieces], add[kPieces];
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int column = first + p * kWarpColumns;
      const int64_t at = row * width + column;
      x[p].clear(), d_y[p].clear(), add[p].clear();
      if (column >= width) continue;
      x[p].load(all_x + at), d_y[p].load(all_d_y + at);
      if (all_add != nullptr) add[p].load(all_add + at);
    }
    float squares = 0.0f, products = 0.0f;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        squares += x[p].at(k) * x[p].at(k);
        products += d_y[p].at(k) * weights[p].at(k) * x[p].at(k);
      }
    }
    const float inverse = inverse_norm(warp_sum(squares), width, norm.eps);
    const float mean = warp_sum(products) * inverse / static_cast<float>(width);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      x[p].forget_floats(), d_y[p].forget_floats(), weights[p].forget_floats();
      float d_x[8], y[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float unit = x[p].at(k) * inverse;
        d_weights[p][k] += d_y[p].at(k) * unit;
        d_x[k] = add[p].at(k) + inverse * (d_y[p].at(k) * weights[p].at(k) - unit * mean);
        y[k] = normed<T>(x[p].at(k), inverse, weights[p].at(k));
      }
      const int column = first + p * kWarpColumns;
      if (column >= width) continue;
      store<8>(d_x, static_cast<T*>(norm.d_x) + row * width + column);
      if (norm.y != nullptr) store<8>(y, static_cast<T*>(norm.y) + row * width + column);
    }
  }
#pragma unroll
  for (int p = 0; p < kPieces; ++p) store<8>(d_weights[p], &sums[warp][first + p * kWarpColumns]);
  __syncthreads();
  for (int column = static_cast<int>(threadIdx.x); column < width; column += kThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += sums[w][column];
    norm.workspace[int64_t{blockIdx.x} * width + column] = sum;
  }
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

// What a warp of heads_backward_kernel goes over: the queries of rows, their keys or their values.
struct HeadKind {
  int heads, first;  // of a row; the first is that of qkv
  const void *d_out, *norm;
};

// A warp has a row at a time, and of it as many heads as it holds, times kHeadPartsAtOnce: their
// loads are under way together. The kind is blockIdx.y.
template <class T>
__global__ void __launch_bounds__(kThreads, 2)
    heads_backward_kernel(HeadsBackward heads, HeadLanes in_warp) {
  constexpr int kCount = kHeadCount;
  __shared__ float sums[kWarps][kWarp][2 * kCount + 1];
  const PackedHeads& forward = heads.forward;
  const int head_dim = static_cast<int>(forward.sizes.head_dim), half = head_dim / 2;
  const int query_heads = static_cast<int>(forward.sizes.query_heads);
  const int kv_heads = static_cast<int>(forward.sizes.kv_heads);
  const int all = query_heads + 2 * kv_heads;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  HeadKind kind{query_heads, 0, heads.d_q, forward.query_norm};
  if (blockIdx.y == 1) kind = {kv_heads, query_heads, heads.d_k, forward.key_norm};
  if (blockIdx.y == 2) kind = {kv_heads, query_heads + kv_heads, heads.d_v, nullptr};
  const bool turns = blockIdx.y < 2;
  const T* norm = static_cast<const T*>(kind.norm);
  const int i = lane % in_warp.lanes * kCount;
  const bool inside = i < half;
  HeadPart<kCount> d_norm;
  LoadedHeadPart<kCount, T> weights;
  if (norm != nullptr && inside) weights.load_halves(norm + i, norm + half + i);

  for (int64_t row = int64_t{blockIdx.x} * kWarps + warp; row < forward.rows;
       row += int64_t{gridDim.x} * kWarps) {
    const int64_t angle =
        turns ? static_cast<int64_t>(forward.positions[row]) * half + i : int64_t{0};
    HeadPart<kCount> angles;
    for (int first = lane / in_warp.lanes; first - lane / in_warp.lanes < kind.heads;
         first += kHeadPartsAtOnce * in_warp.heads) {
      LoadedHeadPart<kCount, T> d_loaded[kHeadPartsAtOnce], x_loaded[kHeadPartsAtOnce];
      const T* from = static_cast<const T*>(kind.d_out) + (row * kind.heads + first) * head_dim + i;
      const int64_t place = (row * all + kind.first + first) * head_dim + i;
      const T* qkv = static_cast<const T*>(forward.qkv) + place;
#pragma unroll
      for (int n = 0; n < kHeadPartsAtOnce; ++n) {
        if (!inside || first + n * in_warp.heads >= kind.heads) continue;
        const int apart = n * in_warp.heads * head_dim;
        d_loaded[n].load_halves(from + apart, from + apart + half);
        if (norm != nullptr) x_loaded[n].load_halves(qkv + apart, qkv + apart + half);
      }
      if (turns && inside && first < in_warp.heads) {
        angles.load_halves(forward.angles.cosines + angle, forward.angles.sines + angle);
      }
#pragma unroll
      for (int n = 0; n < kHeadPartsAtOnce; ++n) {
        const bool there = inside && first + n * in_warp.heads < kind.heads;
        HeadPart<kCount> d, x;
        if (there) d.take(d_loaded[n]);
        if (there && norm != nullptr) x.take(x_loaded[n]);
        if (turns) {
#pragma unroll
          for (int k = 0; k < kCount; ++k) turn(d.a[k], d.b[k], angles.a[k], -angles.b[k]);
        }
        if (norm != nullptr) {
          HeadPart<kCount> weight;
          weights.forget_floats();
          if (inside) weight.take(weights);
          float squares = 0.0f, products = 0.0f;
#pragma unroll
          for (int k = 0; k < kCount; ++k) {
            squares += x.a[k] * x.a[k] + x.b[k] * x.b[k];
            products += d.a[k] * weight.a[k] * x.a[k] + d.b[k] * weight.b[k] * x.b[k];
          }
          const float inverse =
              inverse_norm(lanes_sum(squares, in_warp.lanes), head_dim, forward.eps);
          const float mean =
              lanes_sum(products, in_warp.lanes) * inverse / static_cast<float>(head_dim);
#pragma unroll
          for (int k = 0; k < kCount; ++k) {
            const float unit_a = x.a[k] * inverse, unit_b = x.b[k] * inverse;
            d_norm.a[k] += d.a[k] * unit_a, d_norm.b[k] += d.b[k] * unit_b;
            d.a[k] = inverse * (d.a[k] * weight.a[k] - unit_a * mean);
            d.b[k] = inverse * (d.b[k] * weight.b[k] - unit_b * mean);
          }
        }
        T* to = static_cast<T*>(heads.d_qkv) + place + n * in_warp.heads * head_dim;
        if (there) d.store_halves(to, to + half);
      }
    }
  }
  if (norm == nullptr) return;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    sums[warp][lane][k] = d_norm.a[k], sums[warp][lane][kCount + k] = d_norm.b[k];
  }
  __syncthreads();
  float* to = heads.workspace + (int64_t{blockIdx.x} * 2 + blockIdx.y) * head_dim;
  for (int column = threadIdx.x; column < head_dim; column += kThreads) {
    const int in_half = column % half;
    const int k = in_half % kCount + (column < half ? 0 : kCount);
    float sum = 0.0f;
    for (int w = 0; w < kWarps; ++w) {
      for (int l = in_half / kCount; l < kWarp; l += in_warp.lanes) sum += sums[w][l][k];
    }
    to[column] = sum;
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
  unsigned blocks = blocks_for(norm.rows, rows_of_part(norm.rows, kParts));
  if (warps <= kMostPieces) blocks = std::min<unsigned>(blocks_for(norm.rows, kWarps), kNormBlocks);
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto launch = [&](auto pieces) {
      narrow_norm_backward_kernel<decltype(pieces)::value, T>
          <<<blocks, kThreads, 0, stream>>>(norm);
    };
    switch (warps) {
      case 1: return launch(std::integral_constant<int, 1>());
      case 2: return launch(std::integral_constant<int, 2>());
      case 3: return launch(std::integral_constant<int, 3>());
      case 4: return launch(std::integral_constant<int, 4>());
      default: norm_backward_kernel<T><<<blocks, warps * kWarp, 0, stream>>>(norm, warps);
    }
  });
  check_launch("rms_norm_backward");
  if (norm.d_weight == nullptr) return;
  add_parts(norm.workspace, blocks, {norm.d_weight, nullptr, norm.width}, stream);
}

void heads_backward(Dtype dtype, const HeadsBackward& heads, cudaStream_t stream) {
  const int64_t rows = heads.forward.rows, head_dim = heads.forward.sizes.head_dim;
  if (rows == 0) return;
  const unsigned blocks = std::min<unsigned>(blocks_for(rows, kWarps), kHeadBlocks);
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    heads_backward_kernel<T>
        <<<dim3(blocks, 3), kThreads, 0, stream>>>(heads, head_lanes<kHeadCount>(head_dim));
  });
  check_launch("heads_backward");
  if (heads.d_query_norm == nullptr) return;
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
