// What each preset does to one batch, compared.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "leeway/metrics.h"
#include "leeway/presets.h"

namespace leeway {

struct PresetRequest {
  std::string preset;
  Settings settings;
};

// A threshold that makes a preset mask the requested share, and the share it actually masks.
struct TargetThreshold {
  std::vector<std::pair<std::string, double>> settings;
  double masked = 0.0;
};

struct ComparedPreset {
  std::string preset;
  std::string label;  // the preset with the settings that were given: "ppo:anchor=rollout"
  std::vector<std::pair<std::string, std::string>> settings;
  std::string unavailable;  // why it cannot be evaluated on this batch; the rest is then unset
  double kept_share = 0.0, kept_positive = 0.0, kept_negative = 0.0;  // NaN without such tokens
  std::vector<double> kept_by_band;
  double bounded_share = 0.0;  // weight or ratio clamped, gradient kept
  double effective_sample_size = 0.0;
  double loss = 0.0, grad_norm = 0.0, grad_cosine = 0.0;
  std::optional<TargetThreshold> target;
};

struct Comparison {
  double tokens = 0.0, sequences = 0.0, positive_share = 0.0, negative_share = 0.0;
  Metrics mismatch;
  std::vector<double> ratio_edges, ratio_counts;  // log-spaced histogram of pi/rollout
  std::string band_stream;                        // whose probability of the token the bands are of
  std::vector<std::string> bands;
  std::vector<double> band_tokens;
  std::string uncorrected = "reinforce";
  std::optional<double> target_masked;
  std::vector<ComparedPreset> presets;
};

// The presets shown when none is named: every native base and the corrections the batch allows.
std::vector<PresetRequest> default_requests(const Catalog& catalog, const Batch& batch);

// Evaluates each request with the reference. Presets whose streams are missing become rows that say
// so; bad settings throw Error. `progress(done, total)` is called after each preset.
Comparison compare_presets(const Catalog& catalog, const Batch& batch,
                           const std::vector<PresetRequest>& requests,
                           std::optional<double> target_masked,
                           const std::function<void(size_t, size_t)>& progress);

}  // namespace leeway
