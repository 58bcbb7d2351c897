// Which tokens take part: masks, denominators and the checks a batch must pass before evaluation.
// Shared by the reference and the SIMD implementation.
#pragma once

#include <vector>

#include "leeway/loss.h"

namespace leeway {

// Ratios enter sums capped at this, so that one huge ratio cannot turn a mean into infinity.
inline constexpr double kRatioSumCap = 1e18;

bool uses_ratio_of(const LossSpec& spec);
bool has_clip(const LossSpec& spec);

// A weight of 0 excludes a position from everything, even from what looks past the mask.
template <class T>
bool has_weight(const BatchView<T>& batch, size_t i) {
  return batch.weights.empty() || batch.weights[i] != T(0);
}

template <class T>
bool in_mask(const BatchView<T>& batch, size_t i) {
  return (batch.mask.empty() || batch.mask[i] != 0) && has_weight(batch, i);
}

// Where sequence s begins: positions before its first weight that is not 0, such as a prompt's, are
// not part of it.
template <class T>
size_t first_position(const BatchView<T>& batch, int64_t s) {
  size_t first = static_cast<size_t>(batch.offsets[s]);
  const size_t end = static_cast<size_t>(batch.offsets[s + 1]);
  while (first < end && !has_weight(batch, first)) ++first;
  return first;
}

// Positions that take part in the loss: the mask without zero weights, or everything that has a
// weight.
template <class T>
std::vector<uint8_t> participating(const LossSpec& spec, const BatchView<T>& batch);

// Throws Error if the batch is empty or lacks a stream the spec reads; aborts if spans disagree in
// length.
template <class T>
void check_streams(const LossSpec& spec, const BatchView<T>& batch);

// Throws Error if a stream the spec reads is not finite on a position that takes part.
template <class T>
void check_finite(const LossSpec& spec, const BatchView<T>& batch);

// Throws Error: the loss of this token is not finite although its inputs are.
[[noreturn]] void throw_overflow(int64_t sequence, int64_t position, double ratio);

// The spans of sequence s, from its first position; `mask` is a whole-batch mask.
template <class T>
SequenceView<T> sequence_of(const BatchView<T>& batch, int64_t s, std::span<const uint8_t> mask) {
  const size_t first = first_position(batch, s);
  const size_t count = static_cast<size_t>(batch.offsets[s + 1]) - first;
  auto part = [&](auto span) { return span.empty() ? span : span.subspan(first, count); };
  return {part(batch.pi),
          part(batch.prox),
          part(batch.rollout),
          part(batch.ref),
          part(batch.teacher),
          part(batch.advantages),
          mask.subspan(first, count),
          part(batch.versions)};
}

template <class T>
double longest_sequence(const BatchView<T>& batch);

// The denominator, from the positions that count.
template <class T>
double count_denominator(const LossSpec& spec, const BatchView<T>& batch,
                         std::span<const uint8_t> counted);

// The factor for each sequence's token losses; `denominator` is the global one, at least 1.
template <class T>
std::vector<double> sequence_scales(const LossSpec& spec, const BatchView<T>& batch,
                                    std::span<const uint8_t> counted, double denominator);

}  // namespace leeway
