// The steps of a sampling pass in fp8 that differ from those of sampling_operations.h, of which
// everything else holds here too: rows become e4m3 codes (base/e4m3.h) before a product, the rows
// of its matrix have been made codes when the weights came. Elsewhere than on CUDA products are
// those of what the codes stand for, in float32.
#pragma once

#include <ATen/ATen.h>

#include "torch/sampling_operations.h"

namespace leeway {

// Numbers [R, W] as codes, uint8 [R, W], and a float32 scale for each row [R]. W is a multiple of
// 16.
struct CodedTensor {
  at::Tensor codes, scales;
};
CodedTensor empty_coded(int64_t rows, int64_t width, at::Device device);
// The first rows, of this width, of a place that is wide enough.
CodedTensor first_coded(const CodedTensor& place, int64_t rows, int64_t width);

// Numbers of float32 or bf16 are rounded to bf16 first.
void code_rows(const at::Tensor& x, CodedTensor& to);
// add_norm, whose result becomes codes, and goes to y as well unless that is undefined.
void add_norm_coded(at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps,
                    at::Tensor& y, CodedTensor& to);
// The same for swiglu_rows.
void swiglu_rows_coded(const at::Tensor& gate_up, at::Tensor& s, CodedTensor& to);

// y [R, outputs] = x weight^T + bias, which may be undefined; y is bf16. A row's bits do not depend
// on the rows beside it.
void project_coded(cuda::Products* products, const CodedTensor& x, const CodedTensor& weight,
                   const at::Tensor& bias, at::Tensor& y);

// What the codes stand for, in float32: slow and readable.
at::Tensor decoded(const CodedTensor& coded);

}  // namespace leeway
