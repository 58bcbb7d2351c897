// In which numbers and which order products are computed.
#pragma once

#include "base/enum_names.h"

namespace leeway {

// Of packed weights.
enum class Precision { float32, bf16, int8 };
template <>
inline constexpr std::array kNames<Precision>{"float32", "bf16", "int8"};

// `exact`: all products use our own kernels with one fixed order (kernels/matmul.h). `fast`:
// products of training passes use the BLAS (kernels/blas.h).
enum class Numerics { exact, fast };
template <>
inline constexpr std::array kNames<Numerics>{"exact", "fast"};

}  // namespace leeway
