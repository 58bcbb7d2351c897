// In which numbers and which order products are computed.
#pragma once

#include "base/enum_names.h"

namespace leeway {

// Of a sampler's weights. Packed ones for CPUs are not fp8, those on a GPU are not int8.
enum class Precision { float32, bf16, int8, fp8 };
template <>
inline constexpr std::array kNames<Precision>{"float32", "bf16", "int8", "fp8"};

// `exact`: all products use our own kernels with one fixed order (kernels/matmul.h). `fast`:
// products of training passes use the BLAS (kernels/blas.h).
enum class Numerics { exact, fast };
template <>
inline constexpr std::array kNames<Numerics>{"exact", "fast"};

}  // namespace leeway
