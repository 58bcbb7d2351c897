// Matrix products whose results do not depend on what else is computed.
//
// Every output element is one chain of fused multiply-adds over k = 0, 1, .. K-1, starting from
// zero, from the old value or from a bias. Vector lanes and register tiles run over outputs only,
// so an element has the same bits whatever the number of rows, their order, the blocking, the
// thread count, and whether the weights were packed beforehand or during the call. (Bits may differ
// between SIMD levels: without FMA each step rounds twice.)
//
// The team's threads share the work of each call. Matrices are row-major unless strides say
// otherwise.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/aligned.h"
#include "base/thread_pool.h"
#include "kernels/numerics.h"

namespace leeway {

// Element (i, j) of a float32 matrix or, with `bf16`, of a bfloat16 matrix.
struct Operand {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t column_stride = 1;
  bool bf16 = false;
};
inline Operand rows_of(const float* data, int64_t width) { return {data, width, 1, false}; }
inline Operand columns_of(const float* data, int64_t width) { return {data, 1, width, false}; }

enum class Start { zero, old_value };

// These bound the team scratch memory that a `gemm` of any size takes.
inline constexpr int64_t kGemmDepth = 256;     // k steps packed at a time
inline constexpr int64_t kGemmColumns = 2048;  // outputs packed at a time
inline constexpr int64_t kGemmScratchBytes =
    kGemmDepth * kGemmColumns * static_cast<int64_t>(sizeof(float));

// C[M, N] = (Start) + A[M, K] B[K, N]. `a` is float32. Rows of C are `ldc` apart.
void gemm(Team& team, int64_t m, int64_t n, int64_t k, const Operand& a, const Operand& b, float* c,
          int64_t ldc, Start start = Start::zero);

// Weights [N, K] packed for products with any number of rows, in panels of 32 outputs. In int8 each
// output has a scale: the largest magnitude of its row / 127.
class PackedMatrix {
 public:
  // One row-major [outputs, inputs] matrix of a stack.
  struct Part {
    const float* data;
    int64_t outputs;
  };

  // Sizes the matrix for parts stacked along the outputs; `pack` then fills it whenever the weights
  // change.
  PackedMatrix() = default;
  PackedMatrix(Precision precision, int64_t outputs, int64_t inputs);
  void pack(Team& team, std::span<const Part> parts);

  Precision precision() const { return precision_; }
  int64_t outputs() const { return outputs_; }
  int64_t inputs() const { return inputs_; }
  size_t bytes() const;
  // The weights of one output as they are after packing (rounded or quantized). [inputs]
  void row(int64_t output, float* to) const;

  const std::byte* panel(int64_t index) const;
  const float* scales() const { return scales_.data(); }

 private:
  size_t panel_bytes() const;
  Precision precision_ = Precision::float32;
  int64_t outputs_ = 0, inputs_ = 0;
  AlignedVector<std::byte> panels_;
  AlignedVector<float> scales_;  // int8: [outputs rounded up]
};

// Y[rows, N] = X[rows, K] W^T, starting from zero, from Y, or from `bias` [N] if given (then
// `start` is zero). Rows of X are `ldx` apart, rows of Y `ldy`. In float32 the bits equal those of
// `gemm`.
void product(Team& team, const float* x, int64_t rows, int64_t ldx, const PackedMatrix& w, float* y,
             int64_t ldy, Start start = Start::zero, const float* bias = nullptr);

}  // namespace leeway
