#include "torch/split_masters.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "base/rng.h"
#include "cuda/split_float.h"
#include "torch/flat_adamw.h"
#include "torch/torch_decoder_test_support.h"

namespace leeway {
namespace {

using at::Tensor;
using testing::devices;
using testing::kFamilies;
using testing::random_parameters;
using testing::small_config;

SplitMasters room_for(const Tensor& full) {
  return {at::empty(full.sizes(), full.options().dtype(at::kBFloat16)),
          at::empty(full.sizes(), full.options().dtype(at::kShort))};
}

// Numbers of all sizes, with every kind of place between two bf16 numbers.
Tensor all_kinds() {
  std::vector<float> numbers = {0.0f, -0.0f, 1e-45f, -1e-40f, 1e-38f, 3.4e38f, -3.4e38f};
  Rng rng(3);
  for (int i = 0; i < 3000; ++i) {
    const auto high = static_cast<uint32_t>(rng.below(0x7f80)) << 16;
    const uint32_t sign = rng.uniform() < 0.5 ? 0x80000000u : 0u;
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      numbers.push_back(std::bit_cast<float>(sign | high | low));
    }
  }
  return at::tensor(numbers);
}

TEST(SplitMasters, AreTheNearestHalvesAndTheRestOfTheBits) {
  const Tensor full = all_kinds();
  for (const at::Device& device : devices()) {
    const Tensor there = full.to(device);
    const SplitMasters masters = room_for(there);
    split(there, masters);
    EXPECT_TRUE(masters.high.equal(there.to(at::kBFloat16))) << device.str();
    const Tensor back = joined(masters).cpu();
    for (int64_t i = 0; i < full.numel(); ++i) {
      const auto bits = std::bit_cast<uint32_t>(full.data_ptr<float>()[i]);
      const bool tie_to_lower = (bits & 0x1ffffu) == 0x8000u;
      EXPECT_EQ(std::bit_cast<uint32_t>(back.data_ptr<float>()[i]), bits - (tie_to_lower ? 1 : 0));
      const cuda::SplitFloat parts = cuda::split_bits(bits);
      EXPECT_EQ(cuda::joined_bits(parts), bits - (tie_to_lower ? 1 : 0));
      EXPECT_EQ(parts.low, masters.low.cpu().data_ptr<int16_t>()[i]) << std::hex << bits;
    }
    // Parts that begin and end anywhere.
    for (const auto& [begin, count] :
         {std::pair<int64_t, int64_t>{1, 1}, {2, 7}, {4, 1001}, {7, 0}}) {
      EXPECT_TRUE(joined(masters.part(begin, count)).cpu().equal(back.narrow(0, begin, count)))
          << device.str() << " " << begin;
    }
    const SplitMasters again = room_for(there);
    split(back.to(device), again);
    EXPECT_TRUE(again.high.equal(masters.high) && again.low.equal(masters.low)) << device.str();
  }
}

TEST(SplitMasters, WhatIsNotANumberStaysSo) {
  for (const uint32_t bits : {0x7fc00000u, 0x7fffffffu, 0xffffffffu, 0x7f800001u}) {
    const uint32_t back = cuda::joined_bits(cuda::split_bits(bits));
    EXPECT_TRUE(std::isnan(std::bit_cast<float>(back))) << std::hex << bits;
    const uint32_t half = static_cast<uint32_t>(cuda::split_bits(bits).high) << 16;
    EXPECT_TRUE(std::isnan(std::bit_cast<float>(half))) << std::hex << bits;
  }
  EXPECT_EQ(cuda::joined_bits(cuda::split_bits(0x7f800000u)), 0x7f800000u);
}

TEST(SplitMasters, GoToTheHostAndComeBack) {
  for (const at::Device& device : devices()) {
    for (const Family family : kFamilies) {
      const Parameters host = random_parameters(small_config(family), 5);
      const FlatLayout layout(host.config());
      const Tensor full = at::zeros({layout.size}, at::TensorOptions(device).dtype(at::kFloat));
      copy_to_flat(layout, host, full);
      const SplitMasters masters = room_for(full);
      copy_to_flat(layout, host, masters);
      EXPECT_TRUE(masters.high.equal(full.to(at::kBFloat16)));
      Parameters back(host.config()), again(host.config());
      copy_to_host(layout, masters, back);
      const SplitMasters second = room_for(full);
      copy_to_flat(layout, back, second);
      EXPECT_TRUE(second.high.equal(masters.high) && second.low.equal(masters.low));
      for (size_t i = 0; i < host.table().size(); ++i) {
        for (size_t k = 0; k < host.of(i).size(); ++k) {
          EXPECT_NEAR(back.of(i)[k], host.of(i)[k], 1.2e-7 * std::abs(host.of(i)[k]));
        }
      }
    }
  }
}

// A step over split weights is that over float32 ones, split afterwards.
TEST(SplitMasters, AStepIsThatOfFloat32Weights) {
  for (const at::Device& device : devices()) {
    for (const bool coded : {false, true}) {
      const int64_t decaying = 64 * 37, size = decaying + 67;
      const at::TensorOptions numbers = at::TensorOptions(device).dtype(at::kFloat);
      at::manual_seed(3);
      const Tensor start = at::randn({size}, numbers), g = at::randn({size}, numbers);
      SplitMasters masters = room_for(start);
      split(start, masters);
      OptimizerTable table;
      table.weight_decay = 0.3;
      FlatAdamW full, parts;
      for (FlatAdamW* step : {&full, &parts}) {
        step->gradients = g.clone(), step->decaying = decaying;
        const int64_t few = coded ? decaying : 0;
        step->moments.first = at::full({size - few}, 0.1, numbers);
        step->moments.second = at::full({size - few}, 0.2, numbers);
        if (!coded) continue;
        step->moments.first_codes = at::full({few}, 7, numbers.dtype(at::kChar));
        step->moments.second_codes = at::full({few}, 90, numbers.dtype(at::kByte));
        step->moments.first_scales = at::ones({(few + 255) / 256}, numbers);
        step->moments.second_scales = at::ones({(few + 255) / 256}, numbers);
      }
      full.parameters = joined(masters), full.copy = masters.high.clone();
      parts.copy = masters.high, parts.low = masters.low;
      for (int64_t step = 1; step <= 3; ++step) {
        adamw_step(full, table, step, 0.01, 0.5);
        adamw_step(parts, table, step, 0.01, 0.5);
        EXPECT_TRUE(masters.high.equal(full.copy)) << device.str() << coded;
        // But for a tie, of which there is none here.
        EXPECT_TRUE(joined(masters).equal(full.parameters)) << device.str() << coded;
      }
    }
  }
}

}  // namespace
}  // namespace leeway
