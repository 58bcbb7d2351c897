// Matrix products by the machine's BLAS, for `fast` numerics.
//
// A BLAS chooses its order of summation by the shape of the product, so that a row's bits depend on
// how many others came with it. Its library is found at run time; a program that never asks for
// fast numerics does not need one.
#pragma once

#include "kernels/matmul.h"

namespace leeway {

// Throws Error with the remedy if the machine has no BLAS that can be loaded. Call before a pass
// that uses `multiply` with `fast`.
void require_blas();

// gemm in the numerics asked for. Operands are float32, with one stride of 1.
void multiply(Team& team, Numerics numerics, int64_t m, int64_t n, int64_t k, const Operand& a,
              const Operand& b, float* c, int64_t ldc, Start start = Start::zero);

}  // namespace leeway
