// The steps between products, on every device and in every type, against float64.

#include "torch/layer_rows.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>

#include "torch/compat.h"

namespace leeway {
namespace {

using torch::Tensor;

std::vector<torch::Device> devices() {
  std::vector<torch::Device> list = {at::kCPU};
  if (at::hasCUDA()) list.emplace_back(at::kCUDA, 0);
  return list;
}

Tensor numbers(std::vector<int64_t> sizes, double step) {
  int64_t count = 1;
  for (int64_t size : sizes) count *= size;
  return (at::arange(count, at::kDouble) * step).sin().view(sizes);
}

double difference(const Tensor& a, const Tensor& b) {
  return ((a - b).norm() / (b.norm() + 1e-30)).item<double>();
}

// What `step` gives and its gradients, in float64 on the CPU.
std::vector<Tensor> outcome(const std::function<Tensor(const std::vector<Tensor>&)>& step,
                            const std::vector<Tensor>& inputs, const at::TensorOptions& options) {
  std::vector<Tensor> leaves;
  for (const Tensor& input : inputs) leaves.push_back(input.to(options).requires_grad_());
  const Tensor y = step(leaves);
  std::vector<Tensor> results =
      torch::autograd::grad({y}, leaves, {numbers(y.sizes().vec(), 0.9).to(options)});
  results.push_back(y.detach());
  for (Tensor& result : results) result = result.to(at::kCPU).to(at::kDouble);
  return results;
}

void expect_same_everywhere(const std::string& name,
                            const std::function<Tensor(const std::vector<Tensor>&)>& step,
                            const std::vector<Tensor>& inputs) {
  const std::vector<Tensor> expected = outcome(step, inputs, at::kDouble);
  for (const torch::Device& device : devices()) {
    for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kDouble}) {
      const auto got = outcome(step, inputs, at::TensorOptions(device).dtype(type));
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_LT(difference(got[i], expected[i]), type == at::kBFloat16 ? 5e-2 : 1e-5)
            << name << " on " << device << " in " << type << ", result " << i;
      }
    }
  }
}

TEST(LayerRows, NormsAreTheSameEverywhere) {
  // Widths of whole and of partial vectors, less than a warp and several rounds.
  for (const int64_t width : {5, 8, 128, 777, 1024}) {
    expect_same_everywhere("norm of " + std::to_string(width),
                           [](const std::vector<Tensor>& x) { return rms_norm(x[0], x[1], 1e-5); },
                           {numbers({3, 7, width}, 0.37), 1.0 + 0.3 * numbers({width}, 0.5)});
  }
}

TEST(LayerRows, TurnsAreTheSameEverywhere) {
  for (const int64_t head_dim : {2, 6, 16, 128}) {
    const Tensor angles = (numbers({20, head_dim / 2}, 1.3) * 3.0).to(at::kFloat);
    const Tensor positions = at::arange(9, at::kInt) * 2 + 1;
    expect_same_everywhere("turn of " + std::to_string(head_dim),
                           [&](const std::vector<Tensor>& x) {
                             TorchRopeTable table;
                             table.cosines = angles.cos().to(x[0].device());
                             table.sines = angles.sin().to(x[0].device());
                             return rope(x[0], positions.to(x[0].device()), table);
                           },
                           {numbers({9, 3, head_dim}, 0.37)});
  }
}

TEST(LayerRows, GatesAreTheSameEverywhere) {
  for (const int64_t width : {1, 7, 64, 1000}) {
    expect_same_everywhere("gate of " + std::to_string(width),
                           [](const std::vector<Tensor>& x) { return swiglu(x[0], x[1]); },
                           {numbers({5, width}, 0.37) * 4.0, numbers({5, width}, 0.61)});
  }
}

TEST(LayerRows, TheNormsGradientInWordsIsAutograds) {
  const Tensor x = numbers({4, 6, 12}, 0.37).to(at::kFloat).requires_grad_();
  const Tensor weight = (1.0 + 0.3 * numbers({12}, 0.5)).to(at::kFloat).requires_grad_();
  const Tensor d_y = numbers({4, 6, 12}, 0.9).to(at::kFloat);
  const auto expected = torch::autograd::grad({rms_norm(x, weight, 1e-5)}, {x, weight}, {d_y});
  const at::NoGradGuard guard;
  const Tensor inverse = at::rsqrt(x.square().mean(-1, true) + 1e-5);
  const auto [d_x, d_weight] = rms_norm_backward(d_y, x, weight, inverse);
  EXPECT_LT(difference(d_x, expected[0]), 1e-5);
  EXPECT_LT(difference(d_weight, expected[1]), 1e-5);
}

}  // namespace
}  // namespace leeway
