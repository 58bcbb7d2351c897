#include "torch/device_weights.h"

#include <ATen/core/grad_mode.h>

#include <cmath>
#include <tuple>
#include <utility>

#include "leeway/error.h"
#include "torch/torch_errors.h"

#ifdef LEEWAY_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace leeway {

using at::Tensor;

TorchDeviceWeights::TorchDeviceWeights(std::vector<ParameterInfo> table,
                                       const std::vector<Tensor>& parameters)
    : table_(std::move(table)) {
  LEEWAY_CHECK(table_.size() == parameters.size(), "a tensor for each parameter");
  const at::NoGradGuard guard;
  for (const Tensor& parameter : parameters) tensors_.push_back(parameter.clone());
#ifdef LEEWAY_CUDA
  const at::Device device = parameters.front().device();
  if (device.is_cuda()) c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
#endif
}

void TorchDeviceWeights::copy_to(Parameters& host) const {
  LEEWAY_CHECK(host.table().size() == tensors_.size(), "weights of another model");
  with_plain_errors([&] {
    const at::NoGradGuard guard;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      at::from_blob(host.of(i).data(), table_[i].shape, at::kFloat).copy_(tensors_[i]);
    }
  });
}

// A parameter is finite if its least and its greatest number are: both are NaN where any number is.
std::string TorchDeviceWeights::not_finite_text() const {
  return with_plain_errors([&]() -> std::string {
    const at::NoGradGuard guard;
    std::vector<Tensor> bounds;
    for (const Tensor& tensor : tensors_) {
      const auto [least, greatest] = at::aminmax(tensor);
      bounds.push_back(least);
      bounds.push_back(greatest);
    }
    const Tensor found = at::stack(bounds).to(at::kCPU, at::kFloat);
    const float* values = found.data_ptr<float>();
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (std::isfinite(values[2 * i]) && std::isfinite(values[2 * i + 1])) continue;
      const Tensor host = tensors_[i].to(at::kCPU, at::kFloat).contiguous();
      return leeway::not_finite_text(table_[i].name, table_[i].shape,
                                     {host.data_ptr<float>(), static_cast<size_t>(host.numel())});
    }
    return "";
  });
}

}  // namespace leeway
