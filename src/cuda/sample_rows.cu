// Two kernels: the first reads the logits, eight blocks for a row, and leaves sums of segments; the
// second, one block for a row, finds the segment and in it the token.
//
// The logprobs of a trainer come from logits that are rounded to bf16, except for the token's own
// (row_softmax.cuh). That is not known before the draw; but it is in the share of one thread alone.
// So the first kernel also leaves what each warp sums of the rounded logits, and the second sums
// the token's warp again.

#include <cfloat>

#include "cuda/early_launch.cuh"
#include "cuda/row_softmax.cuh"
#include "cuda/sample_rows.h"
#include "leeway/error.h"

namespace leeway::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;
constexpr int kPack = Pack<__nv_bfloat16>::kSize;  // logits that a thread takes at a time
constexpr int kSegment = kWarp * kPack;            // ids: what a warp takes at a time
constexpr int kRound = kThreads * kPack;           // ids: what a block takes at a time

// Of the weights of a segment's ids.
struct Segment {
  float largest;       // logit; NaN: there is one that no distribution can have
  float sum, raw_sum;  // of exp(z - largest), at the temperature and without it
};

// What a warp has summed of the rounded logits, at the temperature and without it.
struct Rounded {
  float largest, sum, raw_sum;
};

// Where the parts of a row lie, in the workspace too.
struct Layout {
  int vocabulary, part_size, rounds;  // rounds of a part
  int segments() const { return kParts * rounds * kWarps; }
  int64_t bytes_of_draw() const {
    return static_cast<int64_t>(sizeof(Segment)) * segments() +
           static_cast<int64_t>(sizeof(Rounded)) * kParts * kWarps;
  }
};

Layout layout_of(int64_t vocabulary) {
  const int64_t part_size = part_size_of<__nv_bfloat16>(vocabulary);
  return {static_cast<int>(vocabulary), static_cast<int>(part_size),
          static_cast<int>((part_size + kRound - 1) / kRound)};
}

struct DrawSpace {
  Segment* segments;  // [kParts, rounds, kWarps], which is the order of ids
  Rounded* rounded;   // [kParts, kWarps]
};
__device__ DrawSpace space_of(const SampleRows& batch, const Layout& layout, int64_t draw) {
  const int count = kParts * layout.rounds * kWarps;
  auto* segments = static_cast<Segment*>(batch.workspace);
  auto* rounded = reinterpret_cast<Rounded*>(segments + batch.draws * count);
  return {segments + draw * count, rounded + draw * kParts * kWarps};
}

// Pack p of a part; beyond its end there is minus infinity.
__device__ __forceinline__ void load_pack(const float* part, int size, int p, bool aligned,
                                          float* values) {
  const int first = p * kPack;
  if (aligned && first + kPack <= size) {
#pragma unroll
    for (int k = 0; k < kPack; k += 4) {
      const float4 four = *reinterpret_cast<const float4*>(part + first + k);
      values[k] = four.x, values[k + 1] = four.y, values[k + 2] = four.z, values[k + 3] = four.w;
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < kPack; ++k) values[k] = first + k < size ? part[first + k] : -INFINITY;
}

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  }
  return x;
}

__device__ __forceinline__ void round_pack(float* values) {
#pragma unroll
  for (int k = 0; k < kPack; k += 2) {
    const unsigned two = two_bf16(values[k], values[k + 1]);
    values[k] = __uint_as_float(two << 16), values[k + 1] = __uint_as_float(two & 0xffff0000u);
  }
}

__device__ __forceinline__ float largest_of_pack(const float* values) {
  float largest = values[0];
#pragma unroll
  for (int k = 1; k < kPack; ++k) largest = larger_or_nan(largest, values[k]);
  return largest;
}

// The sum of a Softmax, with its bits.
struct PowerSum {
  float largest = -INFINITY, sum = 0.0f;

  // `most` is the largest of the values.
  __device__ __forceinline__ void add_pack(const float* values, float most, float scale) {
    if (most > largest) {
      sum = __fmul_rn(sum, exp2_of((largest - most) * scale));
      largest = most;
    }
    if (largest == -INFINITY) return;
#pragma unroll
    for (int k = 0; k < kPack; ++k) sum += exp2_of((values[k] - largest) * scale);
  }
};

// Over a warp; valid in lane 0.
__device__ __forceinline__ PowerSum join_warp(const PowerSum& own, float scale) {
  Softmax all;
  all.largest = own.largest, all.sum = own.sum;
  all = join_warp(all, scale);
  return {all.largest, all.sum};
}

__device__ __forceinline__ float sum_of_powers(const float* values, float base, float scale) {
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kPack; ++k) sum += exp2_of((values[k] - base) * scale);
  return warp_sum(sum);
}

// A thread's packs of a part. A segment's `largest` is that of what its warp has seen so far, which
// takes no more than a look whether there is a larger one: the first segment with the row's largest
// logit is the one that has it, and weights that vanish beside it vanish in the row.
template <bool kExact, bool kTempered>
__device__ __forceinline__ void scan_part(const float* logits, const PartPlace& part, int rounds,
                                          float scale, Segment* segments, Rounded* of_warps) {
  const bool aligned = reinterpret_cast<uint64_t>(logits) % sizeof(float4) == 0;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int packs = (part.size + kPack - 1) / kPack;
  PowerSum rounded_sum, raw_rounded_sum;
  float seen = -INFINITY;  // the warp's largest
  float next[kPack];
  load_pack(logits, part.size, static_cast<int>(threadIdx.x), aligned, next);
  for (int round = 0; round < rounds; ++round) {
    const int p = round * kThreads + static_cast<int>(threadIdx.x);
    float values[kPack];
#pragma unroll
    for (int k = 0; k < kPack; ++k) values[k] = next[k];
    load_pack(logits, part.size, p + kThreads, aligned, next);
    const float most = largest_of_pack(values);
    if (__any_sync(kAllLanes, !(most <= seen))) {
      seen = __any_sync(kAllLanes, !(most <= FLT_MAX)) ? NAN : fmaxf(seen, warp_max(most));
    }
    Segment segment{seen, 0.0f, 0.0f};
    if (seen > -INFINITY) {
      segment.raw_sum = sum_of_powers(values, seen, kLog2e);
      segment.sum = kTempered ? sum_of_powers(values, seen, scale) : segment.raw_sum;
    }
    if (lane == 0) segments[round * kWarps + warp] = segment;
    if constexpr (kExact) {
      if (p >= packs) continue;
      round_pack(values);
      const float rounded_most = rounded<__nv_bfloat16>(most);
      raw_rounded_sum.add_pack(values, rounded_most, kLog2e);
      if constexpr (kTempered) rounded_sum.add_pack(values, rounded_most, scale);
    }
  }
  if constexpr (kExact) {
    raw_rounded_sum = join_warp(raw_rounded_sum, kLog2e);
    if constexpr (kTempered) rounded_sum = join_warp(rounded_sum, scale);
    if (lane == 0) {
      of_warps[warp] = {raw_rounded_sum.largest, kTempered ? rounded_sum.sum : raw_rounded_sum.sum,
                        raw_rounded_sum.sum};
    }
  }
}

template <bool kExact>
__global__ void __launch_bounds__(kThreads) scan_kernel(SampleRows batch, Layout layout) {
  wait_for_earlier_kernels();
  let_next_kernel_begin();
  const int64_t draw = blockIdx.x / kParts;
  const int part_number = static_cast<int>(blockIdx.x % kParts);
  const float inverse = batch.inverse_temperatures[draw];
  const PartPlace part = part_of(layout.vocabulary, layout.part_size, part_number);
  const float* logits = batch.logits + batch.rows[draw] * batch.stride + part.begin;
  const DrawSpace space = space_of(batch, layout, draw);
  Segment* segments = space.segments + part_number * layout.rounds * kWarps;
  Rounded* of_warps = space.rounded + part_number * kWarps;
  if (inverse != 1.0f && inverse != 0.0f) {
    scan_part<kExact, true>(logits, part, layout.rounds, kLog2e * inverse, segments, of_warps);
  } else {
    scan_part<kExact, false>(logits, part, layout.rounds, kLog2e, segments, of_warps);
  }
}

// ---------------------------------------------------------------------------------------------
// The second kernel

// In every thread. NaN if any is.
__device__ float largest_of(const Segment* segments, int count, float* scratch) {
  float largest = -INFINITY;
  for (int s = threadIdx.x; s < count; s += kThreads) {
    largest = larger_or_nan(largest, segments[s].largest);
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    largest = larger_or_nan(largest, __shfl_xor_sync(kAllLanes, largest, step));
  }
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = largest;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) largest = larger_or_nan(largest, scratch[w]);
  return largest;
}

__device__ inline double weight_of(const Segment& segment, float sum, float largest, float scale) {
  if (sum == 0.0f) return 0.0;
  return static_cast<double>(sum) *
         static_cast<double>(exp2_of((segment.largest - largest) * scale));
}

// The segment in which the cumulative sum exceeds the target, and the sum before it. If rounding
// keeps the sum below its target, the last segment with a positive weight is used.
struct Place {
  int segment;
  double before, target;
};

// Each thread has neighbouring segments, so that threads and segments have one order.
struct ThreadSegments {
  int first, end;
  __device__ explicit ThreadSegments(int count) {
    const int each = (count + kThreads - 1) / kThreads;
    first = min(count, static_cast<int>(threadIdx.x) * each);
    end = min(count, first + each);
  }
};

// Sums over a block: of the threads before, and of all.
struct Scanned {
  double before, all;
};
__device__ Scanned scan_block(double own, double* scratch) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  double sum = own;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const double lower = __shfl_up_sync(kAllLanes, sum, step);
    if (lane >= step) sum += lower;
  }
  if (lane == kWarp - 1) scratch[warp] = sum;
  const double lower = __shfl_up_sync(kAllLanes, sum, 1);
  __syncthreads();
  double before = 0.0, all = 0.0;
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before = all;
    all += scratch[w];
  }
  __syncthreads();
  return {lane == 0 ? before : before + lower, all};
}

// By one warp: the first id of the segment at which the sum exceeds the target, or the last one
// with a positive weight. All of the segment is on its way before the first of it is looked at.
__device__ int find_id(const float* logits, int begin, int end, float largest, float scale,
                       const Place& place) {
  constexpr int kTurns = kSegment / kWarp;
  const int lane = threadIdx.x % kWarp;
  float found[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int id = begin + turn * kWarp + lane;
    found[turn] = id < end ? logits[id] : -INFINITY;
  }
  double before = place.before;
  int last = begin;
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int base = begin + turn * kWarp;
    const float weight = base + lane < end ? exp2_of((found[turn] - largest) * scale) : 0.0f;
    double sum = static_cast<double>(weight);
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const double lower = __shfl_up_sync(kAllLanes, sum, step);
      if (lane >= step) sum += lower;
    }
    const unsigned there = __ballot_sync(kAllLanes, weight > 0.0f);
    const unsigned beyond = __ballot_sync(kAllLanes, weight > 0.0f && before + sum > place.target);
    if (beyond != 0) return base + __ffs(static_cast<int>(beyond)) - 1;
    if (there != 0) last = base + kWarp - 1 - __clz(static_cast<int>(there));
    before += __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
  return last;
}

// By one warp: the first id of the segment with the largest logit.
__device__ int find_largest(const float* logits, int begin, int end, float largest) {
  for (int base = begin; base < end; base += kWarp) {
    const int id = base + static_cast<int>(threadIdx.x) % kWarp;
    const unsigned there = __ballot_sync(kAllLanes, id < end && logits[id] == largest);
    if (there != 0) return base + __ffs(static_cast<int>(there)) - 1;
  }
  return begin;
}

// By one warp, valid in lane 0: the logprob of `id`, whose exact logit is given, as the trainer's
// head computes it from rounded logits.
__device__ float rounded_logprob(const float* row, const Layout& layout, const Rounded* warps,
                                 int id, float exact, float scale, bool raw) {
  const int lane = threadIdx.x % kWarp;
  const int part_number = id / layout.part_size;
  const PartPlace part = part_of(layout.vocabulary, layout.part_size, part_number);
  const int packs = (part.size + kPack - 1) / kPack;
  const bool aligned = reinterpret_cast<uint64_t>(row + part.begin) % sizeof(float4) == 0;
  const int own_pack = (id - part_number * layout.part_size) / kPack, own_lane = id % kPack;
  const int own_warp = own_pack % kThreads / kWarp;
  Softmax again;
  constexpr int kAhead = 5;  // loads under way at a time
  for (int first = own_warp * kWarp + lane; first < packs; first += kAhead * kThreads) {
    float values[kAhead][kPack];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      load_pack(row + part.begin, part.size, first + a * kThreads, aligned, values[a]);
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int p = first + a * kThreads;
      if (p >= packs) break;
      round_pack(values[a]);
      if (p == own_pack) {
#pragma unroll
        for (int k = 0; k < kPack; ++k) values[a][k] = k == own_lane ? exact : values[a][k];
      }
      add_pack<kPack>(again, values[a], scale);
    }
  }
  again = join_warp(again, scale);
  again.largest = __shfl_sync(kAllLanes, again.largest, 0);
  again.sum = __shfl_sync(kAllLanes, again.sum, 0);
  Softmax of_lane;
  if (lane < kParts) {
    for (int w = 0; w < kWarps; ++w) {
      Softmax of_warp = again;
      if (lane != part_number || w != own_warp) {
        const Rounded& found = warps[lane * kWarps + w];
        of_warp.largest = found.largest;
        of_warp.sum = raw ? found.raw_sum : found.sum;
      }
      if (w == 0) {
        of_lane = of_warp;
      } else {
        of_lane.join(of_warp, scale);
      }
    }
  }
  return logprob_of(join_parts(of_lane, scale), exact, scale);
}

template <bool kExact>
__global__ void __launch_bounds__(kThreads) choose_kernel(SampleRows batch, Layout layout) {
  __shared__ float scratch[kWarps];
  __shared__ double sums[kWarps];
  __shared__ Place place;
  __shared__ int last_segment;
  wait_for_earlier_kernels();

  const int64_t draw = blockIdx.x;
  const DrawSpace space = space_of(batch, layout, draw);
  const int count = kParts * layout.rounds * kWarps;
  const float* row = batch.logits + batch.rows[draw] * batch.stride;
  const float inverse = batch.inverse_temperatures[draw], scale = kLog2e * inverse;
  const bool certain = inverse == 0.0f;
  const float largest = largest_of(space.segments, count, scratch);
  if (!isfinite(largest) || !isfinite(largest * inverse)) {
    if (threadIdx.x == 0) batch.sampled[draw] = {0, 0.0f, 0.0f, 1};
    return;
  }

  const ThreadSegments own(count);
  double sum = 0.0, raw_sum = 0.0;
  int last = -1;  // with a positive weight
  for (int s = own.first; s < own.end; ++s) {
    const Segment& segment = space.segments[s];
    const double weight = certain ? (segment.largest == largest ? 1.0 : 0.0)
                                  : weight_of(segment, segment.sum, largest, scale);
    sum += weight;
    if (!kExact) raw_sum += weight_of(segment, segment.raw_sum, largest, kLog2e);
    if (weight > 0.0) last = s;
  }
  if (threadIdx.x == 0) last_segment = 0, place.segment = count;
  const Scanned scanned = scan_block(sum, sums);
  const Scanned raw = kExact ? Scanned{} : scan_block(raw_sum, sums);
  const double target = certain ? 0.0 : batch.uniforms[draw] * scanned.all;
  // The first segment whose sum is beyond the target: at most one thread of each warp can have it
  // first, and the least of all is taken.
  int found = count;
  double before = scanned.before;
  for (int s = own.first; s < own.end && found == count; ++s) {
    const Segment& segment = space.segments[s];
    const double weight = certain ? (segment.largest == largest ? 1.0 : 0.0)
                                  : weight_of(segment, segment.sum, largest, scale);
    if (weight > 0.0 && before + weight > target) {
      found = s;
    } else {
      before += weight;
    }
  }
  if (last >= 0) atomicMax(&last_segment, last);
  if (found < count) atomicMin(&place.segment, found);
  __syncthreads();
  const int chosen = place.segment < count ? place.segment : last_segment;
  __syncthreads();
  if (chosen >= own.first && chosen < own.end) {
    if (found != chosen) {  // the last one, which the target lies behind
      before = scanned.before;
      for (int s = own.first; s < chosen; ++s) {
        before += weight_of(space.segments[s], space.segments[s].sum, largest, scale);
      }
    }
    place = {chosen, before, target};
  }
  __syncthreads();
  if (threadIdx.x >= kWarp) return;

  const int part = chosen / (layout.rounds * kWarps), within = chosen % (layout.rounds * kWarps);
  const int begin = part * layout.part_size + within * kSegment;
  const int end =
      min(min(begin + kSegment, (part + 1) * layout.part_size), static_cast<int>(batch.vocabulary));
  const int id = certain ? find_largest(row, begin, end, largest)
                         : find_id(row, begin, end, largest, scale, place);
  SampledRow result;
  result.id = id;
  if constexpr (kExact) {
    const int64_t size = batch.hidden_size;
    const auto* hidden = static_cast<const __nv_bfloat16*>(batch.hidden) + batch.rows[draw] * size;
    const auto* weight = static_cast<const __nv_bfloat16*>(batch.weight) + id * size;
    const float exact = __shfl_sync(kAllLanes, exact_logit(hidden, weight, size), 0);
    result.raw_logprob =
        rounded_logprob(row, layout, space.rounded, id, exact, kLog2e, /*raw=*/true);
    result.processed_logprob = result.raw_logprob;
    if (inverse != 1.0f && !certain) {
      result.processed_logprob =
          rounded_logprob(row, layout, space.rounded, id, exact, scale, /*raw=*/false);
    }
  } else {
    const double above = static_cast<double>(row[id] - largest);
    result.raw_logprob = static_cast<float>(above - log(raw.all));
    result.processed_logprob =
        static_cast<float>(above * static_cast<double>(inverse) - log(scanned.all));
  }
  if (certain) result.processed_logprob = 0.0f;
  if (threadIdx.x == 0) batch.sampled[draw] = result;
}

template <bool kExact>
void launch(const SampleRows& batch, cudaStream_t stream) {
  const Layout layout = layout_of(batch.vocabulary);
  launch_early(scan_kernel<kExact>, static_cast<unsigned>(batch.draws * kParts), kThreads, 0,
               stream, batch, layout);
  check_launch("sample_rows");
  launch_early(choose_kernel<kExact>, static_cast<unsigned>(batch.draws), kThreads, 0, stream,
               batch, layout);
  check_launch("sample_rows, choosing");
}

}  // namespace

int64_t sample_workspace_bytes(int64_t vocabulary, int64_t draws) {
  return draws * layout_of(vocabulary).bytes_of_draw();
}

void sample_rows(const SampleRows& batch, cudaStream_t stream) {
  if (batch.draws == 0) return;
  batch.hidden != nullptr ? launch<true>(batch, stream) : launch<false>(batch, stream);
}

}  // namespace leeway::cuda
