// A row of 151936 logits in bf16 is 304 KB: more than the shared memory of one multiprocessor, less
// than that of a cluster. For a gradient each row is given to a cluster of blocks, a part to each:
// they copy their parts to shared memory once, exchange three numbers, and make the gradient from
// shared memory. Without a gradient a row is read by one block, straight to registers.
//
// Both sum in the order of row_softmax.cuh, so that a proximal forward pass has the bits of the
// pass that trains.

#include <cooperative_groups.h>

#include <algorithm>

#include "cuda/device.h"
#include "cuda/head_rows.h"
#include "cuda/row_softmax.cuh"

namespace leeway::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr int64_t kSharedBytes = 224 << 10;  // that a block of Hopper may have for rows

// Writes the requested values of a row.
__device__ void write_values(const RowChunk& chunk, const RowPlace& place, const Softmax& all,
                             float logprob, float entropy) {
  if (chunk.logprobs == nullptr) return;
  chunk.logprobs[place.token] = logprob;
  if (chunk.entropy != nullptr) chunk.entropy[place.token] = entropy;
  if (chunk.log_sums != nullptr) {
    chunk.log_sums[place.token] = all.largest * place.scale + log2f(all.sum);
  }
}

template <class T>
__device__ __forceinline__ float target_logit(const RowChunk& chunk, const RowPlace& place,
                                              const T* row, int64_t target, int64_t vocabulary) {
  if (chunk.target_logits != nullptr) return chunk.target_logits[place.token];
  return target >= 0 && target < vocabulary ? wide(row[target]) : NAN;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* logits, int64_t stride, int64_t vocabulary, int64_t part_size,
                   RowChunk chunk) {
  __shared__ Softmax shared[kParts][kThreads / 32];
  const T* const row = logits + stride * blockIdx.x;
  const RowPlace place = place_of(chunk, blockIdx.x);
  const int64_t target = chunk.targets[place.token];
  const float exact = target_logit(chunk, place, row, target, vocabulary);
#pragma unroll 1
  for (int b = 0; b < kParts; ++b) {
    const PartPlace part = part_of(vocabulary, part_size, b);
    const uint4* const from = reinterpret_cast<const uint4*>(row + part.begin);
    const Softmax sums = join_warp(
        sum_part<T, 5>(from, part.size, Target<T>(target, exact, part), place.scale), place.scale);
    if (threadIdx.x % 32 == 0) shared[b][threadIdx.x / 32] = sums;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  Softmax of_lane;
  if (threadIdx.x < kParts) {
    of_lane = shared[threadIdx.x][0];
    for (int w = 1; w < kThreads / 32; ++w) of_lane.join(shared[threadIdx.x][w], place.scale);
  }
  const Softmax all = join_parts(of_lane, place.scale);
  if (threadIdx.x != 0) return;
  write_values(chunk, place, all, logprob_of(all, exact, place.scale), all.entropy());
}

// ---------------------------------------------------------------------------------------------
// A row in a cluster

// A barrier in shared memory that a bulk copy completes.
__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ void begin_copy(uint64_t* barrier, void* to, const void* from,
                                           unsigned bytes) {
  const unsigned at = shared_address(barrier);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(at)
      : "memory");
}
__device__ __forceinline__ void wait_copy(uint64_t* barrier) {
  const unsigned at = shared_address(barrier);
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
      "@done bra.uni over;\n"
      "bra.uni again;\n"
      "over:\n"
      "}" ::"r"(at)
      : "memory");
}

// The source of g.
struct GivenGradient {
  const float* g;
  const float* g_entropy;
};
struct LossGradient {
  LossPlan plan;
  LossBatch batch;
  LossWorkspace work;
  float* g;
};

// What the gradient of a row is made of: with log2 p = (z - largest) scale - log_sum, logit k gets
//   factor * (onehot - p) - entropy_factor * p (log2 p - offset)
struct RowGradient {
  float largest = 0.0f, log_sum = 0.0f, factor = 0.0f, entropy_factor = 0.0f, offset = 0.0f;
};

__device__ bool load_token_of(const LossGradient& source, int64_t token, float32::TokenIn& in) {
  const int64_t s = source.work.sequence_of != nullptr ? source.work.sequence_of[token] : 0;
  return load_token(source.plan, source.batch, source.work.prepared, token,
                    source.work.prepared.sequences[s], in);
}

// g of a row from its log-probability, by the plan.
__device__ float gradient_of(const LossGradient& source, float32::TokenIn& in, float logprob) {
  in.streams[static_cast<int>(Stream::pi)] = logprob;
  if (source.batch.prox_is_pi) in.streams[static_cast<int>(Stream::prox)] = logprob;
  const float32::TokenOut<float> out = evaluate_alone(source.plan, in);
  return out.trained ? out.grad : 0.0f;
}

template <class T, class Out, class Source>
__global__ void __cluster_dims__(kParts, 1, 1) __launch_bounds__(kThreads)
    gradient_kernel(T* logits, int64_t stride, int64_t vocabulary, int64_t part_size,
                    RowChunk chunk, const __grid_constant__ Source source) {
  constexpr bool kWithLoss = std::is_same_v<Source, LossGradient>;
  constexpr int kSize = Pack<T>::kSize;
  extern __shared__ __align__(128) unsigned char memory[];  // this block's part of the row
  __shared__ __align__(8) uint64_t barrier;
  __shared__ Softmax shared[kThreads / 32];
  __shared__ Softmax mine;
  __shared__ RowGradient row_gradient;
  const cg::cluster_group cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank());
  const int64_t row = blockIdx.x / kParts;
  T* const logits_row = logits + stride * row;
  const PartPlace part = part_of(vocabulary, part_size, rank);
  const int packs = (part.size + kSize - 1) / kSize;
  const bool known = !kWithLoss && chunk.log_sums_known;
  if (threadIdx.x == 0 && packs > 0) {
    begin_copy(&barrier, memory, logits_row + part.begin, static_cast<unsigned>(packs) * 16);
  }
  const RowPlace place = place_of(chunk, row);
  const int64_t target_id = chunk.targets[place.token];
  const Target<T> target(target_id, target_logit(chunk, place, logits_row, target_id, vocabulary),
                         part);
  const uint4* const from = reinterpret_cast<const uint4*>(memory);
  float32::TokenIn token;
  bool takes_part = false;
  if constexpr (kWithLoss) {
    // Done while the copy is in flight.
    if (threadIdx.x == 0) takes_part = load_token_of(source, place.token, token);
  }
  __syncthreads();
  if (packs > 0) wait_copy(&barrier);

  RowGradient r;
  if (!known) {
    const Softmax sums =
        join_block(sum_part<T, 1>(from, part.size, target, place.scale), place.scale, shared);
    if (threadIdx.x == 0) mine = sums;
    cluster.sync();  // also: no thread reads this row's memory any more
    if (threadIdx.x < 32) {
      Softmax of_lane;
      // Each lane fetches one block's numbers, so that the transfers overlap.
      if (threadIdx.x < kParts) {
        of_lane = *cluster.map_shared_rank(&mine, static_cast<int>(threadIdx.x));
      }
      const Softmax all = join_parts(of_lane, place.scale);
      if (threadIdx.x == 0) {
        const float logprob = logprob_of(all, target.exact, place.scale);
        const float entropy = all.entropy();
        r.largest = all.largest;
        r.log_sum = log2f(all.sum);
        r.offset = -entropy * kLog2e;
        if constexpr (kWithLoss) {
          const float g = takes_part ? gradient_of(source, token, logprob) : 0.0f;
          r.factor = g * place.inverse_temperature;
          if (rank == 0) source.g[place.token] = g;
        }
        if (rank == 0) write_values(chunk, place, all, logprob, entropy);
      }
    }
  } else if constexpr (!std::is_same_v<T, Out>) {
    cluster.sync();  // the gradient overwrites the memory of other blocks' logits
  }
  if (threadIdx.x == 0) {
    if constexpr (!kWithLoss) {
      if (known) {
        r.log_sum = chunk.log_sums[place.token];
        if (source.g_entropy != nullptr) r.offset = -chunk.entropy[place.token] * kLog2e;
      }
      r.factor = source.g[place.token] * place.inverse_temperature;
      if (source.g_entropy != nullptr) {
        r.entropy_factor = source.g_entropy[place.token] * place.inverse_temperature * kLn2;
      }
    }
    row_gradient = r;
  }
  __syncthreads();
  r = row_gradient;

  Out* const out_row = reinterpret_cast<Out*>(logits_row) + part.begin;
  const bool inert = r.factor == 0.0f && r.entropy_factor == 0.0f;
  for (int p = threadIdx.x; p < packs; p += kThreads) {
    float values[kSize];
    if (inert) {
#pragma unroll
      for (int k = 0; k < kSize; ++k) values[k] = 0.0f;
    } else {
      target.unpack(from[p], p, values);
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const float log_p = fmaf(values[k] - r.largest, place.scale, -r.log_sum);
        const float prob = exp2_of(log_p);
        values[k] = -r.factor * prob;
        if constexpr (!kWithLoss) {
          if (r.entropy_factor != 0.0f && prob > 0.0f) {
            values[k] -= r.entropy_factor * prob * (log_p - r.offset);
          }
        }
      }
      if (p == target.pack) {
#pragma unroll
        for (int k = 0; k < kSize; ++k) values[k] += k == target.lane ? r.factor : 0.0f;
      }
    }
    store<Out, kSize>(out_row + p * kSize, values);
  }
  if (!known) cluster.sync();  // the others may still read this block's numbers
}

template <class T, class Out, class Source>
void launch_gradient(const LogitRows& logits, const RowChunk& chunk, const Source& source,
                     cudaStream_t stream) {
  const int64_t part_size = part_size_of<T>(logits.vocabulary);
  const size_t bytes = static_cast<size_t>(part_size) * sizeof(T);
  auto* const kernel = gradient_kernel<T, Out, Source>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)),
             "shared memory for a row of logits");
  kernel<<<static_cast<unsigned>(chunk.count * kParts), kThreads, bytes, stream>>>(
      static_cast<T*>(logits.data), logits.stride, logits.vocabulary, part_size, chunk, source);
  check_launch("gradient_kernel");
}

template <class Source>
void launch_by_type(const LogitRows& logits, const RowChunk& chunk, Dtype gradient,
                    const Source& source, cudaStream_t stream) {
  if (chunk.count == 0) return;
  if (logits.type == Dtype::bf16) {
    LEEWAY_CHECK(gradient == Dtype::bf16, "bf16 logits have bf16 gradients");
    launch_gradient<__nv_bfloat16, __nv_bfloat16>(logits, chunk, source, stream);
  } else if (gradient == Dtype::bf16) {
    launch_gradient<float, __nv_bfloat16>(logits, chunk, source, stream);
  } else {
    launch_gradient<float, float>(logits, chunk, source, stream);
  }
}

}  // namespace

int64_t most_vocabulary(Dtype type) { return kParts * kSharedBytes / bytes_of(type); }

void forward_rows(const LogitRows& logits, const RowChunk& chunk, cudaStream_t stream) {
  if (chunk.count == 0) return;
  const unsigned blocks = static_cast<unsigned>(chunk.count);
  with_type(logits.type, [&](auto zero) {
    using T = decltype(zero);
    forward_kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const T*>(logits.data),
                                                    logits.stride, logits.vocabulary,
                                                    part_size_of<T>(logits.vocabulary), chunk);
  });
  check_launch("forward_kernel");
}

void loss_rows(const LogitRows& logits, const RowChunk& chunk, Dtype gradient, const LossPlan& plan,
               const LossBatch& batch, const LossWorkspace& work, float* g, cudaStream_t stream) {
  launch_by_type(logits, chunk, gradient, LossGradient{plan, batch, work, g}, stream);
}

void gradient_rows(const LogitRows& logits, const RowChunk& chunk, Dtype gradient, const float* g,
                   const float* g_entropy, cudaStream_t stream) {
  launch_by_type(logits, chunk, gradient, GivenGradient{g, g_entropy}, stream);
}

}  // namespace leeway::cuda
