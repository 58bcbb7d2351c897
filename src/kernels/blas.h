// Matrix products by the system's BLAS, for `fast` numerics.
//
// A BLAS chooses its order of summation by the shape of the product, so a row's bits depend on how
// many other rows are computed with it. The library is loaded at run time; programs that never use
// fast numerics do not need one.
#pragma once

#include "kernels/matmul.h"

namespace leeway {

// Throws Error with the remedy if no BLAS can be loaded. Call before a pass that uses `multiply`
// with `fast`.
void require_blas();

// gemm in the requested numerics. Operands are float32, with one stride of 1.
void multiply(Team& team, Numerics numerics, int64_t m, int64_t n, int64_t k, const Operand& a,
              const Operand& b, float* c, int64_t ldc, Start start = Start::zero);

}  // namespace leeway
