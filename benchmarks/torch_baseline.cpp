#include "torch_baseline.h"

#include <torch/torch.h>

namespace leeway {

struct TorchBaseline::Impl {
  std::vector<int64_t> offsets;
  at::Tensor pi, rollout, advantages, mask;
  double tokens = 0.0;
};

TorchBaseline::TorchBaseline(const std::vector<int64_t>& offsets, const std::vector<float>& pi,
                             const std::vector<float>& rollout,
                             const std::vector<float>& advantages, const std::vector<uint8_t>& mask,
                             int threads)
    : impl_(std::make_unique<Impl>()) {
  at::set_num_threads(threads);
  auto copy = [](const std::vector<float>& v) {
    return torch::tensor(at::ArrayRef<float>(v), torch::kFloat32);
  };
  impl_->offsets = offsets;
  impl_->pi = copy(pi).set_requires_grad(true);
  impl_->rollout = copy(rollout);
  impl_->advantages = copy(advantages);
  impl_->mask = torch::tensor(at::ArrayRef<uint8_t>(mask)).to(torch::kBool);
  impl_->tokens = impl_->mask.sum().item<double>();
}

TorchBaseline::~TorchBaseline() = default;

namespace {

struct Pieces {
  at::Tensor loss, ratio, x, dropped, low, high, keep;
};

Pieces icepop(const at::Tensor& pi, const at::Tensor& rollout, const at::Tensor& advantages,
              const at::Tensor& mask, double tokens) {
  Pieces p;
  const at::Tensor log_ratio = pi - rollout;
  const at::Tensor ratio = torch::exp(log_ratio);
  p.ratio = ratio.detach();
  p.x = log_ratio.detach();
  p.low = p.ratio < 0.2;
  p.high = p.ratio > 5.0;
  p.dropped = p.low | p.high;
  p.keep = mask & p.dropped.logical_not();
  p.loss = (-(p.keep * advantages * ratio)).sum() / tokens;
  return p;
}

at::Tensor mean(const at::Tensor& value, const at::Tensor& mask) {
  return (value * mask).sum() / mask.sum().clamp_min(1);
}

void prime_metrics(const Pieces& p, const at::Tensor& mask) {
  torch::NoGradGuard guard;
  const at::Tensor kl = torch::expm1(p.x) - p.x;
  mean(kl, mask);
  mean(kl, mask & p.dropped);
  mean(kl, p.keep);
  mean(p.dropped.to(torch::kFloat32), mask);
  mean(p.low.to(torch::kFloat32), mask);
  mean(p.high.to(torch::kFloat32), mask);
}

void further_metrics(const Pieces& p, const at::Tensor& mask, const at::Tensor& advantages) {
  torch::NoGradGuard guard;
  const at::Tensor kl = torch::expm1(p.x) - p.x;
  const at::Tensor positive = mask & (advantages > 0), negative = mask & (advantages < 0);
  mean(kl, positive);
  mean(kl, negative);
  (kl * mask).max();
  mean(p.dropped.to(torch::kFloat32), positive);
  mean(p.dropped.to(torch::kFloat32), negative);
  mean(p.x.abs(), mask);
  const at::Tensor trained = p.ratio.masked_select(mask);
  trained.sum();
  trained.min();
  trained.max();
  trained.square().sum();
  torch::kthvalue(trained, static_cast<int64_t>(0.99 * static_cast<double>(trained.numel())));
  const at::Tensor coefficient = p.ratio * p.keep;
  coefficient.sum();
  coefficient.square().sum();
}

}  // namespace

double TorchBaseline::flat(bool all_metrics) {
  const Pieces p = icepop(impl_->pi, impl_->rollout, impl_->advantages, impl_->mask, impl_->tokens);
  p.loss.backward();
  prime_metrics(p, impl_->mask);
  if (all_metrics) further_metrics(p, impl_->mask, impl_->advantages);
  impl_->pi.mutable_grad().reset();
  return p.loss.item<double>();
}

double TorchBaseline::by_sequence() {
  at::Tensor total = torch::zeros({});
  for (size_t s = 0; s + 1 < impl_->offsets.size(); ++s) {
    const int64_t begin = impl_->offsets[s], end = impl_->offsets[s + 1];
    const at::Tensor mask = impl_->mask.slice(0, begin, end);
    const Pieces p = icepop(impl_->pi.slice(0, begin, end), impl_->rollout.slice(0, begin, end),
                            impl_->advantages.slice(0, begin, end), mask, impl_->tokens);
    prime_metrics(p, mask);
    total = total + p.loss;
  }
  total.backward();
  impl_->pi.mutable_grad().reset();
  return total.item<double>();
}

}  // namespace leeway
