#include "torch/flat_adamw.h"

#include <algorithm>
#include <cmath>
#include <vector>

#ifdef LEEWAY_CUDA
#include "cuda/adamw.h"
#include "torch/cuda_tensors.h"
#endif

namespace leeway {

using at::Tensor;

namespace {

constexpr int64_t kNormPart = int64_t{1} << 24;  // numbers turned to float64 at a time

}  // namespace

void adamw_step(const FlatAdamW& tensors, const OptimizerTable& table, int64_t step, double rate,
                double scale) {
  const double n = static_cast<double>(step);
  const double step_size = rate / (1.0 - std::pow(table.beta1, n));
  const double root = 1.0 / std::sqrt(1.0 - std::pow(table.beta2, n));
  const double keep = 1.0 - rate * table.weight_decay;
  const int64_t size = tensors.parameters.numel();
#ifdef LEEWAY_CUDA
  if (tensors.parameters.is_cuda()) {
    cuda::AdamWStep all;
    all.count = size, all.decaying = tensors.decaying;
    all.parameters = tensors.parameters.data_ptr<float>();
    all.gradients = tensors.gradients.data_ptr<float>();
    all.first_moment = tensors.first_moment.data_ptr<float>();
    all.second_moment = tensors.second_moment.data_ptr<float>();
    all.copy = tensors.copy.defined() && tensors.copy.scalar_type() == at::kBFloat16
                   ? data_of(tensors.copy)
                   : nullptr;
    all.scale = static_cast<float>(scale), all.keep = static_cast<float>(keep);
    all.beta1 = static_cast<float>(table.beta1), all.beta2 = static_cast<float>(table.beta2);
    all.step_size = static_cast<float>(step_size), all.root = static_cast<float>(root);
    all.epsilon = static_cast<float>(table.epsilon);
    cuda::adamw_step(all, stream_of(tensors.parameters));
    if (tensors.copy.defined() && all.copy == nullptr) tensors.copy.copy_(tensors.parameters);
    return;
  }
#endif
  const auto part = [&](const Tensor& flat, bool decays) {
    return decays ? flat.narrow(0, 0, tensors.decaying)
                  : flat.narrow(0, tensors.decaying, size - tensors.decaying);
  };
  for (const bool decays : {true, false}) {
    const Tensor p = part(tensors.parameters, decays), g = part(tensors.gradients, decays);
    const Tensor m = part(tensors.first_moment, decays), v = part(tensors.second_moment, decays);
    if (scale != 1.0) g.mul_(scale);
    m.mul_(table.beta1).add_(g, 1.0 - table.beta1);
    v.mul_(table.beta2).addcmul_(g, g, 1.0 - table.beta2);
    p.mul_(decays ? keep : 1.0).addcdiv_(m, v.sqrt().mul_(root).add_(table.epsilon), -step_size);
  }
  if (tensors.copy.defined()) tensors.copy.copy_(tensors.parameters);
}

double norm_of(const Tensor& flat) {
  std::vector<Tensor> parts;
#ifdef LEEWAY_CUDA
  if (flat.is_cuda()) {
    const Tensor sums =
        at::empty({cuda::square_sums(flat.numel())}, flat.options().dtype(at::kDouble));
    cuda::sum_squares(flat.data_ptr<float>(), flat.numel(), sums.data_ptr<double>(),
                      stream_of(flat));
    parts.push_back(sums);
  }
#endif
  if (parts.empty()) {
    for (const Tensor& part : flat.split(kNormPart)) {
      parts.push_back(part.to(at::kDouble).square().sum().view(1));
    }
  }
  const Tensor sums = at::cat(parts).cpu();
  double total = 0.0;
  for (int64_t i = 0; i < sums.numel(); ++i) total += sums.data_ptr<double>()[i];
  return std::sqrt(total);
}

}  // namespace leeway
