#include "core/own_metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/participation.h"
#include "leeway/error.h"

namespace leeway {

Metrics own_metrics(const LossSpec& spec, const BatchView<double>& batch) {
  Metrics out;
  if (spec.metrics.empty()) return out;
  const std::vector<uint8_t> trained = participating(spec, batch);
  for (const OwnMetric& metric : spec.metrics) {
    if (std::any_of(metric.reads.begin(), metric.reads.end(),
                    [&](Stream stream) { return batch.stream(stream).empty(); })) {
      continue;
    }
    MetricShare all;
    for (int64_t s = 0; s < batch.sequence_count(); ++s) {
      const MetricShare part = metric.share(sequence_of(batch, s, trained));
      if (!std::isfinite(part.sum) || !std::isfinite(part.count)) {
        throw Error(fmt::format(
            "metric plugin/{}: sequence {} adds {} to its sum and {} to its count: both "
            "must be finite; look at the mask before using a value",
            metric.name, s, part.sum, part.count));
      }
      all.sum += part.sum, all.count += part.count;
    }
    out.emplace_back("plugin/" + metric.name, all.count > 0.0 ? all.sum / all.count : std::nan(""));
  }
  return out;
}

}  // namespace leeway
