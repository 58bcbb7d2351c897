#include "torch/device_weights.h"

#include <ATen/core/grad_mode.h>

#include <cmath>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "leeway/error.h"
#include "torch/torch_errors.h"

#ifdef LEEWAY_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "base/crc32c_lanes.h"
#include "cuda/crc32c.h"
#include "cuda/finite.h"
#include "torch/cuda_tensors.h"
#endif

namespace leeway {

using at::Tensor;

TorchDeviceWeights::TorchDeviceWeights(FlatLayout layout, Tensor weights,
                                       std::shared_ptr<const Parameters> base)
    : layout_(std::move(layout)), flat_(std::move(weights)), base_(std::move(base)) {
  LEEWAY_CHECK(flat_.numel() == layout_.size, "weights in the layout");
#ifdef LEEWAY_CUDA
  if (flat_.is_cuda() &&
      (flat_.scalar_type() == at::kFloat || flat_.scalar_type() == at::kBFloat16)) {
    const Tensor not_finite = at::empty({1}, flat_.options().dtype(at::kInt));
    cuda::find_not_finite(dtype_of(flat_), data_of(flat_), layout_.size,
                          not_finite.data_ptr<int32_t>(), stream_of(flat_));
    known_finite_ = not_finite.item<int32_t>() == 0;  // waits for the device
    return;
  }
#endif
#ifdef LEEWAY_CUDA
  if (flat_.is_cuda()) c10::cuda::getCurrentCUDAStream(flat_.device().index()).synchronize();
#endif
}

Parameters TorchDeviceWeights::make_host(const ModelConfig& config) const {
  return base_ ? Parameters(base_, *layout_.lora) : Parameters(config);
}

void TorchDeviceWeights::copy_to(Parameters& host) const {
  with_plain_errors([&] { copy_to_host(layout_, flat_, host); });
}

uint32_t TorchDeviceWeights::checksum() const {
#ifdef LEEWAY_CUDA
  if (flat_.is_cuda() && flat_.scalar_type() == at::kFloat) {
    return with_plain_errors([&] {
      const c10::cuda::CUDAGuard guard(flat_.device());
      int64_t count = 0;
      for (const ParameterInfo& info : layout_.table) count += crc32c_lanes::parts_of(info.size());
      const Tensor parts = at::empty({count}, at::device(flat_.device()).dtype(at::kInt));
      auto* const sums = static_cast<uint32_t*>(parts.data_ptr());
      int64_t at = 0;
      for (size_t i = 0; i < layout_.table.size(); ++i) {
        const int64_t size = layout_.table[i].size();
        cuda::crc32c_parts(flat_.data_ptr<float>() + layout_.offsets[i], size, sums + at,
                           stream_of(flat_));
        at += crc32c_lanes::parts_of(size);
      }
      const Tensor host = parts.cpu();
      std::span<const uint32_t> left(static_cast<const uint32_t*>(host.data_ptr()),
                                     static_cast<size_t>(count));
      std::vector<uint32_t> crcs;
      for (const ParameterInfo& info : layout_.table) {
        const auto its = static_cast<size_t>(crc32c_lanes::parts_of(info.size()));
        crcs.push_back(crc32c_lanes::joined(left.first(its), info.size()));
        left = left.subspan(its);
      }
      return leeway::checksum(crcs);
    });
  }
#endif
  Parameters host = make_host(layout_.config);
  copy_to(host);
  return leeway::checksum(host);
}

// Numbers are finite if the least and the greatest of them are: both are NaN where any number is.
std::string TorchDeviceWeights::not_finite_text() const {
  if (known_finite_) return "";
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
