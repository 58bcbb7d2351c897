#include "core/weight_metrics.h"

#include <algorithm>
#include <cmath>

#include "core/participation.h"
#include "leeway/error.h"

namespace leeway {
namespace {

std::vector<double> factors_of(const Correction& correction, const BatchView<double>& batch,
                               std::span<const uint8_t> trained) {
  std::vector<double> factors(trained.size(), 1.0);
  std::vector<uint8_t> mask(trained.begin(), trained.end());
  for (int64_t s = 0; s < batch.sequence_count(); ++s) {
    const size_t first = first_position(batch, s);
    const SequenceView<double> sequence = sequence_of(batch, s, trained);
    correction.apply_double(sequence, {std::span(factors).subspan(first, sequence.mask.size()),
                                       std::span(mask).subspan(first, sequence.mask.size())});
  }
  return factors;
}

}  // namespace

Metrics weight_metrics(const LossSpec& spec, const BatchView<double>& batch,
                       const LossResult& result) {
  const bool any =
      std::any_of(spec.corrections.begin(), spec.corrections.end(),
                  [](const Correction& correction) { return correction.weight.has_value(); });
  if (!any) return {};
  LEEWAY_CHECK(result.trace.size() == static_cast<size_t>(batch.token_count()), "a traced result");
  std::vector<uint8_t> trained, clipped(result.trace.size(), 0);
  double tokens = 0.0, clipped_tokens = 0.0, deviation = 0.0;
  for (const TokenTrace& token : result.trace) trained.push_back(token.trained ? 1 : 0);
  for (const Correction& correction : spec.corrections) {
    if (!correction.weight) continue;
    Weight unbounded = *correction.weight;
    unbounded.clamp = unbounded.keep = Bounds{};
    const std::vector<double> bounded = factors_of(correction, batch, trained);
    const std::vector<double> free =
        factors_of(weight_correction(correction.name, unbounded), batch, trained);
    for (size_t i = 0; i < clipped.size(); ++i) {
      if (trained[i] != 0 && bounded[i] != free[i]) clipped[i] = 1;
    }
  }
  for (size_t i = 0; i < clipped.size(); ++i) {
    if (trained[i] == 0) continue;
    tokens += 1.0;
    clipped_tokens += clipped[i];
    deviation += std::abs(result.trace[i].weight - 1.0);
  }
  const auto mean = [&](double sum) { return tokens > 0.0 ? sum / tokens : std::nan(""); };
  return {{"weight_clipped_share", mean(clipped_tokens)},
          {"weight_abs_deviation", mean(deviation)}};
}

}  // namespace leeway
