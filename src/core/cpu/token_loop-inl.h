// The loop over a run of tokens in SIMD vectors: loads, the formulas, stores and metric sums.
// Included once per SIMD level, hence the guard that Highway toggles.
//
// Lanes of masked tokens are zeroed on load, so that whatever they hold is inert from there on.

#if defined(LEEWAY_CORE_CPU_TOKEN_LOOP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LEEWAY_CORE_CPU_TOKEN_LOOP_INL_H_
#undef LEEWAY_CORE_CPU_TOKEN_LOOP_INL_H_
#else
#define LEEWAY_CORE_CPU_TOKEN_LOOP_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/cpu/token_kernel.h"
#include "core/cpu/vector_number-inl.h"
#include "core/quantities.h"

// Not inlined, and not copied for a caller's constants either: the bodies are long, and each copy
// costs seconds to compile.
#undef LEEWAY_ONE_COPY
#if HWY_COMPILER_GCC_ACTUAL
#define LEEWAY_ONE_COPY __attribute__((noinline, noclone))
#else
#define LEEWAY_ONE_COPY HWY_NOINLINE
#endif

HWY_BEFORE_NAMESPACE();
namespace leeway {
namespace HWY_NAMESPACE {

// A vector of tokens as evaluate_token() takes it: those of a run from `i` on.
template <class Shape>
struct VectorToken {
  using Number = V;
  using Bytes = hn::Vec<hn::Rebind<int32_t, D>>;

  const TokenInputs& in;
  const SequenceNumbers& sequence;
  size_t i;
  M trained_lanes;
  V pi_lanes, advantage_lanes, batch_weight_lanes;

  HWY_INLINE VectorToken(const TokenInputs& inputs, const SequenceNumbers& numbers, size_t at)
      : in(inputs), sequence(numbers), i(at) {
    const V zero = hn::Zero(D());
    trained_lanes = hn::Eq(zero, zero);
    if (in.mask != nullptr) trained_lanes = hn::And(trained_lanes, nonzero(bytes(in.mask)));
    batch_weight_lanes = constant<V>(1.0f);
    if (!Shape::kPlain && in.batch_weights != nullptr) {
      const V raw = hn::LoadU(D(), in.batch_weights + i);
      trained_lanes = hn::And(trained_lanes, hn::Ne(raw, zero));
      batch_weight_lanes = where(trained_lanes, raw);
    }
    advantage_lanes = where(trained_lanes, hn::LoadU(D(), in.advantages + i));
    pi_lanes = stream(static_cast<int>(Stream::pi));
  }

  HWY_INLINE Bytes bytes(const uint8_t* from) const {
    return hn::PromoteTo(hn::Rebind<int32_t, D>(), hn::LoadU(hn::Rebind<uint8_t, D>(), from + i));
  }
  HWY_INLINE M nonzero(Bytes values) const {
    const hn::Rebind<int32_t, D> di;
    return hn::RebindMask(D(), hn::Ne(values, hn::Zero(di)));
  }

  HWY_INLINE M trained() const { return trained_lanes; }
  HWY_INLINE V stream(int k) const {
    return where(trained_lanes, hn::LoadU(D(), in.streams[k] + i));
  }
  HWY_INLINE V pi() const { return pi_lanes; }
  HWY_INLINE V raw_advantage() const { return advantage_lanes; }
  HWY_INLINE V mean_advantage() const { return constant<V>(sequence.mean_advantage); }
  HWY_INLINE V batch_weight() const { return batch_weight_lanes; }
  HWY_INLINE M in_batch_mask() const {
    return in.loss_mask != nullptr ? nonzero(bytes(in.loss_mask)) : trained_lanes;
  }
  HWY_INLINE V log_ratio() const { return constant<V>(sequence.log_ratio); }
  HWY_INLINE V scale() const { return constant<V>(sequence.scale); }
  HWY_INLINE bool gates_in_flags() const { return in.gates_in_flags; }
  HWY_INLINE bool has_flags() const { return in.flags != nullptr; }
  HWY_INLINE Bytes flags() const { return bytes(in.flags); }
  HWY_INLINE M flagged(Bytes flags, int bit) const {
    return nonzero(hn::And(flags, hn::Set(hn::Rebind<int32_t, D>(), bit)));
  }
  HWY_INLINE bool has_weight() const { return in.weights != nullptr; }
  HWY_INLINE V weight() const { return where(trained_lanes, hn::LoadU(D(), in.weights + i)); }
};

// What one pass over a chunk of tokens leaves for the metrics: they have loops of their own, which
// keeps the numbers of each loop in registers. Masks are bits, in bytes of their own per vector.
constexpr size_t kChunk = 1024;
struct Chunk {
  enum Row { log_ratio, ratio, coefficient, weight, penalty, ref_log, teacher_log, rows };
  enum Bits {
    trained,
    positive,
    negative,
    gone,
    below,
    above,
    kept,
    zero_weight,
    clip_low,
    clip_high,
    clip_binding,
    dual_clipped,
    bit_rows
  };
  HWY_ALIGN float values[rows][kChunk + HWY_MAX_BYTES / 4];
  HWY_ALIGN uint16_t bins[kChunk + HWY_MAX_BYTES / 4];
  HWY_ALIGN uint8_t bits[bit_rows][kChunk + 8];
};

// Where a vector lies in a chunk.
struct ChunkPlace {
  size_t token, byte;
  HWY_INLINE explicit ChunkPlace(size_t at)
      : token(at), byte(at / hn::Lanes(D()) * ((hn::Lanes(D()) + 7) / 8)) {}
};

// What a run has, the same for all its tokens.
struct RunFacts {
  bool has_rollout, has_ref, has_teacher, has_weight, has_penalty, has_clip;
  // Plain losses of the ratio: what is not dropped is kept, and its coefficient is the ratio. The
  // rows of both are not written.
  bool kept_is_ratio, coefficient_is_mismatch;
};

// A vector of a chunk, as sums ask for it.
struct ChunkFacts {
  using Number = V;

  const RunFacts& run;
  const Chunk& chunk;
  ChunkPlace place;

  HWY_INLINE V row(Chunk::Row row) const { return hn::Load(D(), chunk.values[row] + place.token); }
  HWY_INLINE M bits(Chunk::Bits bits) const {
    return hn::LoadMaskBits(D(), chunk.bits[bits] + place.byte);
  }
  HWY_INLINE M trained() const { return bits(Chunk::trained); }
  HWY_INLINE M positive() const { return bits(Chunk::positive); }
  HWY_INLINE M negative() const { return bits(Chunk::negative); }
  HWY_INLINE M gone() const { return bits(Chunk::gone); }
  HWY_INLINE V coefficient() const {
    if (run.coefficient_is_mismatch) return where(without(trained(), gone()), row(Chunk::ratio));
    return row(Chunk::coefficient);
  }
  HWY_INLINE V mismatch_log() const { return row(Chunk::log_ratio); }
  HWY_INLINE V mismatch_ratio() const { return row(Chunk::ratio); }
  HWY_INLINE bool has_penalty() const { return run.has_penalty; }
  HWY_INLINE V penalty() const { return row(Chunk::penalty); }
  HWY_INLINE bool has_weight() const { return run.has_weight; }
  HWY_INLINE V weight() const { return row(Chunk::weight); }
  HWY_INLINE bool has_ref() const { return run.has_ref; }
  HWY_INLINE V ref_log() const { return row(Chunk::ref_log); }
  HWY_INLINE bool has_teacher() const { return run.has_teacher; }
  HWY_INLINE V teacher_log() const { return row(Chunk::teacher_log); }
};

// 64 bits of a chunk's masks, as counts ask for them.
struct WordFacts {
  const RunFacts& run;
  const Chunk& chunk;
  size_t at;

  HWY_INLINE uint64_t word(Chunk::Bits bits) const {
    uint64_t out;
    std::memcpy(&out, chunk.bits[bits] + at, sizeof out);
    return out;
  }
  HWY_INLINE uint64_t trained() const { return word(Chunk::trained); }
  HWY_INLINE uint64_t positive() const { return word(Chunk::positive); }
  HWY_INLINE uint64_t negative() const { return word(Chunk::negative); }
  HWY_INLINE uint64_t gone() const { return word(Chunk::gone); }
  HWY_INLINE uint64_t below() const { return word(Chunk::below); }
  HWY_INLINE uint64_t above() const { return word(Chunk::above); }
  HWY_INLINE uint64_t kept() const {
    return run.kept_is_ratio ? trained() & ~gone() : word(Chunk::kept);
  }
  HWY_INLINE bool has_weight() const { return run.has_weight; }
  HWY_INLINE uint64_t zero_weight() const { return word(Chunk::zero_weight); }
  HWY_INLINE bool has_clip() const { return run.has_clip; }
  HWY_INLINE uint64_t clip_low() const { return word(Chunk::clip_low); }
  HWY_INLINE uint64_t clip_high() const { return word(Chunk::clip_high); }
  HWY_INLINE uint64_t clip_binding() const { return word(Chunk::clip_binding); }
  HWY_INLINE uint64_t dual_clipped() const { return word(Chunk::dual_clipped); }
};

// No token, but all that one can have: for going over the slots of the table.
struct NoFacts {
  using Number = V;

  HWY_INLINE M trained() const { return nothing<V>(); }
  HWY_INLINE M positive() const { return nothing<V>(); }
  HWY_INLINE M negative() const { return nothing<V>(); }
  HWY_INLINE M gone() const { return nothing<V>(); }
  HWY_INLINE V coefficient() const { return hn::Zero(D()); }
  HWY_INLINE V mismatch_log() const { return hn::Zero(D()); }
  HWY_INLINE V mismatch_ratio() const { return hn::Zero(D()); }
  HWY_INLINE bool has_penalty() const { return true; }
  HWY_INLINE V penalty() const { return hn::Zero(D()); }
  HWY_INLINE bool has_weight() const { return true; }
  HWY_INLINE V weight() const { return hn::Zero(D()); }
  HWY_INLINE bool has_ref() const { return true; }
  HWY_INLINE V ref_log() const { return hn::Zero(D()); }
  HWY_INLINE bool has_teacher() const { return true; }
  HWY_INLINE V teacher_log() const { return hn::Zero(D()); }
};

// The sums of a run, a vector to a slot. kSlots: those of leeway/metrics.h, and more where rules
// bring sums of their own.
template <int kSlots>
struct VectorTally {
  uint64_t counts[kSlots];
  V sums[kSlots];  // extremes too

  HWY_INLINE V& of(Slot slot) { return sums[static_cast<int>(slot)]; }
  HWY_INLINE V of(Slot slot) const { return sums[static_cast<int>(slot)]; }
  HWY_INLINE void count(Slot slot, uint64_t mask) {
    counts[static_cast<int>(slot)] += static_cast<uint64_t>(std::popcount(mask));
  }
  HWY_INLINE void sum(Slot slot, V value) { of(slot) = hn::Add(of(slot), value); }
  HWY_INLINE void sum_squares(Slot slot, V value) { of(slot) = hn::MulAdd(value, value, of(slot)); }
  HWY_INLINE void smallest(Slot slot, M mask, V value) {
    of(slot) = select(mask, min_of(of(slot), value), of(slot));
  }
  HWY_INLINE void largest(Slot slot, M mask, V value) {
    of(slot) = select(mask, max_of(of(slot), value), of(slot));
  }
};

// Calls `act(slot)` for each slot that a part of the table sums up.
template <class Act>
struct SlotVisitor {
  const Act& act;
  HWY_INLINE void sum(Slot slot, V) const { act(slot); }
  HWY_INLINE void sum_squares(Slot slot, V) const { act(slot); }
  HWY_INLINE void smallest(Slot slot, M, V) const { act(slot); }
  HWY_INLINE void largest(Slot slot, M, V) const { act(slot); }
};

// The parts of the table of sums, one loop each.
struct Coefficients {
  template <class Facts, class Tally>
  static HWY_INLINE void add(const Facts& facts, Tally& tally) {
    sum_coefficients(facts, tally);
  }
};
struct Mismatches {
  template <class Facts, class Tally>
  static HWY_INLINE void add(const Facts& facts, Tally& tally) {
    sum_mismatch(facts, tally);
  }
};
struct Others {
  template <class Facts, class Tally>
  static HWY_INLINE void add(const Facts& facts, Tally& tally) {
    sum_others(facts, tally);
  }
};
template <class Rules>
struct More {
  template <class Facts, class Tally>
  static HWY_INLINE void add(const Facts& facts, Tally& tally) {
    Rules::sum_more(facts, tally);
  }
};
template <class... Parts>
struct Together {
  template <class Facts, class Tally>
  static HWY_INLINE void add(const Facts& facts, Tally& tally) {
    (Parts::add(facts, tally), ...);
  }
};

template <class Part, class Act>
HWY_INLINE void for_slots(const Act& act) {
  SlotVisitor<Act> visitor{act};
  Part::add(NoFacts(), visitor);
}
template <class Rules, class Act>
HWY_INLINE void for_all_slots(const Act& act) {
  for_slots<Together<Coefficients, Mismatches, Others, More<Rules>>>(act);
}

// Adds one part of the table over the vectors of a chunk; `then(facts)` follows each. The part's
// sums are local and only used at constant places, so that the loop keeps them in registers.
template <class Part, int kSlots, class Then>
HWY_INLINE void sum_vectors(const RunFacts& facts_of_run, const Chunk& chunk, size_t vectors,
                            VectorTally<kSlots>& totals, const Then& then) {
  const RunFacts run = facts_of_run;
  VectorTally<kSlots> tally;
  for_slots<Part>([&](Slot slot) HWY_ATTR { tally.of(slot) = totals.of(slot); });
  for (size_t v = 0; v < vectors; ++v) {
    const ChunkFacts facts{run, chunk, ChunkPlace(v * hn::Lanes(D()))};
    Part::add(facts, tally);
    then(facts);
  }
  for_slots<Part>([&](Slot slot) HWY_ATTR { totals.of(slot) = tally.of(slot); });
}

// Adds a chunk that run_vectors() has filled to the totals.
template <class Rules, int kSlots>
LEEWAY_ONE_COPY void add_chunk(const RunFacts& run, Chunk& chunk, size_t vectors,
                               VectorTally<kSlots>& totals) {
  const auto nothing_more = [](const ChunkFacts&) {};
  uint16_t* const bins = chunk.bins;
  const auto store_bins = [bins](const ChunkFacts& facts) HWY_ATTR {
    const hn::Rebind<int32_t, D> di32;
    const hn::Rebind<uint16_t, D> du16;
    // Masked lanes are counted at ratio 1; run_tokens() takes them out again.
    const V ratio = binned_ratio(facts.mismatch_ratio());
    const auto bin =
        hn::Sub(hn::ShiftRight<18>(hn::BitCast(di32, ratio)), hn::Set(di32, kFirstRatioBin));
    hn::StoreU(hn::DemoteTo(du16, bin), du16, bins + facts.place.token);
  };
  if (run.coefficient_is_mismatch) {
    sum_vectors<Together<Mismatches, Coefficients>>(run, chunk, vectors, totals, store_bins);
  } else {
    sum_vectors<Coefficients>(run, chunk, vectors, totals, nothing_more);
    if (run.has_rollout) sum_vectors<Mismatches>(run, chunk, vectors, totals, store_bins);
  }
  if (run.has_penalty || run.has_weight || run.has_ref || run.has_teacher) {
    sum_vectors<Others>(run, chunk, vectors, totals, nothing_more);
  }
  if (Rules::kSumsMore) sum_vectors<More<Rules>>(run, chunk, vectors, totals, nothing_more);
  const size_t bytes = ChunkPlace(vectors * hn::Lanes(D())).byte;
  for (size_t at = 0; at < bytes; at += 8) count_tokens(WordFacts{run, chunk, at}, totals);
}

// Leaves what the metrics need of a vector in the chunk.
template <class Shape>
HWY_INLINE void keep_facts(const LossPlan& plan, const RunFacts& run,
                           const VectorToken<Shape>& token, const TokenOut<V>& out, Chunk& chunk,
                           ChunkPlace place) {
  const D d;
  const V zero = hn::Zero(d);
  auto bits = [&](Chunk::Bits row, M mask)
                  HWY_ATTR { hn::StoreMaskBits(d, mask, chunk.bits[row] + place.byte); };
  auto values = [&](Chunk::Row row, V value)
                    HWY_ATTR { hn::Store(value, d, chunk.values[row] + place.token); };
  bits(Chunk::trained, out.trained);
  bits(Chunk::positive, greater(token.raw_advantage(), zero));
  bits(Chunk::negative, less(token.raw_advantage(), zero));
  // Few vectors hold a dropped token: these rows start as zeros.
  if (HWY_UNLIKELY(!hn::AllFalse(d, out.gone))) {
    bits(Chunk::gone, out.gone);
    bits(Chunk::below, out.below);
    bits(Chunk::above, out.above);
  }
  if (!run.kept_is_ratio) bits(Chunk::kept, out.kept);
  if (!run.coefficient_is_mismatch) values(Chunk::coefficient, out.coefficient);
  if (run.has_rollout && plan.is_mismatch_ratio) {
    // Said apart: joined with the other case, both numbers take a way through memory.
    values(Chunk::log_ratio, out.log_ratio);
    values(Chunk::ratio, out.ratio);
  } else if (run.has_rollout) {
    const Mismatch<V> mismatch = mismatch_of(plan, token, out);
    values(Chunk::log_ratio, mismatch.log);
    values(Chunk::ratio, mismatch.ratio);
  }
  if (run.has_clip) {
    bits(Chunk::clip_low, both(out.trained, less(out.ratio, constant<V>(plan.clip_low))));
    bits(Chunk::clip_high, both(out.trained, greater(out.ratio, constant<V>(plan.clip_high))));
    bits(Chunk::clip_binding, both(out.trained, out.clip_binding));
    bits(Chunk::dual_clipped, both(out.trained, out.dual_clipped));
  }
  if (!Shape::kPlain && run.has_penalty) values(Chunk::penalty, out.penalty);
  if (!Shape::kPlain && run.has_weight) {
    values(Chunk::weight, out.weight);
    bits(Chunk::zero_weight, out.zero_weight);
  }
  if (run.has_ref) {
    values(Chunk::ref_log, token.stream(static_cast<int>(Stream::ref)) - token.pi());
  }
  if (run.has_teacher) {
    values(Chunk::teacher_log, token.stream(static_cast<int>(Stream::teacher)) - token.pi());
  }
}

struct RunSums {
  V loss;
  M finite;
};

// Evaluates whole vectors of tokens from `begin` on; in a chunk they lie from `at` on.
template <class Shape, bool kMetrics>
LEEWAY_ONE_COPY void run_vectors(const LossPlan& planned, const TokenInputs& inputs,
                                 const SequenceNumbers& numbers, const RunFacts& facts,
                                 size_t begin, size_t vectors, RunSums& sums, Chunk& chunk,
                                 size_t at) {
  // Local copies: no store through a pointer can change them.
  const LossPlan plan = planned;
  const TokenInputs in = inputs;
  const SequenceNumbers sequence = numbers;
  RunFacts run = facts;
  // Said again, where the compiler sees it.
  run.kept_is_ratio = Shape::kPlain && Shape::kind(plan) == SurrogateKind::ratio;
  run.coefficient_is_mismatch = run.kept_is_ratio && plan.is_mismatch_ratio;
  const size_t lanes = hn::Lanes(D());
  V loss = sums.loss;
  M finite = sums.finite;
  for (size_t v = 0; v < vectors; ++v) {
    const size_t i = begin + v * lanes;
    const VectorToken<Shape> token(in, sequence, i);
    const TokenOut<V> out = evaluate_token<Shape>(plan, token);
    loss = hn::Add(loss, out.loss);
    const V sanity = where(out.trained, out.sanity);
    finite = hn::And(finite, hn::Le(hn::Abs(sanity), constant<V>(kLargestFloat)));
    hn::StoreU(out.grad, D(), in.grad + i);
    if (!Shape::kPlain && in.through != nullptr) hn::StoreU(out.through, D(), in.through + i);
    if constexpr (kMetrics) {
      keep_facts<Shape>(plan, run, token, out, chunk, ChunkPlace(at + v * lanes));
    }
  }
  sums.loss = loss;
  sums.finite = finite;
}

// The last tokens of a run, fewer than a vector holds: reading past the end of a stream is not
// ours, so they go through buffers whose other lanes are masked.
struct Tail {
  static constexpr size_t kLanes = HWY_MAX_BYTES / sizeof(float);
  HWY_ALIGN float floats[kStreamCount + 3][kLanes];
  HWY_ALIGN uint8_t bytes[3][kLanes];
  HWY_ALIGN float grad[kLanes], through[kLanes];
  TokenInputs in;

  Tail(const TokenInputs& from, size_t begin, size_t count) : in(from) {
    auto floats_of = [&](const float*& pointer, float* to) {
      if (pointer == nullptr) return;
      std::memset(to, 0, kLanes * sizeof(float));
      std::memcpy(to, pointer + begin, count * sizeof(float));
      pointer = to;
    };
    auto bytes_of = [&](const uint8_t*& pointer, uint8_t* to) {
      if (pointer == nullptr) return;
      std::memset(to, 0, kLanes);
      std::memcpy(to, pointer + begin, count);
      pointer = to;
    };
    for (int k = 0; k < kStreamCount; ++k) floats_of(in.streams[k], floats[k]);
    floats_of(in.advantages, floats[kStreamCount]);
    floats_of(in.batch_weights, floats[kStreamCount + 1]);
    floats_of(in.weights, floats[kStreamCount + 2]);
    std::memset(bytes[0], 0, kLanes);
    std::memset(bytes[0], 1, count);
    bytes_of(in.mask, bytes[0]);
    in.mask = bytes[0];
    bytes_of(in.flags, bytes[1]);
    bytes_of(in.loss_mask, bytes[2]);
    in.grad = grad;
    if (in.through != nullptr) in.through = through;
  }

  void write(const TokenInputs& to, size_t begin, size_t count) const {
    std::memcpy(to.grad + begin, grad, count * sizeof(float));
    if (to.through != nullptr) std::memcpy(to.through + begin, through, count * sizeof(float));
  }
};

// A byte for each of the first `count` tokens of a chunk: whether its policy term is kept.
HWY_INLINE void write_kept(const RunFacts& run, const Chunk& chunk, size_t count, uint8_t* kept) {
  const size_t lanes = hn::Lanes(D());
  for (size_t i = 0; i < count; ++i) {
    const size_t lane = i % lanes, byte = ChunkPlace(i - lane).byte + lane / 8;
    const auto bits = [&](Chunk::Bits row) { return chunk.bits[row][byte]; };
    const int all =
        run.kept_is_ratio ? bits(Chunk::trained) & ~bits(Chunk::gone) : bits(Chunk::kept);
    kept[i] = static_cast<uint8_t>(all >> (lane % 8) & 1);
  }
}

// Four histograms in turn; the bins come from memory, so that the loop is loads and stores only.
HWY_INLINE void count_bins(const uint16_t* bins, size_t n, KernelHistogram& histogram) {
  size_t k = 0;
  for (; k + 4 <= n; k += 4) {
    ++histogram.bins[0][bins[k]];
    ++histogram.bins[1][bins[k + 1]];
    ++histogram.bins[2][bins[k + 2]];
    ++histogram.bins[3][bins[k + 3]];
  }
  for (; k < n; ++k) ++histogram.bins[0][bins[k]];
}

// Adds the totals of a run, of which `idle` lanes took no part, to the slots.
template <class Rules, int kSlots>
LEEWAY_ONE_COPY void add_totals(const RunFacts& run, const VectorTally<kSlots>& totals, size_t idle,
                                double* slots) {
  const D d;
  const double tokens = static_cast<double>(totals.counts[static_cast<int>(Slot::tokens)]);
  for (int k = 0; k < kSlotCount; ++k) slots[k] += static_cast<double>(totals.counts[k]);
  for_all_slots<Rules>([&](Slot slot) HWY_ATTR {
    if (is_extreme(slot)) return;
    const double sum = static_cast<double>(hn::GetLane(hn::SumOfLanes(d, totals.of(slot))));
    const double idled = run.has_rollout ? static_cast<double>(idle) * idle_value(slot) : 0.0;
    slots[static_cast<int>(slot)] += sum - idled;
  });
  if (!run.has_weight) slots[static_cast<int>(Slot::weight)] += tokens;
  if (tokens == 0.0) return;
  auto join = [&](Slot slot, double value) {
    double& held = slots[static_cast<int>(slot)];
    held = joined(slot, held, value);
  };
  auto largest = [&](Slot slot)
                     HWY_ATTR { return hn::GetLane(hn::MaxOfLanes(d, totals.of(slot))); };
  join(Slot::weight_max, run.has_weight ? largest(Slot::weight_max) : 1.0);
  if (!run.has_rollout) return;
  const double x_min = hn::GetLane(hn::MinOfLanes(d, totals.of(Slot::ratio_min)));
  const double x_max = largest(Slot::ratio_max);
  for (Slot slot : {Slot::ratio_min, Slot::ratio_max, Slot::kl_max}) {
    join(slot, finished_slot(slot, x_min, x_max));
  }
}

using RunVectors = void (*)(const LossPlan&, const TokenInputs&, const SequenceNumbers&,
                            const RunFacts&, size_t, size_t, RunSums&, Chunk&, size_t);

// A whole run: chunk by chunk, the formulas first and then the sums of what they left. Without a
// histogram there are no metrics. `of_ratio`: see RunFacts::kept_is_ratio.
template <class Rules, int kSlots>
LEEWAY_ONE_COPY void run_chunks(RunVectors run_vectors_of, bool of_ratio, const LossPlan& plan,
                                const TokenInputs& in, const SequenceNumbers& sequence, size_t n,
                                TokenTotals<kSlots>& sums, KernelHistogram* histogram) {
  const size_t lanes = hn::Lanes(D());
  const bool metrics = histogram != nullptr;
  const auto has = [&](Stream s) { return in.streams[static_cast<int>(s)] != nullptr; };
  const RunFacts run{has(Stream::rollout),
                     has(Stream::ref),
                     has(Stream::teacher),
                     in.weights != nullptr,
                     plan.penalty_count > 0,
                     plan.has_clip,
                     of_ratio,
                     of_ratio && plan.is_mismatch_ratio};
  RunSums run_sums{hn::Zero(D()), hn::Eq(hn::Zero(D()), hn::Zero(D()))};
  VectorTally<kSlots> totals;
  if (metrics) {
    std::memset(totals.counts, 0, sizeof totals.counts);
    for_all_slots<Rules>([&](Slot slot) HWY_ATTR {
      totals.of(slot) = constant<V>(static_cast<float>(empty_value(slot)));
    });
  }
  Chunk chunk;
  for (size_t begin = 0; begin < n; begin += kChunk) {
    const size_t count = std::min(n - begin, kChunk), whole = count / lanes, rest = count % lanes;
    const size_t vectors = whole + (rest > 0);
    if (metrics) {
      // Counts take whole words of eight bytes: bits beyond the last vector are zero.
      const size_t words = (ChunkPlace(vectors * lanes).byte + 7) / 8;
      for (auto& row : chunk.bits) std::memset(row + 8 * (words - 1), 0, 8);
      for (auto row : {Chunk::gone, Chunk::below, Chunk::above}) {
        std::memset(chunk.bits[row], 0, 8 * words);
      }
    }
    run_vectors_of(plan, in, sequence, run, begin, whole, run_sums, chunk, 0);
    if (rest > 0) {
      const size_t from = begin + whole * lanes;
      Tail tail(in, from, rest);
      run_vectors_of(plan, tail.in, sequence, run, 0, 1, run_sums, chunk, whole * lanes);
      tail.write(in, from, rest);
    }
    if (metrics) {
      add_chunk<Rules>(run, chunk, vectors, totals);
      if (run.has_rollout) count_bins(chunk.bins, count, *histogram);
      if (in.kept != nullptr) write_kept(run, chunk, count, in.kept + begin);
    }
  }
  const double loss = hn::GetLane(hn::SumOfLanes(D(), run_sums.loss));
  sums.loss += static_cast<double>(sequence.scale) * loss;
  sums.not_finite = sums.not_finite || !hn::AllTrue(D(), run_sums.finite);
  if (!metrics) return;
  const size_t tokens = totals.counts[static_cast<int>(Slot::tokens)];
  if (run.has_rollout) {
    histogram->bins[0][(127 << 5) - kFirstRatioBin] -= static_cast<uint32_t>(n - tokens);
  }
  add_totals<Rules>(run, totals, (n + lanes - 1) / lanes * lanes - tokens, sums.slots);
}

template <class Shape, int kSlots>
HWY_INLINE void run_tokens(const LossPlan& plan, const TokenInputs& in,
                           const SequenceNumbers& sequence, size_t n, TokenTotals<kSlots>& sums,
                           KernelHistogram* histogram) {
  const bool of_ratio = Shape::kPlain && Shape::kind(plan) == SurrogateKind::ratio;
  run_chunks<typename Shape::Rules>(
      histogram != nullptr ? run_vectors<Shape, true> : run_vectors<Shape, false>, of_ratio, plan,
      in, sequence, n, sums, histogram);
}

}  // namespace HWY_NAMESPACE
}  // namespace leeway
HWY_AFTER_NAMESPACE();

#endif  // LEEWAY_CORE_CPU_TOKEN_LOOP_INL_H_
