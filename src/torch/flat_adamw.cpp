#include "torch/flat_adamw.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "leeway/error.h"

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
  const FlatMoments& moments = tensors.moments;
  const bool is_split = tensors.low.defined();
  const Tensor& any = is_split ? tensors.low : tensors.parameters;
  const int64_t size = any.numel(), coded = moments.coded();
  LEEWAY_CHECK(coded == 0 || coded == tensors.decaying, "codes for what decays");
#ifdef LEEWAY_CUDA
  if (any.is_cuda()) {
    const bool half = tensors.copy.defined() && tensors.copy.scalar_type() == at::kBFloat16;
    cuda::AdamWStep part;
    part.scale = static_cast<float>(scale), part.keep = static_cast<float>(keep);
    part.beta1 = static_cast<float>(table.beta1), part.beta2 = static_cast<float>(table.beta2);
    part.step_size = static_cast<float>(step_size), part.root = static_cast<float>(root);
    part.epsilon = static_cast<float>(table.epsilon);
    const auto begin_at = [&](int64_t first, int64_t count) {
      part.count = count, part.decaying = tensors.decaying - first;
      if (is_split) {
        part.low = tensors.low.data_ptr<int16_t>() + first;
      } else {
        part.parameters = tensors.parameters.data_ptr<float>() + first;
      }
      part.gradients = tensors.gradients.data_ptr<float>() + first;
      if (half) part.copy = static_cast<char*>(data_of(tensors.copy)) + 2 * first;
    };
    const cudaStream_t stream = stream_of(any);
    if (coded > 0) {
      begin_at(0, coded);
      cuda::adamw_step(
          part,
          {moments.first_codes.data_ptr<int8_t>(), moments.second_codes.data_ptr<uint8_t>(),
           moments.first_scales.data_ptr<float>(), moments.second_scales.data_ptr<float>()},
          stream);
    }
    begin_at(coded, size - coded);
    part.first_moment = moments.first.data_ptr<float>();
    part.second_moment = moments.second.data_ptr<float>();
    cuda::adamw_step(part, stream);
    if (tensors.copy.defined() && !half) tensors.copy.copy_(tensors.parameters);
    return;
  }
#endif
  const Tensor parameters = is_split ? joined({tensors.copy, tensors.low}) : tensors.parameters;
  for (const bool decays : {true, false}) {
    const int64_t begin = decays ? 0 : tensors.decaying;
    const int64_t count = decays ? tensors.decaying : size - tensors.decaying;
    const bool is_coded = decays && coded > 0;
    const auto part = [&](const Tensor& flat) { return flat.narrow(0, begin, count); };
    const Tensor p = part(parameters), g = part(tensors.gradients);
    const auto [m, v] = is_coded ? decoded(moments, 0, coded)
                                 : std::pair(moments.first.narrow(0, begin - coded, count),
                                             moments.second.narrow(0, begin - coded, count));
    if (scale != 1.0) g.mul_(scale);
    m.mul_(table.beta1).add_(g, 1.0 - table.beta1);
    v.mul_(table.beta2).addcmul_(g, g, 1.0 - table.beta2);
    p.mul_(decays ? keep : 1.0).addcdiv_(m, v.sqrt().mul_(root).add_(table.epsilon), -step_size);
    if (is_coded) encode(m, v, 0, moments);
  }
  if (is_split) {
    split(parameters, {tensors.copy, tensors.low});
  } else if (tensors.copy.defined()) {
    tensors.copy.copy_(parameters);
  }
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
