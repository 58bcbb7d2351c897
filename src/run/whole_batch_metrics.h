// Metrics of an update that need the log-probabilities of the whole batch, which the trainer, going
// micro-batch by micro-batch, does not have at once.
#pragma once

#include "data/sample.h"
#include "leeway/loss.h"
#include "leeway/metric_list.h"
#include "orchestrator/interfaces.h"

namespace leeway {

// For a loss of another code base, its metrics under its own names (`tis_clipfrac`, `ppo_kl`, ..),
// where the source has one number per sequence their mean; a name that `taken` has already becomes
// foreign/NAME. For a loss with a built-in weight, weight_clipped_share and weight_abs_deviation
// (core/weight_metrics.h). For every loss, the metrics of plugins (core/own_metrics.h). Of the
// first epoch, computed in double from the log-probabilities that the update used:
// `learned.logprobs`, `prox`, `ref` and `teacher`. Empty for other losses, and where nothing was
// trained.
Metrics whole_batch_metrics(const LossSpec& spec, std::span<const Sample> samples,
                            const LearnerResult& learned, const Metrics& taken);

}  // namespace leeway
