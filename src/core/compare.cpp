#include "core/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "core/gates.h"
#include "core/own_metrics.h"
#include "core/participation.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr double kBandEdges[] = {0.01, 0.1, 0.5, 0.9};
constexpr size_t kBands = 5;

size_t band_of(double log_probability) {
  const double p = std::exp(log_probability);
  size_t band = 0;
  while (band < kBands - 1 && p >= kBandEdges[band]) ++band;
  return band;
}

double share(double part, double whole) { return whole > 0 ? part / whole : std::nan(""); }

// The probability bands use the rollout policy's probability of the token, or pi's if that is
// unknown.
std::span<const double> band_stream(const Batch& batch) {
  return batch.rollout.empty() ? batch.pi : batch.rollout;
}

bool was_bounded(const LossSpec& spec, const BatchView<double>& batch, const TokenTrace& trace,
                 size_t i) {
  if (spec.surrogate.kind == SurrogateKind::detached_ratio &&
      (below(trace.ratio, spec.surrogate.clip.low) ||
       above(trace.ratio, spec.surrogate.clip.high))) {
    return true;
  }
  for (const Correction& c : spec.corrections) {
    if (!c.weight || c.weight->level != Level::token) continue;
    const double raw = std::exp(batch.stream(c.weight->pair.numerator)[i] -
                                batch.stream(c.weight->pair.denominator)[i]);
    if (below(raw, c.weight->clamp.low) || above(raw, c.weight->clamp.high)) return true;
  }
  return false;
}

// Rounded to six digits, away from what is kept, so that a printed bound keeps what it should.
double rounded_away(double x, double direction) {
  double out = x;
  for (int k = 1; direction * (out - x) <= 0.0 && k < 64; ++k) {
    out = std::strtod(fmt::format("{:.6g}", x * (1.0 + direction * 1e-6 * k)).c_str(), nullptr);
  }
  return out;
}
double round_up(double x) { return rounded_away(x, 1.0); }
double round_down(double x) { return rounded_away(x, -1.0); }

// How to tune a preset's threshold: each token's critical value, at which it would just be kept,
// and the settings that put the threshold at a value.
struct Tuning {
  std::vector<double> critical;
  std::function<std::vector<std::pair<std::string, double>>(double)> settings;
};

std::optional<Tuning> tuning_of(const LossSpec& spec, const BatchView<double>& batch,
                                const std::vector<uint8_t>& trained,
                                const std::vector<TokenTrace>& trace) {
  // A correction that drops tokens itself would add to the share that the base is tuned for.
  for (const Correction& c : spec.corrections) {
    if (!c.weight || c.weight->keep != Bounds{}) return std::nullopt;
  }
  const std::string base = spec.preset.substr(0, spec.preset.find('+'));
  auto two = [](std::string low, std::string high) {
    return [=](double x) -> std::vector<std::pair<std::string, double>> {
      return {{low, round_down(1.0 / x)}, {high, round_up(x)}};
    };
  };
  auto same = [](std::vector<std::string> keys) {
    return [=](double x) {
      std::vector<std::pair<std::string, double>> out;
      for (const std::string& key : keys) out.emplace_back(key, round_up(x));
      return out;
    };
  };
  Tuning tuning;
  auto for_trained = [&](auto value) {
    for (size_t i = 0; i < trained.size(); ++i) {
      if (trained[i]) tuning.critical.push_back(value(i));
    }
  };
  auto sign = [&](size_t i) { return batch.advantages[i] > 0 ? 1.0 : -1.0; };

  if (base == "ppo" || base == "grpo" || base == "dapo" || base == "gspo" || base == "cispo_mask") {
    for_trained([&](size_t i) {
      return batch.advantages[i] == 0 ? -kInfinity : sign(i) * (trace[i].ratio - 1.0);
    });
    tuning.settings = same({"eps_low", "eps_high"});
    return tuning;
  }
  if (spec.gates.empty()) return std::nullopt;
  const Gate& gate = spec.gates.front();
  std::vector<double> values(trained.size(), 0.0);
  for (int64_t s = 0; s < batch.sequence_count(); ++s) {
    const auto seq = sequence_of(batch, s, trained);
    const auto num = seq.stream(gate.pair.numerator), den = seq.stream(gate.pair.denominator);
    const auto whole = gate.level == Level::token ? std::nullopt : sequence_gate_value(gate, seq);
    for (size_t t = 0; t < seq.mask.size(); ++t) {
      if (!seq.mask[t]) continue;
      values[first_position(batch, s) + t] =
          whole ? *whole : quantity_value(gate.quantity, num[t], den[t], num[t] - den[t]);
    }
  }
  auto farthest = [&](size_t i) { return std::max(values[i], 1.0 / values[i]); };
  if (base == "icepop") {
    for_trained(farthest);
    tuning.settings = two("icepop_ratio_low", "icepop_ratio_high");
  } else if (base == "ipo_kl") {
    for_trained(farthest);
    tuning.settings = two("ipo_ratio_low", "ipo_ratio_high");
  } else if (base == "geo_mask") {
    for_trained(farthest);
    tuning.settings = two("geo_ratio_low", "geo_ratio_high");
  } else if (base == "seq_mis") {
    for_trained([&](size_t i) { return values[i]; });
    tuning.settings = same({"seq_ratio_high"});
  } else if (base == "kpop") {
    for_trained([&](size_t i) { return values[i]; });
    tuning.settings = same({"kpop_threshold"});
  } else if (base == "dppo_tv") {
    for_trained([&](size_t i) { return std::abs(values[i]); });
    tuning.settings = same({"dppo_diff_low", "dppo_diff_high"});
  } else if (base == "dppo_kl") {
    for_trained([&](size_t i) { return sign(i) * values[i]; });
    tuning.settings = same({"dppo_diff_low", "dppo_diff_high"});
  } else {
    return std::nullopt;
  }
  return tuning;
}

double masked_share(const std::vector<TokenTrace>& trace) {
  double tokens = 0.0, kept = 0.0;
  for (const TokenTrace& t : trace) tokens += t.trained, kept += t.trained && t.kept;
  return share(tokens - kept, tokens);
}

std::optional<TargetThreshold> find_threshold(const Catalog& catalog, const PresetRequest& request,
                                              const LossSpec& spec, const BatchView<double>& batch,
                                              const std::vector<TokenTrace>& trace, double target) {
  const std::vector<uint8_t> trained = participating(spec, batch);
  auto tuning = tuning_of(spec, batch, trained, trace);
  if (!tuning || tuning->critical.empty()) return std::nullopt;
  // At most `allowed` tokens may lie beyond the threshold; one equal to it is kept.
  auto& critical = tuning->critical;
  const size_t allowed = std::min(
      critical.size() - 1, static_cast<size_t>(target * static_cast<double>(critical.size())));
  std::nth_element(critical.begin(), critical.begin() + static_cast<std::ptrdiff_t>(allowed),
                   critical.end(), std::greater<>());
  const double threshold = critical[allowed];
  if (!std::isfinite(threshold) || threshold <= 0.0) return std::nullopt;

  TargetThreshold found;
  found.settings = tuning->settings(threshold);
  Settings settings = request.settings;
  for (const auto& [key, value] : found.settings)
    settings.push_back({key, value, "--target-masked "});
  try {
    const LossSpec moved = catalog.make_spec(request.preset, settings);
    found.masked = masked_share(evaluate_reference(moved, batch, {}, nullptr, true).trace);
  } catch (const Error&) {
    return std::nullopt;  // the share would need a bound the preset does not allow
  }
  return found;
}

ComparedPreset compare_one(const Catalog& catalog, const Batch& batch, const PresetRequest& request,
                           const std::vector<double>& uncorrected_grad,
                           std::optional<double> target) {
  ComparedPreset row;
  row.preset = row.label = request.preset;
  for (size_t k = 0; k < request.settings.size(); ++k) {
    const auto* text = std::get_if<std::string>(&request.settings[k].value);
    row.label += (k == 0 ? ":" : ",") + request.settings[k].key + "=" +
                 (text != nullptr ? *text : value_text(request.settings[k].value));
  }
  const LossSpec spec = catalog.make_spec(request.preset, request.settings);
  row.settings = spec.settings;
  const BatchView<double> view = batch.view();
  for (int k = 0; k < kStreamCount; ++k) {
    const Stream stream = static_cast<Stream>(k);
    if (spec.reads(stream) && view.stream(stream).empty()) {
      row.unavailable = fmt::format("needs the stream {}", name_of(stream));
      return row;
    }
  }
  MetricSums sums;
  LossResult result;
  try {
    result = evaluate_reference(spec, view, {}, &sums, true);
  } catch (const Error& error) {
    row.unavailable = error.what();
    return row;
  }
  row.loss = result.loss;
  double squares = 0.0, product = 0.0, other = 0.0;
  for (size_t i = 0; i < result.grad.size(); ++i) {
    squares += result.grad[i] * result.grad[i];
    product += result.grad[i] * uncorrected_grad[i];
    other += uncorrected_grad[i] * uncorrected_grad[i];
  }
  row.grad_norm = std::sqrt(squares);
  row.grad_cosine = squares > 0 && other > 0 ? product / std::sqrt(squares * other) : std::nan("");

  double positive = 0.0, negative = 0.0, tokens = 0.0, bounded = 0.0;
  std::vector<double> band_tokens(kBands, 0.0), band_kept(kBands, 0.0);
  double kept = 0.0, kept_positive = 0.0, kept_negative = 0.0;
  const auto probability = band_stream(batch);
  const std::vector<uint8_t> trained = participating(spec, view);
  for (size_t i = 0; i < result.trace.size(); ++i) {
    if (!trained[i]) continue;
    const TokenTrace& trace = result.trace[i];
    const double A = batch.advantages[i];
    const size_t band = band_of(probability[i]);
    tokens += 1, positive += A > 0, negative += A < 0, band_tokens[band] += 1;
    if (!trace.kept) continue;
    kept += 1, kept_positive += A > 0, kept_negative += A < 0, band_kept[band] += 1;
    bounded += was_bounded(spec, view, trace, i);
  }
  row.kept_share = share(kept, tokens);
  row.kept_positive = share(kept_positive, positive);
  row.kept_negative = share(kept_negative, negative);
  for (size_t b = 0; b < kBands; ++b)
    row.kept_by_band.push_back(share(band_kept[b], band_tokens[b]));
  row.bounded_share = share(bounded, tokens);
  for (const auto& [name, value] : finalize_metrics(spec, sums, true, false, false)) {
    if (name == "update_effective_sample_size") row.effective_sample_size = value;
  }
  if (target) row.target = find_threshold(catalog, request, spec, view, result.trace, *target);
  return row;
}

void fill_batch_facts(const Catalog& catalog, const Batch& batch, Comparison& out,
                      std::vector<double>& uncorrected_grad) {
  const LossSpec uncorrected = catalog.make_spec(out.uncorrected, {});
  const BatchView<double> view = batch.view();
  MetricSums sums;
  uncorrected_grad = evaluate_reference(uncorrected, view, {}, &sums).grad;
  out.tokens = sums[Slot::tokens];
  out.sequences = sums[Slot::sequences];
  out.positive_share = share(sums[Slot::positive_tokens], out.tokens);
  out.negative_share = share(sums[Slot::negative_tokens], out.tokens);
  for (auto& [name, value] :
       finalize_metrics(uncorrected, sums, !batch.rollout.empty(), false, false)) {
    if (name.starts_with("mismatch_kl") || name.starts_with("ratio_") ||
        name == "logprob_abs_diff" || name == "effective_sample_size") {
      out.mismatch.emplace_back(name, value);
    }
  }
  for (auto& metric : own_metrics(uncorrected, view)) out.mismatch.push_back(std::move(metric));
  out.band_stream = batch.rollout.empty() ? "pi" : "rollout";
  out.bands = {"p < 0.01", "0.01 - 0.1", "0.1 - 0.5", "0.5 - 0.9", "p >= 0.9"};
  out.band_tokens.assign(kBands, 0.0);
  const auto probability = band_stream(batch);
  double low = kInfinity, high = -kInfinity;
  for (size_t i = 0; i < batch.pi.size(); ++i) {
    if (!in_mask(view, i)) continue;
    out.band_tokens[band_of(probability[i])] += 1;
    if (batch.rollout.empty() || !std::isfinite(batch.pi[i] - batch.rollout[i])) continue;
    low = std::min(low, batch.pi[i] - batch.rollout[i]);
    high = std::max(high, batch.pi[i] - batch.rollout[i]);
  }
  if (!(high > low)) return;
  constexpr size_t kBins = 60;
  const double width = (high - low) / static_cast<double>(kBins);
  for (size_t b = 0; b <= kBins; ++b) {
    out.ratio_edges.push_back(std::exp(low + width * static_cast<double>(b)));
  }
  out.ratio_counts.assign(kBins, 0.0);
  for (size_t i = 0; i < batch.pi.size(); ++i) {
    const double x = in_mask(view, i) ? batch.pi[i] - batch.rollout[i] : std::nan("");
    if (!std::isfinite(x)) continue;
    out.ratio_counts[std::min(kBins - 1, static_cast<size_t>((x - low) / width))] += 1;
  }
}

}  // namespace

std::vector<PresetRequest> default_requests(const Catalog& catalog, const Batch& batch) {
  std::vector<PresetRequest> requests;
  const bool has_prox = !batch.prox.empty();
  for (const PresetInfo& preset : catalog.presets()) {
    PresetRequest request{preset.name, {}};
    for (const KeyInfo& key : preset.keys) {
      const bool can =
          std::find(key.choices.begin(), key.choices.end(), "rollout") != key.choices.end();
      if (key.name == "anchor" && key.default_value == "prox" && !has_prox && can) {
        request.settings.push_back({"anchor", std::string("rollout"), ""});
      }
    }
    requests.push_back(std::move(request));
  }
  for (const char* composed : {"off_policy_is", "grpo+tis", "ppo+icepop_tis"}) {
    requests.push_back({composed, {}});
  }
  return requests;
}

Comparison compare_presets(const Catalog& catalog, const Batch& batch,
                           const std::vector<PresetRequest>& requests,
                           std::optional<double> target_masked,
                           const std::function<void(size_t, size_t)>& progress) {
  Comparison out;
  out.target_masked = target_masked;
  std::vector<double> uncorrected_grad;
  fill_batch_facts(catalog, batch, out, uncorrected_grad);
  for (const PresetRequest& request : requests) {
    out.presets.push_back(compare_one(catalog, batch, request, uncorrected_grad, target_masked));
    if (progress) progress(out.presets.size(), requests.size());
  }
  return out;
}

}  // namespace leeway
