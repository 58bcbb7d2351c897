// Vector functions over one sequence, for both precisions: double is plain code, float is SIMD.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

#include "leeway/loss.h"

namespace leeway {

// out[t] = the weight of `w` at token level: exp of the (clamped) log ratio, limited, and zero
// outside its interval; 1 where the mask is 0.
void token_weights(const Weight& w, std::span<const double> num, std::span<const double> den,
                   std::span<const uint8_t> mask, std::span<double> out);
void token_weights(const Weight& w, std::span<const float> num, std::span<const float> den,
                   std::span<const uint8_t> mask, std::span<float> out);

// Sum of num - den over the positions in the mask, and how many there are. An empty mask span means
// every position.
std::pair<double, double> log_ratio_sum(std::span<const double> num, std::span<const double> den,
                                        std::span<const uint8_t> mask);
std::pair<double, double> log_ratio_sum(std::span<const float> num, std::span<const float> den,
                                        std::span<const uint8_t> mask);

}  // namespace leeway
