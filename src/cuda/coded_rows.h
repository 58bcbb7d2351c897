// Rows of numbers as e4m3 codes with a scale each (base/e4m3.h says what they stand for), on a CUDA
// device: the inputs of products in fp8, and the matrices of their weights. Numbers are rounded to
// bf16 before they become codes, so that a row has the same codes whether it was stored between two
// kernels or not, and a weight the same from a float32 and from a bf16 copy. dtype.h says what
// holds for all such functions.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/dtype.h"
#include "cuda/norm_rope_swiglu.h"

namespace leeway::cuda {

// Where codes go. The width is a multiple of 16.
struct CodedRows {
  int64_t rows = 0, width = 0;
  uint8_t* codes = nullptr;  // [rows, width], 16-byte aligned
  float* scales = nullptr;   // [rows]
};

// Of x [rows, width] of either type.
void code_rows(Dtype dtype, const void* x, const CodedRows& to, cudaStream_t stream);

// What rms_norm makes of bf16 rows, as codes; rows and width are those of `norm`. norm.y may be
// null, `chosen` and `inverse` are.
void code_normed_rows(const RmsNorm& norm, const CodedRows& to, cudaStream_t stream);

// What swiglu makes of bf16 rows gate_up [rows, 2 width], as codes; s [rows, width] may be null.
void code_gated_rows(const void* gate_up, void* s, const CodedRows& to, cudaStream_t stream);

// y [rows, outputs] in bf16 = products [rows, outputs] in float32 times the scales of their row and
// of their output, + bias [outputs] in bf16, which may be null. Rows of y are `y_stride` apart.
struct ScaledProducts {
  int64_t rows = 0, outputs = 0;
  const float* products = nullptr;
  const float *row_scales = nullptr, *output_scales = nullptr;
  const void* bias = nullptr;
  void* y = nullptr;
  int64_t y_stride = 0;
};
void scale_products(const ScaledProducts& scaled, cudaStream_t stream);

}  // namespace leeway::cuda
