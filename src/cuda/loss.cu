#include <algorithm>

#include "core/float32/token_sums.h"
#include "cuda/device.h"
#include "cuda/loss.h"
#include "cuda/selection.h"
#include "cuda/team.cuh"

namespace leeway::cuda {
namespace {

constexpr int kSequenceThreads = 512;
constexpr int kTokenThreads = 256;
constexpr int kTile = 1024;  // tokens of a block at a time
constexpr int kFinalThreads = 1024;
constexpr int kPartials = kSlotCount + 2;  // the slots, the loss, and whether all was finite
constexpr int kLossAt = kSlotCount, kBrokenAt = kSlotCount + 1;

// How sums of a place join: those of the slots as metrics.h says, the two others by adding.
__device__ __forceinline__ double join_at(int k, double a, double b) {
  return k < kSlotCount ? joined(static_cast<Slot>(k), a, b) : a + b;
}
__device__ __forceinline__ double empty_at(int k) {
  return k < kSlotCount ? empty_value(static_cast<Slot>(k)) : 0.0;
}
__device__ __forceinline__ double join_lanes_at(int k, double value) {
  return join_lanes(value, [k](double a, double b) { return join_at(k, a, b); });
}

// ---------------------------------------------------------------------------------------------
// Sequences

__global__ void __launch_bounds__(kSequenceThreads)
    count_kernel(LossPlan plan, LossBatch batch, Prepared prepared) {
  __shared__ double shared[kSequenceThreads / 32];
  Team<kSequenceThreads> team(shared);
  count_sequence(plan, batch, prepared, blockIdx.x, team);
}

__global__ void __launch_bounds__(kSequenceThreads)
    first_kernel(LossPlan plan, LossBatch batch, Prepared prepared) {
  __shared__ double shared[kSequenceThreads / 32];
  Team<kSequenceThreads> team(shared);
  prepare_first(plan, batch, prepared, blockIdx.x, team);
}

__global__ void __launch_bounds__(kSequenceThreads)
    mean_weight_kernel(LossPlan plan, LossBatch batch, Prepared prepared, double* mean) {
  __shared__ double shared[kSequenceThreads / 32];
  Team<kSequenceThreads> team(shared);
  const double value = mean_weight(plan, prepared.sequences, batch.sequences, team);
  if (team.thread() == 0) *mean = value;
}

__global__ void __launch_bounds__(kSequenceThreads)
    second_kernel(LossPlan plan, LossBatch batch, Prepared prepared, const double* mean) {
  __shared__ double shared[kSequenceThreads / 32];
  Team<kSequenceThreads> team(shared);
  const double value = plan.normalisation == WeightNormalisation::none ? 1.0 : *mean;
  prepare_second(plan, batch, prepared, value, blockIdx.x, team);
}

__global__ void __launch_bounds__(kSequenceThreads)
    scale_kernel(LossPlan plan, LossBatch batch, Prepared prepared, double denominator) {
  __shared__ double shared[kSequenceThreads / 32];
  Team<kSequenceThreads> team(shared);
  set_scales(plan, batch, prepared, denominator, team);
}

__global__ void __launch_bounds__(kSequenceThreads)
    sequence_of_kernel(LossBatch batch, int32_t* sequence_of) {
  for (int64_t i = batch.offsets[blockIdx.x] + threadIdx.x; i < batch.offsets[blockIdx.x + 1];
       i += kSequenceThreads) {
    sequence_of[i] = static_cast<int32_t>(blockIdx.x);
  }
}

__global__ void __launch_bounds__(kSequenceThreads)
    finish_kernel(LossPlan plan, LossBatch batch, Prepared prepared, float* grad, double* padding) {
  __shared__ double shared[kSequenceThreads / 32];
  Team<kSequenceThreads> team(shared);
  float longest = 0.0f;
  if (plan.reduction == ReductionKind::padded_length_mean) {
    for (int64_t s = team.thread(); s < batch.sequences; s += kSequenceThreads) {
      longest = fmaxf(longest, static_cast<float>(sequence_length(batch, s)));
    }
    longest = team.max(longest);
  }
  const double lost = finish_sequence(plan, batch, prepared, longest, blockIdx.x, grad, team);
  if (team.thread() == 0) padding[blockIdx.x] = lost;
}

// ---------------------------------------------------------------------------------------------
// Tokens

// The sequence of position i, which lies in [first, last].
__device__ int64_t sequence_at(const LossBatch& batch, int64_t i, int64_t first, int64_t last) {
  while (first < last) {
    const int64_t middle = (first + last + 1) / 2;
    if (batch.offsets[middle] <= i) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return first;
}

// The same among all sequences by a whole warp, which looks at 32 places at a time.
__device__ int64_t find_sequence(const LossBatch& batch, int64_t i) {
  int64_t first = 0, last = batch.sequences - 1;
  while (first < last) {
    const int64_t step = (last - first + 31) / 32;
    const int64_t place = first + step * (threadIdx.x % 32 + 1);
    const unsigned before = __ballot_sync(0xffffffffu, place <= last && batch.offsets[place] <= i);
    const int64_t steps = __popc(before);  // offsets rise: what holds, holds from the first on
    first += step * steps;
    last = min(last, first + step - 1);
  }
  return first;
}

__global__ void __launch_bounds__(kTokenThreads)
    token_kernel(LossPlan plan, LossBatch batch, Prepared prepared, float* grad, double* partials,
                 uint32_t* histogram) {
  __shared__ uint32_t bins[kRatioBins];
  __shared__ double warps[kTokenThreads / 32][kPartials];
  __shared__ int64_t ends[2];
  for (int b = threadIdx.x; b < kRatioBins; b += kTokenThreads) bins[b] = 0;
  float32::TokenSums<> sums;
  for (int64_t begin = int64_t{kTile} * blockIdx.x; begin < batch.tokens;
       begin += int64_t{kTile} * gridDim.x) {
    const int64_t end = min(begin + kTile, batch.tokens);
    __syncthreads();
    if (threadIdx.x < 64) {
      const int64_t s = find_sequence(batch, threadIdx.x < 32 ? begin : end - 1);
      if (threadIdx.x % 32 == 0) ends[threadIdx.x / 32] = s;
    }
    __syncthreads();
#pragma unroll 1
    for (int64_t i = begin + threadIdx.x; i < end; i += kTokenThreads) {
      const int64_t s = sequence_at(batch, i, ends[0], ends[1]);
      SequenceState& state = prepared.sequences[s];
      float32::TokenIn in;
      float32::TokenOut<float> out;
      out.trained = load_token(plan, batch, prepared, i, state, in);
      if (out.trained) out = evaluate_alone(plan, in);
      if (!out.trained) {
        if (grad != nullptr) grad[i] = 0.0f;
        if (batch.kept != nullptr) batch.kept[i] = 0;
        if (prepared.through != nullptr) prepared.through[i] = 0.0f;
        continue;
      }
      if (grad != nullptr) grad[i] = out.grad;
      if (batch.kept != nullptr) batch.kept[i] = out.kept;
      if (prepared.through != nullptr) prepared.through[i] = out.through;
      const int bin = sums.add(plan, batch, i, in, out);
      // Neighbours often share a bin: one of them counts for all.
      const unsigned peers = __match_any_sync(__activemask(), bin);
      if (bin >= 0 && __ffs(peers) - 1 == static_cast<int>(threadIdx.x % 32)) {
        atomicAdd(&bins[bin], __popc(peers));
      }
      state.seen = 1;
      if (out.kept) state.seen_kept = 1;
    }
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Unrolled: the slots' way through the lanes overlaps.
#pragma unroll
  for (int k = 0; k < kPartials; ++k) {
    const double mine = k == kLossAt ? sums.loss : k == kBrokenAt ? sums.not_finite : sums.slot(k);
    const double value = join_lanes_at(k, mine);
    if (lane == 0) warps[warp][k] = value;
  }
  __syncthreads();
  for (int k = threadIdx.x; k < kPartials; k += kTokenThreads) {
    double value = warps[0][k];
    for (int w = 1; w < kTokenThreads / 32; ++w) {
      value = join_at(k, value, warps[w][k]);
    }
    partials[int64_t{kPartials} * blockIdx.x + k] = value;
  }
  for (int b = threadIdx.x; b < kRatioBins; b += kTokenThreads) {
    if (bins[b] != 0) atomicAdd(&histogram[b], bins[b]);
  }
}

// Joins the blocks' sums, one warp to a slot, and writes the row.
__global__ void __launch_bounds__(kFinalThreads)
    final_kernel(LossBatch batch, Prepared prepared, const double* partials, int blocks,
                 const uint32_t* histogram, const double* padding, float* loss, double* metrics) {
  __shared__ double slots[kPartials];
  __shared__ double shared[kFinalThreads / 32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int k = warp; k < kPartials; k += kFinalThreads / 32) {
    double value = empty_at(k);
#pragma unroll 8
    for (int b = lane; b < blocks; b += 32) {
      value = join_at(k, value, partials[int64_t{kPartials} * b + k]);
    }
    value = join_lanes_at(k, value);
    if (lane == 0) slots[k] = value;
  }
  Team<kFinalThreads> team(shared);
  double seen = 0.0, dropped = 0.0, padded = 0.0;
  for (int64_t s = threadIdx.x; s < batch.sequences; s += kFinalThreads) {
    seen += prepared.sequences[s].seen;
    dropped += prepared.sequences[s].seen && !prepared.sequences[s].seen_kept;
    if (padding != nullptr) padded += padding[s];
  }
  seen = team.sum(seen);
  dropped = team.sum(dropped);
  padded = team.sum(padded);
  if (threadIdx.x == 0) {
    const double total = slots[kLossAt] + padded;
    *loss = slots[kBrokenAt] != 0.0 ? NAN : static_cast<float>(total);
  }
  if (metrics == nullptr) return;
  for (int k = threadIdx.x; k < kSlotCount; k += kFinalThreads) {
    double value = slots[k];
    const Slot slot = static_cast<Slot>(k);
    if (slot == Slot::sequences) value = seen;
    if (slot == Slot::sequences_dropped) value = dropped;
    // Without a token or without rollouts the extremes stay infinite.
    const double x_min = slots[static_cast<int>(Slot::ratio_min)];
    const double x_max = slots[static_cast<int>(Slot::ratio_max)];
    if (x_min <= x_max &&
        (slot == Slot::ratio_min || slot == Slot::ratio_max || slot == Slot::kl_max)) {
      value = finished_slot(slot, x_min, x_max);
    }
    // A mean over a stream the batch lacks is NaN: it is the row alone that knows.
    if (slot == Slot::ref_kl && batch.streams[static_cast<int>(Stream::ref)] == nullptr) {
      value = NAN;
    }
    if (slot == Slot::teacher_kl && batch.streams[static_cast<int>(Stream::teacher)] == nullptr) {
      value = NAN;
    }
    metrics[k] = value;
  }
  for (int b = threadIdx.x; b < kRatioBins; b += kFinalThreads) {
    metrics[kSlotCount + b] = histogram[b];
  }
}

int token_blocks(int64_t tokens) {
  const int64_t tiles = std::max<int64_t>(1, (tokens + kTile - 1) / kTile);
  return static_cast<int>(std::min<int64_t>(tiles, 4 * multiprocessors()));
}

bool selects(const LossPlan& plan) {
  return plan.m2_threshold >= 0.0 || plan.covariance_ratio >= 0.0;
}

bool finishes(const LossPlan& plan) {
  return plan.through_mean || plan.reduction == ReductionKind::padded_length_mean;
}

bool scales_differ(const LossPlan& plan) {
  return plan.reduction == ReductionKind::seq_mean_token_mean;
}

LossWorkspace lay_out(const LossPlan& plan, int64_t tokens, int64_t sequences, Arena& arena) {
  LossWorkspace work;
  work.prepared.sequences = arena.take<SequenceState>(sequences);
  work.histogram = arena.take<uint32_t>(kRatioBins);
  work.partials = arena.take<double>(int64_t{kPartials} * token_blocks(tokens));
  work.mean_weight = arena.take<double>(1);
  work.padding = arena.take<double>(sequences);
  if (plan.token_level) {
    work.sequence_of = scales_differ(plan) ? arena.take<int32_t>(tokens) : nullptr;
  } else {
    work.prepared.trained = arena.take<uint8_t>(tokens);
    work.prepared.flags = arena.take<uint8_t>(tokens);
    work.prepared.weights = arena.take<float>(tokens);
    work.prepared.through = arena.take<float>(tokens);
  }
  if (selects(plan)) {
    work.keys = arena.take<double>(tokens);
    work.sorted_keys = arena.take<double>(tokens);
    work.moments = arena.take<double>(tokens + 4);
    work.order = arena.take<int32_t>(tokens);
    work.sorted_order = arena.take<int32_t>(tokens);
    work.sorting_bytes = sorting_bytes(tokens);
    work.sorting = arena.take<char>(work.sorting_bytes);
  }
  return work;
}

void clear(void* memory, int64_t bytes, cudaStream_t stream) {
  check_cuda(cudaMemsetAsync(memory, 0, static_cast<size_t>(bytes), stream), "clearing memory");
}

unsigned per_sequence(const LossBatch& batch) { return static_cast<unsigned>(batch.sequences); }

void prepare_sequences(const LossPlan& plan, const LossBatch& batch, const LossWorkspace& work,
                       cudaStream_t stream) {
  clear(work.prepared.flags, batch.tokens, stream);
  if (plan.m2_threshold >= 0.0) select_m2(plan, batch, work, stream);
  first_kernel<<<per_sequence(batch), kSequenceThreads, 0, stream>>>(plan, batch, work.prepared);
  check_launch("first_kernel");
  if (plan.normalisation != WeightNormalisation::none) {
    mean_weight_kernel<<<1, kSequenceThreads, 0, stream>>>(plan, batch, work.prepared,
                                                           work.mean_weight);
    check_launch("mean_weight_kernel");
  }
  second_kernel<<<per_sequence(batch), kSequenceThreads, 0, stream>>>(plan, batch, work.prepared,
                                                                      work.mean_weight);
  check_launch("second_kernel");
  if (plan.covariance_ratio >= 0.0) select_covariance(plan, batch, work, stream);
}

}  // namespace

LossWorkspace lay_out_loss(const LossPlan& plan, int64_t tokens, int64_t sequences, void* memory) {
  Arena arena(memory);
  return lay_out(plan, tokens, sequences, arena);
}

int64_t loss_workspace_bytes(const LossPlan& plan, int64_t tokens, int64_t sequences) {
  Arena arena(nullptr);
  lay_out(plan, tokens, sequences, arena);
  return arena.used();
}

void prepare_scales(const LossPlan& plan, const LossBatch& batch, double denominator,
                    const LossWorkspace& work, cudaStream_t stream) {
  clear(work.prepared.sequences, batch.sequences * static_cast<int64_t>(sizeof(SequenceState)),
        stream);
  if (!plan.token_level) {
    prepare_sequences(plan, batch, work, stream);
  } else if (denominator < 0.0 || scales_differ(plan)) {
    count_kernel<<<per_sequence(batch), kSequenceThreads, 0, stream>>>(plan, batch, work.prepared);
    check_launch("count_kernel");
  }
  scale_kernel<<<1, kSequenceThreads, 0, stream>>>(plan, batch, work.prepared, denominator);
  check_launch("scale_kernel");
  if (work.sequence_of != nullptr) {
    sequence_of_kernel<<<per_sequence(batch), kSequenceThreads, 0, stream>>>(batch,
                                                                             work.sequence_of);
    check_launch("sequence_of_kernel");
  }
}

void policy_loss(const LossPlan& plan, const LossBatch& batch, double denominator, float* grad,
                 float* loss, double* metrics, const LossWorkspace& work, bool scales_known,
                 cudaStream_t stream) {
  if (!scales_known) prepare_scales(plan, batch, denominator, work, stream);
  clear(work.histogram, kRatioBins * static_cast<int64_t>(sizeof(uint32_t)), stream);
  const int blocks = token_blocks(batch.tokens);
  token_kernel<<<blocks, kTokenThreads, 0, stream>>>(plan, batch, work.prepared, grad,
                                                     work.partials, work.histogram);
  check_launch("token_kernel");
  if (finishes(plan)) {
    finish_kernel<<<per_sequence(batch), kSequenceThreads, 0, stream>>>(plan, batch, work.prepared,
                                                                        grad, work.padding);
    check_launch("finish_kernel");
  }
  final_kernel<<<1, kFinalThreads, 0, stream>>>(
      batch, work.prepared, work.partials, blocks, work.histogram,
      finishes(plan) ? work.padding : nullptr, loss, metrics);
  check_launch("final_kernel");
}

}  // namespace leeway::cuda
