// What differs between the libtorch versions the code compiles with: 1.13 (Debian 12) and 2.x.
#pragma once

#include <ATen/ATen.h>
#include <torch/version.h>

#include <vector>

namespace leeway {

// What the optimizer updates, index by index.
struct OptimizedTensors {
  std::vector<at::Tensor> parameters, gradients, first_moments, second_moments;
};

// Whether `fused_adamw` is available for tensors of this device.
inline bool has_fused_adamw(const at::Device& device) {
#if TORCH_VERSION_MAJOR >= 2
  return device.is_cuda();
#else
  (void)device;
  return false;
#endif
}

// Step number `step` of AdamW (trainer/optimizer.h) over all tensors in a few kernels.
inline void fused_adamw(const OptimizedTensors& tensors, int64_t step, double rate, double beta1,
                        double beta2, double weight_decay, double epsilon) {
#if TORCH_VERSION_MAJOR >= 2
  if (tensors.parameters.empty()) return;
  const at::Tensor steps =
      at::full({}, static_cast<double>(step), tensors.parameters[0].options().dtype(at::kFloat));
  at::_fused_adamw_(tensors.parameters, tensors.gradients, tensors.first_moments,
                    tensors.second_moments, /*max_exp_avg_sqs=*/{},
                    std::vector<at::Tensor>(tensors.parameters.size(), steps), rate, beta1, beta2,
                    weight_decay, epsilon, /*amsgrad=*/false, /*maximize=*/false);
#else
  (void)tensors, (void)step, (void)rate, (void)beta1, (void)beta2, (void)weight_decay,
      (void)epsilon;
#endif
}

}  // namespace leeway
