// Small pieces of text that `explain`, formulas and messages share.
#pragma once

#include <string>

#include "leeway/loss.h"

namespace leeway {

std::string number_text(double value);  // 0.2, 5, 1e-3, infinity
std::string ratio_text(const Pair& pair,
                       Level level);  // "pi/rollout", "exp(mean log(prox/rollout))"
const char* name_of(ReductionKind kind);
const char* name_of(Quantity quantity);
const char* name_of(PenaltyKind kind);

}  // namespace leeway
