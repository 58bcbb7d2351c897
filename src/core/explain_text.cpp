#include "core/explain_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "core/explain.h"
#include "leeway/metrics.h"

namespace leeway {

std::string explain_text(const LossSpec& spec) {
  const Explanation e = explain(spec);
  std::string out = spec.preset + "\n";
  auto section = [&](const char* title, const std::vector<std::string>& lines) {
    if (lines.empty()) return;
    out += fmt::format("\n{}\n", title);
    for (const std::string& line : lines) out += fmt::format("  {}\n", line);
  };
  section("objective, minimised (stop = no gradient; k3(x) = e^x - 1 - x)", e.objective);
  section("dropped", e.dropped);
  section("gradient", e.gradient);
  section("denominator", e.denominator);
  section("notes", e.notes);
  section("reads", {fmt::format("{}", fmt::join(e.streams, ", "))});
  std::vector<std::string> settings, metrics;
  for (const auto& [key, value] : spec.settings)
    settings.push_back(fmt::format("{} = {}", key, value));
  section("settings", settings);
  if (!spec.inert.empty()) section("inert", {fmt::format("{}", fmt::join(spec.inert, ", "))});
  const bool native = spec.preset.find('/') == std::string::npos;  // others use their source's
  for (const MetricInfo& metric : metric_table()) {
    if (native &&
        metric.applies(spec, true, spec.reads(Stream::ref), spec.reads(Stream::teacher))) {
      metrics.push_back(fmt::format("{:<30} {}", metric.name, metric.definition));
    }
  }
  for (const OwnMetric& metric : spec.metrics) {
    metrics.push_back(fmt::format("{:<30} {}", "plugin/" + metric.name, metric.definition));
  }
  section("metrics, where x = log pi - log rollout and r = e^x", metrics);
  return out;
}

}  // namespace leeway
