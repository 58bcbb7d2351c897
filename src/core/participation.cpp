#include "core/participation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <unordered_map>

#include "leeway/error.h"

namespace leeway {
namespace {

// Trained tokens of each unit (a rollout, or a sequence where no rollouts are named), and the unit
// of each sequence.
struct Units {
  std::vector<size_t> of_sequence;
  std::vector<double> tokens;
};

template <class T>
Units count_units(const BatchView<T>& batch, std::span<const uint8_t> counted) {
  Units units;
  std::unordered_map<int32_t, size_t> seen;
  for (int64_t s = 0; s < batch.sequence_count(); ++s) {
    size_t unit = units.tokens.size();
    if (!batch.rollout_ids.empty()) unit = seen.emplace(batch.rollout_ids[s], unit).first->second;
    if (unit == units.tokens.size()) units.tokens.push_back(0.0);
    units.of_sequence.push_back(unit);
    for (int64_t i = batch.offsets[s]; i < batch.offsets[s + 1]; ++i) {
      units.tokens[unit] += counted[static_cast<size_t>(i)] != 0;
    }
  }
  return units;
}

template <class T>
double fixed_length_of(const LossSpec& spec, const BatchView<T>& batch) {
  return spec.reduction.fixed_length > 0 ? spec.reduction.fixed_length : longest_sequence(batch);
}

}  // namespace

bool uses_ratio_of(const LossSpec& spec) {
  if (spec.surrogate.kind != SurrogateKind::log_prob) return true;
  for (const Penalty& penalty : spec.penalties) {
    if (penalty.times_ratio) return true;
  }
  return false;
}

bool has_clip(const LossSpec& spec) {
  return (spec.surrogate.kind == SurrogateKind::clipped ||
          spec.surrogate.kind == SurrogateKind::detached_ratio) &&
         spec.surrogate.clip != Bounds{};
}

template <class T>
std::vector<uint8_t> participating(const LossSpec& spec, const BatchView<T>& batch) {
  std::vector<uint8_t> mask(static_cast<size_t>(batch.token_count()), 1);
  for (size_t i = 0; i < mask.size(); ++i) {
    mask[i] = spec.positions == Positions::all ? has_weight(batch, i) : in_mask(batch, i);
  }
  return mask;
}

template <class T>
void check_streams(const LossSpec& spec, const BatchView<T>& batch) {
  const size_t n = static_cast<size_t>(batch.token_count());
  LEEWAY_CHECK(batch.pi.size() == n && batch.advantages.size() == n,
               "pi and advantages hold one value per position");
  if (batch.sequence_count() == 0) throw Error("the batch is empty: it has no sequences");
  for (int k = 0; k < kStreamCount; ++k) {
    const Stream stream = static_cast<Stream>(k);
    const auto values = batch.stream(stream);
    LEEWAY_CHECK(values.empty() || values.size() == n, "streams hold one value per position");
    if (values.empty() && spec.reads(stream) && n > 0) {
      const bool has_anchor =
          std::any_of(spec.settings.begin(), spec.settings.end(),
                      [](const auto& setting) { return setting.first == "anchor"; });
      const bool only_ratio = spec.ratio.pair.denominator == stream && spec.corrections.empty();
      throw Error(fmt::format("preset {} reads the stream \"{}\", which the batch does not have{}",
                              spec.preset, name_of(stream),
                              stream == Stream::prox && has_anchor && only_ratio
                                  ? "; anchor = \"rollout\" does without it"
                                  : ""));
    }
  }
}

template <class T>
void check_finite(const LossSpec& spec, const BatchView<T>& batch) {
  auto check = [&](std::span<const T> values, const char* name, bool everywhere) {
    for (int64_t s = 0; s < batch.sequence_count(); ++s) {
      for (int64_t i = batch.offsets[s]; i < batch.offsets[s + 1]; ++i) {
        const size_t k = static_cast<size_t>(i);
        if (std::isfinite(values[k])) continue;
        if (!(everywhere ? has_weight(batch, k) : in_mask(batch, k))) continue;
        throw Error(fmt::format(
            "sequence {}, position {}: {} is {} on a token that takes part in the loss; {}{}", s,
            // The sign of NaN is meaningless.
            i - batch.offsets[s], name, std::isnan(values[k]) ? std::abs(values[k]) : values[k],
            in_mask(batch, k) ? "mask the token or repair the value"
                              : "this preset looks at masked positions too, as its source does",
            // Of a batch in a file it is a value, in training the policy's own.
            name == std::string_view("pi")
                ? "; if a policy in training computed it, lower the learning rate"
                : ""));
      }
    }
  };
  const bool everywhere = spec.positions == Positions::all;
  for (int k = 0; k < kStreamCount; ++k) {
    const Stream stream = static_cast<Stream>(k);
    const bool in_ratio =
        spec.ratio.pair.numerator == stream || spec.ratio.pair.denominator == stream;
    const bool statistic = uses_ratio_of(spec) && in_ratio && spec.ratio.level != Level::token &&
                           spec.ratio.over == Positions::all;
    if (spec.reads(stream)) {
      check(batch.stream(stream), name_of(stream), everywhere || statistic);
    }
  }
  check(batch.advantages, "advantages", everywhere && !spec.shaping.times_mask);
  if (!batch.weights.empty()) check(batch.weights, "weights", everywhere);
}

void throw_overflow(int64_t sequence, int64_t position, double ratio) {
  throw Error(fmt::format(
      "sequence {}, position {}: the loss of this token is not finite (its ratio is {:.6g}); "
      "a preset with a bound on the ratio, or a log_clamp, would hold it",
      sequence, position, ratio));
}

template <class T>
double longest_sequence(const BatchView<T>& batch) {
  size_t longest = 0;
  for (int64_t s = 0; s < batch.sequence_count(); ++s) {
    longest =
        std::max(longest, static_cast<size_t>(batch.offsets[s + 1]) - first_position(batch, s));
  }
  return static_cast<double>(longest);
}

template <class T>
double count_denominator(const LossSpec& spec, const BatchView<T>& batch,
                         std::span<const uint8_t> counted) {
  if (spec.reduction.kind == ReductionKind::sum) return 1.0;
  if (spec.reduction.kind == ReductionKind::padded_length_mean) {
    return static_cast<double>(batch.sequence_count()) * longest_sequence(batch);
  }
  if (spec.reduction.kind == ReductionKind::token_mean) {
    int64_t tokens = 0;
    for (uint8_t c : counted) tokens += c != 0;
    return static_cast<double>(tokens);
  }
  const Units units = count_units(batch, counted);
  double sequences = 0.0;
  for (double tokens : units.tokens) sequences += spec.reduction.count_empty || tokens > 0;
  if (spec.reduction.kind == ReductionKind::fixed_length) {
    return sequences * fixed_length_of(spec, batch);
  }
  return sequences;
}

template <class T>
std::vector<double> sequence_scales(const LossSpec& spec, const BatchView<T>& batch,
                                    std::span<const uint8_t> counted, double denominator) {
  std::vector<double> scales(static_cast<size_t>(batch.sequence_count()), 1.0 / denominator);
  if (spec.reduction.kind == ReductionKind::seq_mean_token_mean) {
    const Units units = count_units(batch, counted);
    for (size_t s = 0; s < scales.size(); ++s) {
      scales[s] /= std::max(1.0, units.tokens[units.of_sequence[s]]);
    }
  } else if (spec.reduction.kind == ReductionKind::padded_length_mean) {
    for (size_t s = 0; s < scales.size(); ++s) {
      double trained = 0.0;
      for (int64_t i = batch.offsets[s]; i < batch.offsets[s + 1]; ++i) {
        trained += in_mask(batch, static_cast<size_t>(i));
      }
      scales[s] *= trained;
    }
  }
  return scales;
}

#define LEEWAY_INSTANTIATE(T)                                                           \
  template std::vector<uint8_t> participating<T>(const LossSpec&, const BatchView<T>&); \
  template void check_streams<T>(const LossSpec&, const BatchView<T>&);                 \
  template void check_finite<T>(const LossSpec&, const BatchView<T>&);                  \
  template double longest_sequence<T>(const BatchView<T>&);                             \
  template double count_denominator<T>(const LossSpec&, const BatchView<T>&,            \
                                       std::span<const uint8_t>);                       \
  template std::vector<double> sequence_scales<T>(const LossSpec&, const BatchView<T>&, \
                                                  std::span<const uint8_t>, double);
LEEWAY_INSTANTIATE(double)
LEEWAY_INSTANTIATE(float)
#undef LEEWAY_INSTANTIATE

}  // namespace leeway
