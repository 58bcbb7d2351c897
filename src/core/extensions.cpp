#include "core/extensions.h"

#include <algorithm>
#include <cmath>

#include "core/participation.h"
#include "leeway/error.h"

namespace leeway {

// M2PO: drops the tokens with the largest (log rollout - log prox)^2 until the mean of the rest is
// below the threshold. If even the smallest is above it, only that one stays.
template <class T>
std::vector<uint8_t> narrow_mask(const LossSpec& spec, const BatchView<T>& batch) {
  std::vector<uint8_t> mask = participating(spec, batch);
  if (!spec.m2_threshold) return mask;
  std::vector<std::pair<double, size_t>> moments;
  for (size_t i = 0; i < mask.size(); ++i) {
    if (!mask[i]) continue;
    const double x = static_cast<double>(batch.rollout[i]) - static_cast<double>(batch.prox[i]);
    moments.emplace_back(x * x, i);
  }
  // The mean of the k smallest grows with k, so the largest k below the threshold is found by
  // bisection: each half is partitioned, not sorted.
  double sum = 0.0;
  size_t kept = 0, end = moments.size();
  while (kept < end) {
    const size_t middle = kept + (end - kept + 1) / 2;
    std::nth_element(moments.begin() + static_cast<std::ptrdiff_t>(kept),
                     moments.begin() + static_cast<std::ptrdiff_t>(middle - 1),
                     moments.begin() + static_cast<std::ptrdiff_t>(end));
    double more = 0.0;
    for (size_t k = kept; k < middle; ++k) more += moments[k].first;
    if ((sum + more) / static_cast<double>(middle) < *spec.m2_threshold) {
      sum += more;
      kept = middle;
    } else {
      end = middle - 1;
    }
  }
  // Nothing is below the threshold: only the smallest stays, as in the source.
  if (kept == 0 && !moments.empty()) {
    std::nth_element(moments.begin(), moments.begin(), moments.end());
    kept = 1;
  }
  for (size_t k = kept; k < moments.size(); ++k) mask[moments[k].second] = 0;
  return mask;
}

template <class T>
std::vector<uint8_t> select_by_covariance(const LossSpec& spec, const BatchView<T>& batch,
                                          std::span<const uint8_t> trained) {
  double n = 0.0, mean_advantage = 0.0, mean_log_pi = 0.0;
  for (size_t i = 0; i < trained.size(); ++i) {
    if (trained[i]) n += 1.0, mean_advantage += batch.advantages[i], mean_log_pi += batch.pi[i];
  }
  std::vector<uint8_t> selected(trained.size(), 0);
  if (n == 0.0) return selected;
  mean_advantage /= n;
  mean_log_pi /= n;
  std::vector<std::pair<double, size_t>> order;
  for (size_t i = 0; i < trained.size(); ++i) {
    if (!trained[i]) continue;
    order.emplace_back(-(batch.advantages[i] - mean_advantage) * (batch.pi[i] - mean_log_pi), i);
  }
  std::sort(order.begin(), order.end());
  const size_t count =
      std::max<size_t>(1, static_cast<size_t>(spec.covariance_selection->ratio * n));
  for (size_t k = 0; k < std::min(count, order.size()); ++k) selected[order[k].second] = 1;
  return selected;
}

template <class T>
void normalise_weights(const LossSpec& spec, const BatchView<T>& batch,
                       std::span<const uint8_t> trained, std::span<T> weights) {
  if (spec.weight_normalisation == WeightNormalisation::none) return;
  double sum = 0.0, count = 0.0;
  for (int64_t s = 0; s < batch.sequence_count(); ++s) {
    double sequence_sum = 0.0, sequence_count = 0.0;
    for (size_t i = static_cast<size_t>(batch.offsets[s]);
         i < static_cast<size_t>(batch.offsets[s + 1]); ++i) {
      if (trained[i]) sequence_sum += static_cast<double>(weights[i]), sequence_count += 1.0;
    }
    if (spec.weight_normalisation == WeightNormalisation::token) {
      sum += sequence_sum, count += sequence_count;
    } else if (sequence_count > 0) {
      sum += sequence_sum / sequence_count, count += 1.0;
    }
  }
  const double mean = count > 0 ? sum / count : 0.0;
  if (mean <= 1e-8) return;
  for (T& weight : weights) weight = static_cast<T>(static_cast<double>(weight) / mean);
}

std::vector<double> approximate_prox(ProxApproximation method, std::span<const double> pi,
                                     std::span<const double> rollout,
                                     std::span<const int32_t> versions, int32_t current_version) {
  LEEWAY_CHECK(pi.size() == rollout.size() && pi.size() == versions.size(),
               "one version per log-probability");
  std::vector<double> prox(rollout.begin(), rollout.end());
  if (method == ProxApproximation::rollout) return prox;
  for (size_t t = 0; t < prox.size(); ++t) {
    const double behind = static_cast<double>(current_version) - versions[t];
    const double alpha =
        versions[t] < 0 || behind <= 0 ? 0.0 : std::clamp((behind - 1.0) / behind, 0.0, 1.0);
    if (method == ProxApproximation::loglinear) {
      prox[t] = rollout[t] + alpha * (pi[t] - rollout[t]);
    } else {
      prox[t] = std::log((1.0 - alpha) * std::exp(rollout[t]) + alpha * std::exp(pi[t]) + 1e-10);
    }
  }
  return prox;
}

#define LEEWAY_INSTANTIATE(T)                                                                 \
  template std::vector<uint8_t> narrow_mask<T>(const LossSpec&, const BatchView<T>&);         \
  template std::vector<uint8_t> select_by_covariance<T>(const LossSpec&, const BatchView<T>&, \
                                                        std::span<const uint8_t>);            \
  template void normalise_weights<T>(const LossSpec&, const BatchView<T>&,                    \
                                     std::span<const uint8_t>, std::span<T>);
LEEWAY_INSTANTIATE(double)
LEEWAY_INSTANTIATE(float)
#undef LEEWAY_INSTANTIATE

}  // namespace leeway
