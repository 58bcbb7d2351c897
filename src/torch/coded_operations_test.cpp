// Rows and products in fp8 on torch devices: the CPU against base/e4m3.h and float64, CUDA, where
// there is one with fp8, against the CPU.
#include "torch/coded_operations.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/e4m3.h"
#include "base/rng.h"
#include "torch/fp8_test_support.h"

namespace leeway {
namespace {

using at::Tensor;
using testing::fp8_devices;

Tensor random(std::vector<int64_t> shape, uint64_t seed, double deviation = 1.0) {
  Rng rng(seed);
  Tensor values = at::empty(shape, at::kFloat);
  float* to = values.data_ptr<float>();
  for (int64_t i = 0; i < values.numel(); ++i) to[i] = static_cast<float>(deviation * rng.normal());
  return values;
}

CodedTensor coded(const Tensor& x) {
  CodedTensor to = empty_coded(x.size(0), x.size(1), x.device());
  code_rows(x, to);
  return to;
}

void expect_same(const CodedTensor& got, const CodedTensor& expected) {
  EXPECT_TRUE(got.codes.to(at::kCPU).equal(expected.codes.to(at::kCPU)));
  EXPECT_TRUE(got.scales.to(at::kCPU).equal(expected.scales.to(at::kCPU)));
}

TEST(CodedOperations, RowsStandForTheirNumbersInBf16) {
  const Tensor x = random({9, 48}, 1, 3.0);
  const Tensor rounded = x.to(at::kBFloat16).to(at::kFloat);
  const CodedTensor expected = coded(x);
  for (int64_t row = 0; row < x.size(0); ++row) {
    uint8_t codes[48];
    const float scale = to_e4m3_row(rounded[row].data_ptr<float>(), 48, codes);
    EXPECT_EQ(expected.scales[row].item<float>(), scale);
    for (int64_t i = 0; i < 48; ++i) {
      EXPECT_EQ(expected.codes[row][i].item<uint8_t>(), codes[i]);
      EXPECT_EQ(decoded(expected)[row][i].item<float>(), from_e4m3(codes[i]) * scale);
    }
  }
  for (const at::Device device : fp8_devices()) {
    expect_same(coded(x.to(device)), expected);
    expect_same(coded(x.to(device, at::kBFloat16)), expected);
  }
}

TEST(CodedOperations, NormsAndSwiGluGiveTheCodesOfTheirResults) {
  for (const at::Device device : fp8_devices()) {
    const auto on = [&](const Tensor& x) { return x.to(device, at::kBFloat16); };
    const Tensor weight = on(random({64}, 2)), delta = on(random({5, 64}, 3));
    for (const bool kept : {false, true}) {
      Tensor x = on(random({5, 64}, 4)), sum = x.clone(), y = at::empty_like(x);
      Tensor also = kept ? at::empty_like(x) : Tensor();
      add_norm(sum, delta, weight, 1e-6, y);
      CodedTensor to = empty_coded(5, 64, device);
      add_norm_coded(x, delta, weight, 1e-6, also, to);
      EXPECT_TRUE(x.equal(sum));
      expect_same(to, coded(y));
      EXPECT_TRUE(!kept || also.equal(y));

      const Tensor gate_up = on(random({5, 128}, 5, 2.0));
      swiglu_rows(gate_up, y);
      Tensor s = kept ? at::empty_like(y) : Tensor();
      swiglu_rows_coded(gate_up, s, to);
      expect_same(to, coded(y));
      EXPECT_TRUE(!kept || s.equal(y));
    }
  }
}

TEST(CodedOperations, ProductsAreThoseOfWhatTheCodesStandFor) {
  for (const at::Device device : fp8_devices()) {
    const auto products = make_products(device);
    for (const auto& [rows, inputs, outputs] :
         std::vector<std::array<int64_t, 3>>{{1, 64, 48}, {7, 576, 32}, {70, 160, 176}}) {
      for (const bool biased : {false, true}) {
        SCOPED_TRACE(device.str() + " " + std::to_string(rows));
        const CodedTensor x = coded(random({rows, inputs}, 6).to(device));
        const CodedTensor weight = coded(random({outputs, inputs}, 7, 0.1).to(device));
        const Tensor bias = biased ? random({outputs}, 8).to(device, at::kBFloat16) : Tensor();
        // Waits for the codes: a product reads weights before the kernel before it is done.
        const Tensor a = decoded(x).to(at::kCPU, at::kDouble);
        const Tensor b = decoded(weight).to(at::kCPU, at::kDouble);
        Tensor y = at::empty({rows, outputs}, at::device(device).dtype(at::kBFloat16));
        project_coded(products.get(), x, weight, bias, y);
        Tensor expected = at::mm(a, b.t());
        if (biased) expected = expected + bias.to(at::kCPU, at::kDouble);
        // bf16 is within 2^-9 of a number; tensor cores lose less than 2^-12 of all magnitudes.
        const Tensor allowed = 0x1p-8 * expected.abs() + 0x1p-12 * at::mm(a.abs(), b.abs().t());
        const Tensor excess = (y.to(at::kCPU, at::kDouble) - expected).abs() - allowed;
        EXPECT_LE(excess.max().item<double>(), 0.0);
      }
    }
  }
}

}  // namespace
}  // namespace leeway
