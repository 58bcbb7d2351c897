// Moments as codes: the map against a search over all codes, what is stored and read again, and
// steps with them against the formula in double.

#include "torch/flat_moments.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/rng.h"
#include "cuda/moment_codes.h"
#include "torch/flat_adamw.h"
#include "torch/torch_decoder_test_support.h"

namespace leeway {
namespace {

using at::Tensor;
using cuda::kMomentBlock;
using testing::devices;
using testing::kFamilies;
using testing::small_config;

// The code whose value is nearest in the root, by trying all of them.
int nearest_first_code(double m, double scale) {
  int best = 0;
  const auto root = [&](double x) { return std::copysign(std::sqrt(std::abs(x) / scale), x); };
  for (int code = -127; code <= 127; ++code) {
    if (std::abs(code / 127.0 - root(m)) < std::abs(best / 127.0 - root(m))) best = code;
  }
  return best;
}
int nearest_second_code(double v, double scale) {
  int best = v > 0.0 ? 1 : 0;
  const double root = std::pow(v / scale, 0.25);
  for (int code = best; code <= 255; ++code) {
    if (std::abs(code / 255.0 - root) < std::abs(best / 255.0 - root)) best = code;
  }
  return best;
}

TEST(MomentCodes, AreTheNearestInTheRoot) {
  Rng rng(3);
  for (const float scale : {1e-30f, 3.7e-9f, 1.0f, 2.5e11f}) {
    for (int k = 0; k < 2000; ++k) {
      const double share = std::pow(10.0, -6.0 * rng.uniform());
      const double sign = rng.uniform() < 0.5 ? -1.0 : 1.0;
      const auto m = static_cast<float>(sign * share * scale);
      const auto v = static_cast<float>(share * share * scale);
      // A number between two codes may fall to either, by the rounding of the roots.
      EXPECT_NEAR(cuda::first_moment_code(m, scale), nearest_first_code(m, scale),
                  k % 100 == 0 ? 1 : 0)
          << m << " of " << scale;
      EXPECT_NEAR(cuda::second_moment_code(v, scale), nearest_second_code(v, scale),
                  k % 100 == 0 ? 1 : 0)
          << v << " of " << scale;
    }
  }
}

TEST(MomentCodes, KnowALargeShareOfTheScaleWell) {
  for (double share = 1e-2; share <= 1.0; share *= 1.01) {
    const auto x = static_cast<float>(share);
    // Half a step of a root near c is 1 / 2c of it: twice that for a square, four times for v.
    const double c = 127.0 * std::sqrt(share), d = 255.0 * std::pow(share, 0.25);
    EXPECT_NEAR(cuda::first_moment_of(cuda::first_moment_code(x, 1.0f), 1.0f), x, 1.1 * x / c);
    EXPECT_NEAR(cuda::second_moment_of(cuda::second_moment_code(x, 1.0f), 1.0f), x, 2.2 * x / d);
  }
}

TEST(MomentCodes, ASecondMomentAboveZeroStaysAboveZero) {
  for (const float v : {1e-45f, 1e-38f, 1e-20f, 1e-3f}) {
    EXPECT_GE(cuda::second_moment_code(v, 1.0f), 1) << v;
    const float scale = cuda::second_moment_scale(v);
    EXPECT_GT(cuda::second_moment_of(cuda::second_moment_code(v, scale), scale), 0.0f) << v;
  }
  EXPECT_EQ(cuda::second_moment_code(0.0f, 1.0f), 0);
  EXPECT_EQ(cuda::second_moment_code(0.0f, 0.0f), 0);
  EXPECT_EQ(cuda::first_moment_code(0.0f, 0.0f), 0);
}

FlatMoments coded_moments(int64_t count, at::Device device) {
  const at::TensorOptions numbers = at::TensorOptions(device).dtype(at::kFloat);
  FlatMoments moments;
  moments.first = at::zeros({0}, numbers), moments.second = at::zeros({0}, numbers);
  moments.first_codes = at::zeros({count}, numbers.dtype(at::kChar));
  moments.second_codes = at::zeros({count}, numbers.dtype(at::kByte));
  moments.first_scales = at::zeros({cuda::moment_blocks(count)}, numbers);
  moments.second_scales = at::zeros({cuda::moment_blocks(count)}, numbers);
  return moments;
}

void expect_same(const FlatMoments& a, const FlatMoments& b, const std::string& where) {
  EXPECT_TRUE(a.first_codes.equal(b.first_codes)) << where;
  EXPECT_TRUE(a.second_codes.equal(b.second_codes)) << where;
  EXPECT_TRUE(a.first_scales.equal(b.first_scales)) << where;
  EXPECT_TRUE(a.second_scales.equal(b.second_scales)) << where;
}

TEST(FlatMoments, WhatIsDecodedIsEncodedToTheSameCodes) {
  for (const at::Device& device : devices()) {
    for (const int64_t count : {int64_t{1}, int64_t{255}, int64_t{256}, int64_t{256 * 40 + 67}}) {
      at::manual_seed(count);
      const at::TensorOptions numbers = at::TensorOptions(device).dtype(at::kFloat);
      // Blocks of all sizes, down to what is subnormal, and some of zeros.
      const Tensor sizes = at::pow(10.0, at::rand({cuda::moment_blocks(count)}, numbers) * 60 - 42)
                               .repeat_interleave(kMomentBlock)
                               .narrow(0, 0, count);
      const Tensor m = at::randn({count}, numbers) * sizes * (sizes > 1e-40);
      const Tensor v = (at::randn({count}, numbers) * sizes).square() * (sizes > 1e-15);
      const FlatMoments once = coded_moments(count, device), again = coded_moments(count, device);
      encode(m, v, 0, once);
      const auto [first, second] = decoded(once, 0, count);
      encode(first, second, 0, again);
      expect_same(again, once, device.str() + " " + std::to_string(count));
      EXPECT_TRUE((second > 0).equal(v > 0));
    }
  }
}

TEST(FlatMoments, KernelsGiveTheCodesOfThePlainLoop) {
  for (const at::Device& device : devices()) {
    const int64_t count = 256 * 9 + 31;
    at::manual_seed(5);
    const Tensor m = at::randn({count}), v = at::randn({count}).square();
    const FlatMoments expected = coded_moments(count, at::kCPU);
    const FlatMoments got = coded_moments(count, device);
    encode(m, v, 0, expected);
    encode(m.to(device), v.to(device), 0, got);
    // A GPU's root is off by an ulp now and then, which puts a number that lies between two codes
    // to the other one: of 2335 that happens to none or one, and to no more than five.
    const auto expect_codes = [&](const Tensor& a, const Tensor& b, const char* name) {
      const Tensor apart = (a.cpu().to(at::kInt) - b.cpu().to(at::kInt)).abs();
      EXPECT_LE(apart.max().item<int>(), device.is_cuda() ? 1 : 0) << device.str() << name;
      EXPECT_LE(apart.sum().item<int>(), 5) << device.str() << name;
    };
    expect_codes(got.first_codes, expected.first_codes, " first");
    expect_codes(got.second_codes, expected.second_codes, " second");
    EXPECT_TRUE(got.first_scales.cpu().equal(expected.first_scales)) << device.str();
    EXPECT_TRUE(got.second_scales.cpu().equal(expected.second_scales)) << device.str();
  }
}

TEST(FlatMoments, AStepIsTheFormulaOfWhatIsStored) {
  for (const at::Device& device : devices()) {
    const int64_t decaying = 64 * 37, size = decaying + 64 * 3;
    const at::TensorOptions numbers = at::TensorOptions(device).dtype(at::kFloat);
    at::manual_seed(3);
    FlatAdamW tensors;
    tensors.parameters = at::randn({size}, numbers), tensors.gradients = at::randn({size}, numbers);
    tensors.copy = at::zeros({size}, numbers.dtype(at::kBFloat16));
    tensors.decaying = decaying;
    tensors.moments = coded_moments(decaying, device);
    tensors.moments.first = at::randn({size - decaying}, numbers);
    tensors.moments.second = at::rand({size - decaying}, numbers);
    encode(at::randn({decaying}, numbers), at::rand({decaying}, numbers), 0, tensors.moments);
    const auto wide = [](const Tensor& x) { return x.to(at::kCPU, at::kDouble, false, true); };
    const auto moment = [&](bool second) {
      const auto [m, v] = decoded(tensors.moments, 0, decaying);
      return at::cat(
          {wide(second ? v : m), wide(second ? tensors.moments.second : tensors.moments.first)});
    };
    Tensor p = wide(tensors.parameters), m = moment(false), v = moment(true);
    OptimizerTable table;
    table.weight_decay = 0.3;
    const double rate = 0.01, scale = 0.25;
    const int64_t step = 3;
    const Tensor g = wide(tensors.gradients) * scale;
    m.mul_(table.beta1).add_(g, 1.0 - table.beta1);
    v.mul_(table.beta2).add_(g * g, 1.0 - table.beta2);
    p.narrow(0, 0, decaying).mul_(1.0 - rate * table.weight_decay);
    p -= rate * (m / (1.0 - std::pow(table.beta1, step))) /
         ((v / (1.0 - std::pow(table.beta2, step))).sqrt() + table.epsilon);

    adamw_step(tensors, table, step, rate, scale);
    EXPECT_LT((wide(tensors.parameters) - p).abs().max().item<double>(), 1e-5) << device.str();
    EXPECT_TRUE(tensors.copy.equal(tensors.parameters.to(at::kBFloat16))) << device.str();
    // Stored: within half a step of the root, 1/254 and 1/510 of its largest.
    const auto far = [](const Tensor& got, const Tensor& wanted, double power) {
      const auto root = [&](const Tensor& x) { return x.sign() * x.abs().pow(power); };
      return ((root(got) - root(wanted)).abs() / wanted.abs().max().pow(power)).max();
    };
    EXPECT_LT(
        far(moment(false).narrow(0, 0, decaying), m.narrow(0, 0, decaying), 0.5).item<double>(),
        1.01 / 254.0)
        << device.str();
    EXPECT_LT(
        far(moment(true).narrow(0, 0, decaying), v.narrow(0, 0, decaying), 0.25).item<double>(),
        1.01 / 510.0)
        << device.str();
  }
}

bool same(const Parameters& a, const Parameters& b) {
  for (size_t i = 0; i < a.table().size(); ++i) {
    if (!std::ranges::equal(a.of(i), b.of(i))) return false;
  }
  return true;
}

TEST(FlatMoments, GoToTheHostAndComeBackWithTheSameBits) {
  for (const at::Device& device : devices()) {
    for (const Family family : kFamilies) {
      const FlatLayout layout(small_config(family));
      for (const OptimizerState state : {OptimizerState::float32, OptimizerState::int8}) {
        const FlatMoments there = make_moments(layout, device, state);
        const bool coded = state == OptimizerState::int8;
        EXPECT_EQ(there.coded(), coded ? layout.decaying : 0);
        EXPECT_EQ(there.first.numel(), layout.size - there.coded());
        AdamW host(layout.config), again(layout.config);
        Rng rng(7);
        for (float& m : host.first_moment().flat()) m = static_cast<float>(rng.normal());
        for (float& v : host.second_moment().flat()) v = static_cast<float>(rng.uniform());
        copy_to_flat(layout, host, there);
        copy_to_host(layout, there, again);
        EXPECT_EQ(same(again.first_moment(), host.first_moment()), !coded);
        EXPECT_EQ(same(again.second_moment(), host.second_moment()), !coded);
        const FlatMoments back = make_moments(layout, device, state);
        copy_to_flat(layout, again, back);
        EXPECT_TRUE(back.first.equal(there.first) && back.second.equal(there.second));
        if (coded) expect_same(back, there, device.str());
        const FlatMoments copy = there.clone();
        if (coded) expect_same(copy, there, device.str());
        EXPECT_TRUE(copy.first.equal(there.first));
        EXPECT_NE(copy.first.data_ptr(), there.first.data_ptr());
      }
    }
  }
}

}  // namespace
}  // namespace leeway
