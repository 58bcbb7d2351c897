#include "torch/device_weights.h"

#include <ATen/core/grad_mode.h>

#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "leeway/error.h"
#include "torch/torch_errors.h"

#ifdef LEEWAY_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace leeway {

using at::Tensor;

TorchDeviceWeights::TorchDeviceWeights(FlatLayout layout, const Tensor& weights)
    : layout_(std::move(layout)) {
  LEEWAY_CHECK(weights.numel() == layout_.size, "weights in the layout");
  const at::NoGradGuard guard;
  flat_ = weights.clone();
#ifdef LEEWAY_CUDA
  if (flat_.is_cuda()) c10::cuda::getCurrentCUDAStream(flat_.device().index()).synchronize();
#endif
}

void TorchDeviceWeights::copy_to(Parameters& host) const {
  with_plain_errors([&] { copy_to_host(layout_, flat_, host); });
}

// Numbers are finite if the least and the greatest of them are: both are NaN where any number is.
std::string TorchDeviceWeights::not_finite_text() const {
  return with_plain_errors([&]() -> std::string {
    const at::NoGradGuard guard;
    const auto finite = [](const Tensor& tensor) {
      const auto [least, greatest] = at::aminmax(tensor);
      const Tensor bounds = at::stack({least, greatest}).to(at::kCPU, at::kFloat);
      return std::isfinite(bounds.data_ptr<float>()[0]) &&
             std::isfinite(bounds.data_ptr<float>()[1]);
    };
    if (finite(flat_)) return "";
    const std::vector<Tensor> parameters = parameter_views(layout_, flat_);
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (finite(parameters[i])) continue;
      const Tensor host = parameters[i].to(at::kCPU, at::kFloat).contiguous();
      const ParameterInfo& info = layout_.table[i];
      return leeway::not_finite_text(info.name, info.shape,
                                     {host.data_ptr<float>(), static_cast<size_t>(host.numel())});
    }
    return "";
  });
}

}  // namespace leeway
