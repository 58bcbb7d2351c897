// Rows of hidden states, and values by token, moved and marked.

#include <algorithm>

#include "cuda/device.h"
#include "cuda/device_math.cuh"
#include "cuda/head_rows.h"
#include "cuda/row_softmax.cuh"

namespace leeway::cuda {
namespace {

constexpr unsigned kMark = 0x7fc0feedu;  // a NaN that arithmetic never produces

constexpr int kMoveThreads = 128;

// One warp per row.
template <class T>
__global__ void target_kernel(const T* gathered, const T* weight, int64_t hidden_size,
                              int64_t vocabulary, RowChunk chunk) {
  const int64_t row = int64_t{blockIdx.x} * (kMoveThreads / 32) + threadIdx.x / 32;
  if (row >= chunk.count) return;
  const int64_t at = chunk.first + row;
  const int64_t token = chunk.rows != nullptr ? chunk.rows[at] : at;
  const int64_t target = chunk.targets[token];
  if (target < 0 || target >= vocabulary) {
    if (threadIdx.x % 32 == 0) chunk.target_logits[token] = NAN;
    return;
  }
  const float logit =
      exact_logit(gathered + hidden_size * row, weight + hidden_size * target, hidden_size);
  if (threadIdx.x % 32 == 0) chunk.target_logits[token] = logit;
}

template <class U>
__global__ void gather_kernel(const U* hidden, int64_t hidden_stride, int64_t width, RowChunk chunk,
                              U* to) {
  const int64_t row = blockIdx.x;
  U* const place = to + width * row;
  if (row >= chunk.count) {
    for (int64_t k = threadIdx.x; k < width; k += kMoveThreads) place[k] = U{};
    return;
  }
  const int64_t at = chunk.first + row;
  const U* from = hidden + hidden_stride * (chunk.rows != nullptr ? chunk.rows[at] : at);
  for (int64_t k = threadIdx.x; k < width; k += kMoveThreads) place[k] = from[k];
}

template <class U>
__global__ void clear_kernel(U* gathered, int64_t width, RowChunk chunk, const float* g,
                             const float* g_entropy) {
  const int64_t at = chunk.first + blockIdx.x;
  const int64_t token = chunk.rows != nullptr ? chunk.rows[at] : at;
  if (g[token] != 0.0f || (g_entropy != nullptr && g_entropy[token] != 0.0f)) return;
  U* const place = gathered + width * blockIdx.x;
  for (int64_t k = threadIdx.x; k < width; k += kMoveThreads) place[k] = U{};
}

template <class U>
__global__ void scatter_kernel(const U* from, int64_t width, RowChunk chunk, U* to) {
  const int64_t at = chunk.first + blockIdx.x;
  U* const place = to + width * (chunk.rows != nullptr ? chunk.rows[at] : at);
  for (int64_t k = threadIdx.x; k < width; k += kMoveThreads) {
    place[k] = from[width * blockIdx.x + k];
  }
}

// Calls `move(U{})` with the widest unit that rows of `bytes` at these addresses are made of.
template <class Move>
void by_unit(uint64_t addresses, int64_t bytes, Move move) {
  const uint64_t all = addresses | static_cast<uint64_t>(bytes);
  if (all % 16 == 0) return move(uint4{}, bytes / 16);
  if (all % 4 == 0) return move(uint32_t{}, bytes / 4);
  move(uint16_t{}, bytes / 2);
}

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

__global__ void mark_kernel(float* logprobs, int64_t tokens) {
  const int64_t i = int64_t{256} * blockIdx.x + threadIdx.x;
  if (i < tokens) logprobs[i] = __uint_as_float(kMark);
}
__global__ void unmark_kernel(float* logprobs, int64_t tokens) {
  const int64_t i = int64_t{256} * blockIdx.x + threadIdx.x;
  if (i < tokens && __float_as_uint(logprobs[i]) == kMark) logprobs[i] = 0.0f;
}

template <class T>
__global__ void scale_kernel(T* numbers, int64_t count, const float* factor) {
  const float by = *factor;
  if (by == 1.0f) return;
  for (int64_t i = int64_t{256} * blockIdx.x + threadIdx.x; i < count;
       i += int64_t{256} * gridDim.x) {
    numbers[i] = narrow<T>(wide(numbers[i]) * by);
  }
}

}  // namespace

void gather_rows(const void* hidden, int64_t hidden_stride, int64_t hidden_size, Dtype type,
                 const RowChunk& chunk, int64_t padded, void* to, cudaStream_t stream) {
  if (padded == 0) return;
  const int64_t bytes = hidden_size * bytes_of(type), stride = hidden_stride * bytes_of(type);
  by_unit(address(hidden) | address(to) | static_cast<uint64_t>(stride), bytes,
          [&](auto unit, int64_t width) {
            using U = decltype(unit);
            gather_kernel<U><<<static_cast<unsigned>(padded), kMoveThreads, 0, stream>>>(
                static_cast<const U*>(hidden), stride / static_cast<int64_t>(sizeof(U)), width,
                chunk, static_cast<U*>(to));
          });
  check_launch("gather_kernel");
}

void clear_rows(void* gathered, int64_t hidden_size, Dtype type, const RowChunk& chunk,
                const float* g, const float* g_entropy, cudaStream_t stream) {
  if (chunk.count == 0) return;
  by_unit(address(gathered), hidden_size * bytes_of(type), [&](auto unit, int64_t width) {
    using U = decltype(unit);
    clear_kernel<U><<<static_cast<unsigned>(chunk.count), kMoveThreads, 0, stream>>>(
        static_cast<U*>(gathered), width, chunk, g, g_entropy);
  });
  check_launch("clear_kernel");
}

void find_target_logits(const void* gathered, const void* weight, int64_t hidden_size,
                        int64_t vocabulary, Dtype type, const RowChunk& chunk,
                        cudaStream_t stream) {
  if (chunk.count == 0) return;
  constexpr int kRows = kMoveThreads / 32;
  const unsigned blocks = static_cast<unsigned>((chunk.count + kRows - 1) / kRows);
  if (type == Dtype::bf16) {
    target_kernel<<<blocks, kMoveThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(gathered),
                                                       static_cast<const __nv_bfloat16*>(weight),
                                                       hidden_size, vocabulary, chunk);
  } else {
    target_kernel<<<blocks, kMoveThreads, 0, stream>>>(static_cast<const float*>(gathered),
                                                       static_cast<const float*>(weight),
                                                       hidden_size, vocabulary, chunk);
  }
  check_launch("target_kernel");
}

void scatter_rows(const void* from, int64_t hidden_size, Dtype type, const RowChunk& chunk,
                  void* to, cudaStream_t stream) {
  if (chunk.count == 0) return;
  by_unit(address(from) | address(to), hidden_size * bytes_of(type), [&](auto unit, int64_t width) {
    using U = decltype(unit);
    scatter_kernel<U><<<static_cast<unsigned>(chunk.count), kMoveThreads, 0, stream>>>(
        static_cast<const U*>(from), width, chunk, static_cast<U*>(to));
  });
  check_launch("scatter_kernel");
}

void mark_not_computed(float* logprobs, int64_t tokens, cudaStream_t stream) {
  if (tokens == 0) return;
  mark_kernel<<<static_cast<unsigned>((tokens + 255) / 256), 256, 0, stream>>>(logprobs, tokens);
  check_launch("mark_kernel");
}

void clear_not_computed(float* logprobs, int64_t tokens, cudaStream_t stream) {
  if (tokens == 0) return;
  unmark_kernel<<<static_cast<unsigned>((tokens + 255) / 256), 256, 0, stream>>>(logprobs, tokens);
  check_launch("unmark_kernel");
}

void scale_in_place(void* numbers, int64_t count, Dtype type, const float* factor,
                    cudaStream_t stream) {
  if (count == 0) return;
  const unsigned blocks =
      static_cast<unsigned>(std::min<int64_t>((count + 255) / 256, 16 * multiprocessors()));
  if (type == Dtype::bf16) {
    scale_kernel<<<blocks, 256, 0, stream>>>(static_cast<__nv_bfloat16*>(numbers), count, factor);
  } else {
    scale_kernel<<<blocks, 256, 0, stream>>>(static_cast<float*>(numbers), count, factor);
  }
  check_launch("scale_kernel");
}

}  // namespace leeway::cuda
