#include "run/compare_text.h"

#include <fmt/format.h>

#include <cmath>
#include <optional>
#include <vector>

#include "base/json.h"
#include "base/text_table.h"
#include "core/compare_json.h"

namespace leeway {
namespace {

std::string percent(double share) {
  return std::isnan(share) ? "-" : fmt::format("{:.2f}%", 100.0 * share);
}

std::string number(double value, int digits) {
  return std::isnan(value) ? "-" : fmt::format("{:.{}f}", value, digits);
}

}  // namespace

std::string compare_json(const std::string& batch_name, const BatchFile& file,
                         const Comparison& c) {
  JsonWriter json;
  auto count = [&](const char* key, const std::optional<size_t>& value) {
    json.key(key);
    value ? json.value(static_cast<double>(*value)) : json.null();
  };
  json.begin_object().key("batch").value(batch_name);
  count("rollouts", file.rollouts);
  count("batch_rollouts", file.batch_rollouts);
  write_comparison(json, c);
  json.end_object();
  return json.text() + "\n";
}

std::string compare_text(const std::string& batch_name, const BatchFile& file,
                         const Comparison& c) {
  std::string out = fmt::format(
      "{}{}{}: {:.0f} trained tokens in {:.0f} sequences, {} with advantage > 0, {} < 0\n",
      batch_name, file.rollouts ? ", " : "", file.part_of_batch(), c.tokens, c.sequences,
      percent(c.positive_share), percent(c.negative_share));
  std::string mismatch;
  for (const auto& [name, value] : c.mismatch) {
    if (name == "mismatch_kl" || name == "ratio_p99" || name == "ratio_max" ||
        name == "effective_sample_size" || name.starts_with("plugin/")) {
      mismatch += fmt::format("{}{} {}", mismatch.empty() ? "" : ", ", name,
                              std::isnan(value) ? "-" : fmt::format("{:.4g}", value));
    }
  }
  out += mismatch + "\n\n";

  std::vector<std::vector<std::string>> rows, bands, targets;
  std::string unavailable;
  for (const ComparedPreset& p : c.presets) {
    if (!p.unavailable.empty()) {
      unavailable += fmt::format("not shown: {}: {}\n", p.label, p.unavailable);
      continue;
    }
    rows.push_back({p.label, percent(p.kept_share), percent(p.kept_positive),
                    percent(p.kept_negative), percent(p.bounded_share),
                    number(p.effective_sample_size, 3), fmt::format("{:.4g}", p.loss),
                    fmt::format("{:.3g}", p.grad_norm), number(p.grad_cosine, 4)});
    std::vector<std::string> band{p.label};
    for (double share : p.kept_by_band) band.push_back(percent(share));
    bands.push_back(std::move(band));
    if (p.target) {
      std::string settings;
      for (const auto& [key, value] : p.target->settings) {
        settings += fmt::format("{}{} = {:.6g}", settings.empty() ? "" : ", ", key, value);
      }
      targets.push_back({p.label, percent(p.target->masked), settings});
    }
  }
  out += format_table(
      {"preset", "kept", "A > 0", "A < 0", "bounded", "ESS", "loss", "|grad|", "cosine"}, rows);
  out += fmt::format(
      "kept: tokens whose policy term carries gradient; bounded: weight clamped, gradient kept;\n"
      "ESS: effective sample size of what multiplies the advantage; cosine: to the gradient of "
      "{}\n\n",
      c.uncorrected);
  std::vector<std::string> header{fmt::format("kept, by {} probability", c.band_stream)};
  header.insert(header.end(), c.bands.begin(), c.bands.end());
  out += format_table(header, bands);
  if (c.target_masked) {
    out += fmt::format("\nThresholds that mask at most {}\n", percent(*c.target_masked));
    out += targets.empty() ? "  none of these presets has one\n"
                           : format_table({"preset", "masked", "settings"}, targets);
  }
  if (!unavailable.empty()) out += "\n" + unavailable;
  return out;
}

}  // namespace leeway
