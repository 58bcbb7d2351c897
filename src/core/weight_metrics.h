// Metrics of the corrections' weights that need their bounds, from a whole batch: not among the
// sums of leeway/metrics.h, which are made token by token from the finished weight.
#pragma once

#include "leeway/loss.h"
#include "leeway/metric_list.h"

namespace leeway {

// Over trained tokens, for a spec whose corrections contain a built-in weight; else empty:
//   weight_clipped_share   share of tokens at which the weight of a correction is another one than
//                          without its bounds: limited by a cap, or zero outside its band
//   weight_abs_deviation   mean of |w - 1|, w the product of all corrections' weights
// `result` is that of evaluate_reference, with its trace. NaN without a trained token.
Metrics weight_metrics(const LossSpec& spec, const BatchView<double>& batch,
                       const LossResult& result);

}  // namespace leeway
