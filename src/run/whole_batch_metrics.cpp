#include "run/whole_batch_metrics.h"

#include <algorithm>
#include <cmath>

#include "core/foreign/foreign.h"
#include "core/own_metrics.h"
#include "core/weight_metrics.h"
#include "leeway/error.h"

namespace leeway {
namespace {

Batch batch_of(std::span<const Sample> samples, const LearnerResult& learned) {
  Batch batch;
  const auto add = [](std::vector<double>& to, const TokenValues& from, size_t s) {
    if (!from.empty()) to.insert(to.end(), from[s].begin(), from[s].end());
  };
  for (size_t s = 0; s < samples.size(); ++s) {
    const Sample& sample = samples[s];
    const auto first = std::find(sample.loss_mask.begin(), sample.loss_mask.end(), uint8_t{1});
    const auto prompt = static_cast<size_t>(first - sample.loss_mask.begin());
    add(batch.pi, learned.logprobs, s);
    add(batch.prox, learned.prox, s);
    add(batch.ref, learned.ref, s);
    add(batch.teacher, learned.teacher, s);
    batch.rollout.insert(batch.rollout.end(), sample.rollout.begin(), sample.rollout.end());
    batch.mask.insert(batch.mask.end(), sample.loss_mask.begin(), sample.loss_mask.end());
    for (size_t t = 0; t < sample.ids.size(); ++t) {
      batch.weights.push_back(t < prompt ? 0.0 : 1.0);
      batch.advantages.push_back(sample.advantage(t));
    }
    batch.rollout_ids.push_back(sample.rollout_id);
    batch.offsets.push_back(static_cast<int64_t>(batch.pi.size()));
  }
  return batch;
}

double mean(const std::vector<double>& values) {
  double sum = 0.0;
  for (const double value : values) sum += value;
  return values.empty() ? std::nan("") : sum / static_cast<double>(values.size());
}

}  // namespace

Metrics whole_batch_metrics(const LossSpec& spec, std::span<const Sample> samples,
                            const LearnerResult& learned, const Metrics& taken) {
  const bool foreign = spec.preset.find('/') != std::string::npos;
  const bool evaluates = foreign || !spec.corrections.empty();
  if ((!evaluates && spec.metrics.empty()) || samples.empty()) return {};
  const Batch batch = batch_of(samples, learned);
  const BatchView<double> view = batch.view();
  Metrics metrics = own_metrics(spec, view);
  if (!evaluates) return metrics;
  const LossResult result = evaluate_reference(spec, view, {}, nullptr, true);
  for (auto& metric : weight_metrics(spec, view, result)) metrics.push_back(std::move(metric));
  if (!foreign) return metrics;
  const auto is_taken = [&](const std::string& name) {
    const auto has = [&](const Metrics& list) {
      return std::any_of(list.begin(), list.end(),
                         [&](const auto& metric) { return metric.first == name; });
    };
    return has(taken) || has(metrics);
  };
  for (const ForeignMetric& metric : foreign_metrics(spec, view, result)) {
    metrics.emplace_back(is_taken(metric.name) ? "foreign/" + metric.name : metric.name,
                         metric.list ? mean(metric.values) : metric.values.front());
  }
  return metrics;
}

}  // namespace leeway
