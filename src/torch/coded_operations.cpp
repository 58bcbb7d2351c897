#include "torch/coded_operations.h"

#include <array>

#include "base/e4m3.h"
#include "leeway/error.h"

#ifdef LEEWAY_CUDA
#include "cuda/coded_rows.h"
#include "cuda/products.h"
#include "torch/cuda_tensors.h"
#endif

namespace leeway {

using at::Tensor;

namespace {

#ifdef LEEWAY_CUDA

cuda::CodedRows rows_of(const CodedTensor& coded) {
  return {coded.codes.size(0), coded.codes.size(1), coded.codes.data_ptr<uint8_t>(),
          coded.scales.data_ptr<float>()};
}

#endif

// The codes' values, without the scales.
Tensor values_of(const Tensor& codes) {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> values{};
    for (size_t code = 0; code < values.size(); ++code) {
      values[code] = from_e4m3(static_cast<uint8_t>(code));
    }
    return values;
  }();
  const Tensor host = codes.to(at::kCPU).contiguous();
  const Tensor values = at::empty(host.sizes(), at::TensorOptions(at::kFloat));
  const auto* from = host.data_ptr<uint8_t>();
  auto* to = values.data_ptr<float>();
  for (int64_t i = 0; i < host.numel(); ++i) to[i] = table[from[i]];
  return values.to(codes.device());
}

}  // namespace

CodedTensor empty_coded(int64_t rows, int64_t width, at::Device device) {
  return {at::empty({rows, width}, at::device(device).dtype(at::kByte)),
          at::empty({rows}, at::device(device).dtype(at::kFloat))};
}

CodedTensor first_coded(const CodedTensor& place, int64_t rows, int64_t width) {
  return {place.codes.view({-1}).narrow(0, 0, rows * width).view({rows, width}),
          place.scales.narrow(0, 0, rows)};
}

void code_rows(const Tensor& x, CodedTensor& to) {
#ifdef LEEWAY_CUDA
  if (x.is_cuda()) {
    cuda::code_rows(dtype_of(x), data_of(x), rows_of(to), stream_of(x));
    return;
  }
#endif
  const Tensor rounded = x.to(at::kBFloat16).to(at::kFloat).contiguous();
  const int64_t width = rounded.size(1);
  for (int64_t row = 0; row < rounded.size(0); ++row) {
    to.scales.data_ptr<float>()[row] = to_e4m3_row(rounded.data_ptr<float>() + row * width, width,
                                                   to.codes.data_ptr<uint8_t>() + row * width);
  }
}

void add_norm_coded(Tensor& x, const Tensor& delta, const Tensor& weight, double eps, Tensor& y,
                    CodedTensor& to) {
#ifdef LEEWAY_CUDA
  if (x.is_cuda()) {
    cuda::RmsNorm norm;
    norm.rows = x.size(0), norm.width = x.size(1);
    norm.x = data_of(x), norm.delta = data_of(delta);
    if (delta.defined()) norm.sum = data_of(x);
    norm.weight = data_of(weight), norm.eps = static_cast<float>(eps);
    norm.y = data_of(y);
    cuda::code_normed_rows(norm, rows_of(to), stream_of(x));
    return;
  }
#endif
  Tensor normed = y.defined() ? y : at::empty_like(x);
  add_norm(x, delta, weight, eps, normed);
  code_rows(normed, to);
}

void swiglu_rows_coded(const Tensor& gate_up, Tensor& s, CodedTensor& to) {
#ifdef LEEWAY_CUDA
  if (gate_up.is_cuda()) {
    cuda::code_gated_rows(data_of(gate_up), data_of(s), rows_of(to), stream_of(gate_up));
    return;
  }
#endif
  Tensor gated = s.defined() ? s : at::empty(to.codes.sizes(), gate_up.options());
  swiglu_rows(gate_up, gated);
  code_rows(gated, to);
}

void project_coded([[maybe_unused]] cuda::Products* products, const CodedTensor& x,
                   const CodedTensor& weight, const Tensor& bias, Tensor& y) {
  LEEWAY_CHECK(y.scalar_type() == at::kBFloat16, "products in fp8 are rounded to bf16");
#ifdef LEEWAY_CUDA
  if (y.is_cuda()) {
    LEEWAY_CHECK(products != nullptr, "products of a CUDA device");
    cuda::Projection projection;
    projection.rows = x.codes.size(0), projection.inputs = x.codes.size(1);
    projection.outputs = weight.codes.size(0);
    projection.x = data_of(x.codes), projection.weight = data_of(weight.codes);
    projection.x_scales = x.scales.data_ptr<float>();
    projection.weight_scales = weight.scales.data_ptr<float>();
    projection.bias = data_of(bias);
    projection.y = data_of(y), projection.y_stride = y.stride(0);
    products->project(projection, stream_of(y));
    return;
  }
#endif
  Tensor result = at::mm(values_of(x.codes), values_of(weight.codes).t());
  result.mul_(x.scales.unsqueeze(1)).mul_(weight.scales);
  if (bias.defined()) result.add_(bias.to(at::kFloat));
  y.copy_(result);
}

Tensor decoded(const CodedTensor& coded) {
  return values_of(coded.codes) * coded.scales.unsqueeze(1);
}

}  // namespace leeway
