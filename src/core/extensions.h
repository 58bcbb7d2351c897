// Named extensions: what needs the whole batch at once and cannot be said per token.
#pragma once

#include <vector>

#include "leeway/loss.h"

namespace leeway {

// kl_cov: 1 on the trained tokens with the largest covariance of advantage and log pi.
template <class T>
std::vector<uint8_t> select_by_covariance(const LossSpec& spec, const BatchView<T>& batch,
                                          std::span<const uint8_t> trained);

// Divides all weights by their mean, according to spec.weight_normalisation. A mean of (almost)
// zero leaves them unchanged.
template <class T>
void normalise_weights(const LossSpec& spec, const BatchView<T>& batch,
                       std::span<const uint8_t> trained, std::span<T> weights);

}  // namespace leeway
