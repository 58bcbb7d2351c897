// Metrics of one's own (OwnMetric) of a whole batch.
#pragma once

#include "leeway/loss.h"
#include "leeway/metric_list.h"

namespace leeway {

// One number for each of the spec's own metrics whose streams the batch has, named plugin/NAME: NaN
// where no sequence counts. Throws Error naming the metric for a number that is not finite.
Metrics own_metrics(const LossSpec& spec, const BatchView<double>& batch);

}  // namespace leeway
