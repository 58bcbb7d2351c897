// A row of 151936 logits in bf16 is 304 KB: more than the shared memory of one multiprocessor, less
// than that of a cluster. Each row is given to a cluster of kCluster blocks; each copies its part
// of the row to shared memory once, the blocks exchange three numbers, and the gradient is made
// from shared memory. Several clusters share a multiprocessor, so that one's copies run beside
// another's arithmetic.
//
// Exponentials are powers of two; scale is log2(e) / temperature. A row's numbers depend on the row
// and the vocabulary alone: one kernel and one order of sums, with and without a gradient, so that
// a proximal forward pass has the bits of the pass that trains.

#include <cooperative_groups.h>
#include <cuda_bf16.h>

#include <algorithm>

#include "core/cuda/device.h"
#include "core/cuda/head_rows.h"
#include "core/cuda/team.cuh"

namespace leeway::cuda {
namespace {

namespace cg = cooperative_groups;

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
constexpr int kCluster = 8;  // the largest a GPU must offer
constexpr int kThreads = 256;
constexpr unsigned kMark = 0x7fc0feedu;  // a NaN no arithmetic makes

__device__ __forceinline__ float exp2_of(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// Spelled out: torch's build flags take the conversions by cast away.
__device__ __forceinline__ float number_of(float value) { return value; }
__device__ __forceinline__ float number_of(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ void put(float* to, float value) { *to = value; }
__device__ __forceinline__ void put(__nv_bfloat16* to, float value) {
  *to = __float2bfloat16_rn(value);
}

// 16 bytes of logits.
template <class T>
struct Pack;
template <>
struct Pack<float> {
  static constexpr int kSize = 4;
  __device__ static void load(const uint4& raw, float* to) {
    to[0] = __uint_as_float(raw.x);
    to[1] = __uint_as_float(raw.y);
    to[2] = __uint_as_float(raw.z);
    to[3] = __uint_as_float(raw.w);
  }
};
template <>
struct Pack<__nv_bfloat16> {
  static constexpr int kSize = 8;
  __device__ static void load(const uint4& raw, float* to) {
    const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      to[2 * k] = __uint_as_float(words[k] << 16);
      to[2 * k + 1] = __uint_as_float(words[k] & 0xffff0000u);
    }
  }
};

__device__ __forceinline__ unsigned two_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}

// Writes kSize numbers; the address is aligned to what they take.
template <class T, int kSize>
__device__ __forceinline__ void store(T* to, const float* values) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int k = 0; k < kSize; k += 4) {
      *reinterpret_cast<float4*>(to + k) =
          make_float4(values[k], values[k + 1], values[k + 2], values[k + 3]);
    }
  } else if constexpr (kSize == 8) {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(two_bf16(values[0], values[1]), two_bf16(values[2], values[3]),
                   two_bf16(values[4], values[5]), two_bf16(values[6], values[7]));
  } else {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(two_bf16(values[0], values[1]), two_bf16(values[2], values[3]));
  }
}

__device__ __forceinline__ float larger_or_nan(float a, float b) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(a), "f"(b));
  return out;
}

// Of the logits z seen so far: the largest, the sum of 2^x and the sum of 2^x x, where
// x = (z - largest) scale. The largest one has x = 0 exactly.
struct Softmax {
  float largest = -INFINITY, sum = 0.0f, weighted = 0.0f;

  __device__ __forceinline__ void raise(float to, float scale) {
    const float shift = (largest - to) * scale, factor = exp2_of(shift);
    weighted = sum == 0.0f ? 0.0f : (weighted + shift * sum) * factor;
    sum *= factor;
    largest = to;
  }
  __device__ __forceinline__ void add(float z, float scale) {  // z <= largest, or NaN
    // Minus infinity has no share; NaN shows.
    const float x = larger_or_nan((z - largest) * scale, -1e30f), e = exp2_of(x);
    sum += e;
    weighted = fmaf(e, x, weighted);
  }
  __device__ void join(Softmax other, float scale) {
    if (other.largest > largest) {
      const Softmax mine = *this;
      *this = other;
      other = mine;
    }
    if (other.sum == 0.0f) return;
    const float shift = (other.largest - largest) * scale;
    if (shift == 0.0f || isnan(shift)) {
      sum += other.sum;
      weighted += other.weighted;
      return;
    }
    const float factor = exp2_of(shift);
    weighted += (other.weighted + shift * other.sum) * factor;
    sum += other.sum * factor;
  }
  __device__ float entropy() const { return kLn2 * (log2f(sum) - weighted / sum); }
};

__device__ Softmax shuffle_down(const Softmax& s, int offset) {
  Softmax other;
  other.largest = __shfl_down_sync(0xffffffffu, s.largest, offset);
  other.sum = __shfl_down_sync(0xffffffffu, s.sum, offset);
  other.weighted = __shfl_down_sync(0xffffffffu, s.weighted, offset);
  return other;
}

// Over a block; valid in thread 0.
template <int kThreads>
__device__ Softmax join_block(Softmax s, float scale, Softmax* shared) {
  for (int offset = 16; offset > 0; offset /= 2) s.join(shuffle_down(s, offset), scale);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = s;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kThreads / 32; ++w) s.join(shared[w], scale);
  }
  return s;
}

template <int kSize>
__device__ __forceinline__ void add_pack(Softmax& softmax, const float* logits, float scale) {
  float largest = logits[0];
#pragma unroll
  for (int k = 1; k < kSize; ++k) largest = fmaxf(largest, logits[k]);
  if (largest > softmax.largest) softmax.raise(largest, scale);
  if (softmax.largest == -INFINITY) {
    // Nothing finite yet: only NaN can matter.
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      if (isnan(logits[k])) softmax.sum = NAN;
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < kSize; ++k) softmax.add(logits[k], scale);
}

struct RowPlace {
  int64_t token;
  float scale;  // log2(e) / temperature
  float inverse_temperature;
};

__device__ RowPlace place_of(const RowChunk& chunk, int64_t row) {
  RowPlace place;
  const int64_t k = chunk.first + row;
  place.token = chunk.rows != nullptr ? chunk.rows[k] : k;
  float temperature = 1.0f;
  if (chunk.temperature != nullptr) {
    temperature = chunk.temperature[chunk.temperature_per_token ? place.token : 0];
  }
  place.inverse_temperature = 1.0f / temperature;
  place.scale = kLog2e * place.inverse_temperature;
  return place;
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

// Where g comes from.
struct NoGradient {};
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

template <class T, class Out, class Source>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads)
    row_kernel(T* logits, int64_t stride, int64_t vocabulary, int64_t part, RowChunk chunk,
               const __grid_constant__ Source source) {
  constexpr bool kWithLoss = std::is_same_v<Source, LossGradient>;
  constexpr bool kGiven = std::is_same_v<Source, GivenGradient>;
  // Without a gradient nothing is read twice, and the row goes straight to registers.
  constexpr bool kHeld = kWithLoss || kGiven;
  constexpr int kSize = Pack<T>::kSize;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) uint64_t barrier;
  __shared__ Softmax shared[kThreads / 32];
  __shared__ Softmax mine;
  __shared__ RowGradient row_gradient;
  const cg::cluster_group cluster = cg::this_cluster();
  const unsigned rank = cluster.block_rank();
  const int64_t row = blockIdx.x / kCluster;
  T* const logits_row = logits + stride * row;
  const int64_t begin = part * rank;
  const int size = static_cast<int>(begin < vocabulary ? min(part, vocabulary - begin) : 0);
  const int packs = (size + kSize - 1) / kSize;
  T* const held = reinterpret_cast<T*>(memory);
  if (kHeld && threadIdx.x == 0 && packs > 0) {
    begin_copy(&barrier, held, logits_row + begin, static_cast<unsigned>(packs) * 16);
  }

  const RowPlace place = place_of(chunk, row);
  const int64_t target = chunk.targets[place.token];
  const float exact = chunk.target_logits != nullptr ? chunk.target_logits[place.token]
                                                     : number_of(logits_row[target]);
  // The target's place in this block's part: its pack and its place in that, if it is here.
  const int64_t target_here = target - begin;
  const int target_pack =
      target_here >= 0 && target_here < size ? static_cast<int>(target_here / kSize) : -1;
  const int target_lane = static_cast<int>(target_here % kSize);
  const auto unpack = [&](const uint4& raw, int p, float* values) {
    Pack<T>::load(raw, values);
    if (p == target_pack) {
#pragma unroll
      for (int k = 0; k < kSize; ++k) values[k] = k == target_lane ? exact : values[k];
    }
  };
  const uint4* const from = reinterpret_cast<const uint4*>(kHeld ? held : logits_row + begin);

  TokenIn token;
  bool takes_part = false;
  if constexpr (kWithLoss) {
    if (threadIdx.x == 0) {
      const int64_t s =
          source.work.sequence_of != nullptr ? source.work.sequence_of[place.token] : 0;
      takes_part = load_token(source.plan, source.batch, source.work.prepared, place.token,
                              source.work.prepared.sequences[s], token);
    }
  }
  const bool known = kGiven && chunk.log_sums_known;
  __syncthreads();
  if (kHeld && packs > 0) wait_copy(&barrier);

  RowGradient r;
  if (!known) {
    Softmax softmax;
    const int whole = size / kSize;
    constexpr int kAhead = kHeld ? 1 : 4;  // loads in flight; sums keep their order
    for (int first = threadIdx.x; first < whole; first += kAhead * kThreads) {
      uint4 raw[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int p = first + a * kThreads;
        if (p < whole) raw[a] = from[p];
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int p = first + a * kThreads;
        if (p >= whole) break;
        float values[kSize];
        unpack(raw[a], p, values);
        add_pack<kSize>(softmax, values, place.scale);
      }
    }
    if (whole < packs && whole % kThreads == static_cast<int>(threadIdx.x)) {
      float values[kSize];
      unpack(from[whole], whole, values);
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        if (whole * kSize + k >= size) values[k] = -INFINITY;
      }
      add_pack<kSize>(softmax, values, place.scale);
    }
    softmax = join_block<kThreads>(softmax, place.scale, shared);
    if (threadIdx.x == 0) mine = softmax;
    cluster.sync();  // also: nobody reads this row's memory any longer
    Softmax all;
    if (threadIdx.x < 32) {
      // Each lane fetches one block's numbers, so that they travel side by side.
      if (threadIdx.x < kCluster) all = *cluster.map_shared_rank(&mine, threadIdx.x);
      Softmax next = all;
      for (int b = 1; b < kCluster; ++b) {
        next = shuffle_down(next, 1);
        all.join(next, place.scale);
      }
    }
    if (threadIdx.x == 0) {
      r.largest = all.largest;
      r.log_sum = log2f(all.sum);
      const float logprob = kLn2 * ((exact - all.largest) * place.scale - r.log_sum);
      const float entropy = all.entropy();
      if constexpr (kWithLoss) {
        float g = 0.0f;
        if (takes_part) {
          token.streams[static_cast<int>(Stream::pi)] = logprob;
          if (source.batch.prox_is_pi) token.streams[static_cast<int>(Stream::prox)] = logprob;
          const TokenOut out = evaluate_token(source.plan, token);
          if (out.trained) g = out.grad;
        }
        r.factor = g * place.inverse_temperature;
        if (rank == 0) source.g[place.token] = g;
      }
      if constexpr (kGiven) r.offset = -entropy * kLog2e;
      if (rank == 0 && chunk.logprobs != nullptr) {
        chunk.logprobs[place.token] = logprob;
        if (chunk.entropy != nullptr) chunk.entropy[place.token] = entropy;
        if (chunk.log_sums != nullptr) {
          chunk.log_sums[place.token] = all.largest * place.scale + r.log_sum;
        }
      }
    }
  } else if constexpr (!std::is_same_v<T, Out>) {
    cluster.sync();  // the gradient is written where other blocks' logits were
  }

  if constexpr (kGiven) {
    if (threadIdx.x == 0) {
      if (known) {
        r.log_sum = chunk.log_sums[place.token];
        r.offset = source.g_entropy != nullptr ? -chunk.entropy[place.token] * kLog2e : 0.0f;
      }
      r.factor = source.g[place.token] * place.inverse_temperature;
      if (source.g_entropy != nullptr) {
        r.entropy_factor = source.g_entropy[place.token] * place.inverse_temperature * kLn2;
      }
    }
  }
  if constexpr (kGiven || kWithLoss) {
    if (threadIdx.x == 0) row_gradient = r;
    __syncthreads();
    r = row_gradient;
    Out* const out_row = reinterpret_cast<Out*>(logits_row) + begin;
    const bool inert = r.factor == 0.0f && r.entropy_factor == 0.0f;
    for (int p = threadIdx.x; p < packs; p += kThreads) {
      float values[kSize];
      if (inert) {
#pragma unroll
        for (int k = 0; k < kSize; ++k) values[k] = 0.0f;
      } else {
        unpack(from[p], p, values);
#pragma unroll
        for (int k = 0; k < kSize; ++k) {
          const float log_p = fmaf(values[k] - r.largest, place.scale, -r.log_sum);
          const float prob = exp2_of(log_p);
          values[k] = -r.factor * prob;
          if constexpr (kGiven) {
            if (r.entropy_factor != 0.0f && prob > 0.0f) {
              values[k] -= r.entropy_factor * prob * (log_p - r.offset);
            }
          }
        }
        if (p == target_pack) {
#pragma unroll
          for (int k = 0; k < kSize; ++k) values[k] += k == target_lane ? r.factor : 0.0f;
        }
      }
      store<Out, kSize>(out_row + p * kSize, values);
    }
  }
  if (!known) cluster.sync();  // the others may still read this block's numbers
}

template <class T, class Out, class Source>
void launch_rows(const LogitRows& logits, const RowChunk& chunk, const Source& source,
                 cudaStream_t stream) {
  constexpr int64_t kSize = Pack<T>::kSize;
  const int64_t part = ((logits.vocabulary + kCluster - 1) / kCluster + kSize - 1) / kSize * kSize;
  const bool held = !std::is_same_v<Source, NoGradient>;
  const size_t bytes = held ? static_cast<size_t>(part) * sizeof(T) : 0;
  auto* const kernel = row_kernel<T, Out, Source>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)),
             "shared memory for a row of logits");
  kernel<<<static_cast<unsigned>(chunk.count * kCluster), kThreads, bytes, stream>>>(
      static_cast<T*>(logits.data), logits.stride, logits.vocabulary, part, chunk, source);
  check_launch("row_kernel");
}

template <class Source>
void launch_by_type(const LogitRows& logits, const RowChunk& chunk, NumberType gradient,
                    const Source& source, cudaStream_t stream) {
  if (chunk.count == 0) return;
  if (logits.type == NumberType::bf16) {
    LEEWAY_CHECK(gradient == NumberType::bf16, "bf16 logits have bf16 gradients");
    launch_rows<__nv_bfloat16, __nv_bfloat16>(logits, chunk, source, stream);
  } else if (gradient == NumberType::bf16) {
    launch_rows<float, __nv_bfloat16>(logits, chunk, source, stream);
  } else {
    launch_rows<float, float>(logits, chunk, source, stream);
  }
}

// ---------------------------------------------------------------------------------------------
// Rows of hidden states, moved in units as wide as their addresses allow

constexpr int kMoveThreads = 128;

// A warp to a row. Products of bf16 are exact in float32.
template <class T>
__global__ void target_kernel(const T* gathered, const T* weight, int64_t hidden_size,
                              RowChunk chunk) {
  const int64_t row = int64_t{blockIdx.x} * (kMoveThreads / 32) + threadIdx.x / 32;
  if (row >= chunk.count) return;
  const int64_t at = chunk.first + row;
  const int64_t token = chunk.rows != nullptr ? chunk.rows[at] : at;
  const T* const h = gathered + hidden_size * row;
  const T* const w = weight + hidden_size * chunk.targets[token];
  float sum = 0.0f;
  for (int64_t k = threadIdx.x % 32; k < hidden_size; k += 32) {
    sum = fmaf(number_of(h[k]), number_of(w[k]), sum);
  }
  sum = join_lanes(sum, Add());
  if (threadIdx.x % 32 == 0) chunk.target_logits[token] = sum;
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
    put(numbers + i, number_of(numbers[i]) * by);
  }
}

}  // namespace

int64_t most_vocabulary(NumberType type) {
  constexpr int64_t kSharedBytes = 224 << 10;
  return kCluster * kSharedBytes / bytes_of(type);
}

void forward_rows(const LogitRows& logits, const RowChunk& chunk, cudaStream_t stream) {
  launch_by_type(logits, chunk, logits.type, NoGradient{}, stream);
}

void loss_rows(const LogitRows& logits, const RowChunk& chunk, NumberType gradient,
               const LossPlan& plan, const LossBatch& batch, const LossWorkspace& work, float* g,
               cudaStream_t stream) {
  launch_by_type(logits, chunk, gradient, LossGradient{plan, batch, work, g}, stream);
}

void gradient_rows(const LogitRows& logits, const RowChunk& chunk, NumberType gradient,
                   const float* g, const float* g_entropy, cudaStream_t stream) {
  launch_by_type(logits, chunk, gradient, GivenGradient{g, g_entropy}, stream);
}

void gather_rows(const void* hidden, int64_t hidden_stride, int64_t hidden_size, NumberType type,
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

void clear_rows(void* gathered, int64_t hidden_size, NumberType type, const RowChunk& chunk,
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
                        NumberType type, const RowChunk& chunk, cudaStream_t stream) {
  if (chunk.count == 0) return;
  constexpr int kRows = kMoveThreads / 32;
  const unsigned blocks = static_cast<unsigned>((chunk.count + kRows - 1) / kRows);
  if (type == NumberType::bf16) {
    target_kernel<<<blocks, kMoveThreads, 0, stream>>>(static_cast<const __nv_bfloat16*>(gathered),
                                                       static_cast<const __nv_bfloat16*>(weight),
                                                       hidden_size, chunk);
  } else {
    target_kernel<<<blocks, kMoveThreads, 0, stream>>>(
        static_cast<const float*>(gathered), static_cast<const float*>(weight), hidden_size, chunk);
  }
  check_launch("target_kernel");
}

void scatter_rows(const void* from, int64_t hidden_size, NumberType type, const RowChunk& chunk,
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

void scale_in_place(void* numbers, int64_t count, NumberType type, const float* factor,
                    cudaStream_t stream) {
  if (count == 0) return;
  const unsigned blocks =
      static_cast<unsigned>(std::min<int64_t>((count + 255) / 256, 16 * multiprocessors()));
  if (type == NumberType::bf16) {
    scale_kernel<<<blocks, 256, 0, stream>>>(static_cast<__nv_bfloat16*>(numbers), count, factor);
  } else {
    scale_kernel<<<blocks, 256, 0, stream>>>(static_cast<float*>(numbers), count, factor);
  }
  check_launch("scale_kernel");
}

}  // namespace leeway::cuda
