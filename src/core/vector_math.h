// Small vector functions a correction can call, for both precisions.
#pragma once

#include <span>

namespace leeway {

// values[i] = e^values[i]; infinity above the type's range.
void exp_in_place(std::span<double> values);
void exp_in_place(std::span<float> values);

}  // namespace leeway
