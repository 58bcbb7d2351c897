// Products on a GPU: a row's bits do not depend on the rows beside it.
#include "cuda/products.h"

#include <cuda_bf16.h>

#include <cmath>
#include <cstring>

#include "base/rng.h"
#include "cuda/few_row_products.h"
#include "cuda/gpu_test_support.h"
#include "cuda/norm_rope_swiglu.h"

namespace leeway::cuda {
namespace {

using Numbers = std::vector<__nv_bfloat16>;

Numbers random_numbers(int64_t count, Rng& rng) {
  Numbers numbers(static_cast<size_t>(count));
  for (auto& number : numbers) {
    number = __float2bfloat16(static_cast<float>(2.0 * rng.uniform() - 1.0));
  }
  return numbers;
}

struct Shape {
  int64_t outputs, inputs;
};
// Of Qwen3 0.6 B, SmolLM2 135 M and Qwen2.5 0.5 B, and some that no tile divides.
const std::vector<Shape> kShapes = {
    {4096, 1024}, {1024, 2048}, {6144, 1024}, {1024, 3072}, {960, 576},   {576, 576},
    {3072, 576},  {576, 1536},  {1000, 200},  {24, 40},     {8192, 1024}, {1152, 896},
    {896, 896},   {4864, 896},  {896, 2432},  {896, 4864},  {5008, 896}};
// As a low-rank adapter's first matrices.
const std::vector<Shape> kNarrowShapes = {{48, 1024}, {16, 2048}, {24, 576},  {8, 1536},
                                          {32, 896},  {48, 4096}, {16, 14336}};
constexpr int64_t kMostRows = 4096;

template <class T>
std::vector<T> project(Products& products, const Numbers& x, int64_t rows, const Shape& shape,
                       const DeviceArray<__nv_bfloat16>& weight,
                       const DeviceArray<__nv_bfloat16>* bias, bool weight_by_inputs = false) {
  const std::span<const __nv_bfloat16> rows_of_x(x.data(),
                                                 static_cast<size_t>(rows * shape.inputs));
  const DeviceArray<__nv_bfloat16> some(rows_of_x);
  const DeviceArray<T> y(static_cast<size_t>(rows * shape.outputs));
  Projection p;
  p.y_type = sizeof(T) == 4 ? Dtype::float32 : Dtype::bf16;
  p.rows = rows, p.inputs = shape.inputs, p.outputs = shape.outputs;
  p.x = some.data(), p.weight = weight.data(), p.y = y.data();
  p.weight_by_inputs = weight_by_inputs;
  if (bias != nullptr) p.bias = bias->data();
  products.project(p, nullptr);
  return y.values();
}

TEST(Products, ARowHasTheSameBitsWithAnyNumberOfRows) {
  LEEWAY_NEEDS_GPU();
  Products products;
  int64_t compared = 0;
  std::vector<Shape> shapes = kShapes;
  shapes.insert(shapes.end(), kNarrowShapes.begin(), kNarrowShapes.end());
  for (const Shape& shape : shapes) {
    Rng rng(1);
    const Numbers x = random_numbers(kMostRows * shape.inputs, rng);
    const DeviceArray<__nv_bfloat16> weight(random_numbers(shape.outputs * shape.inputs, rng));
    const DeviceArray<__nv_bfloat16> bias(random_numbers(shape.outputs, rng));
    for (const bool biased : {false, true}) {
      const auto* with = biased ? &bias : nullptr;
      const Numbers all = project<__nv_bfloat16>(products, x, kMostRows, shape, weight, with);
      for (const int64_t rows : {1,  2,  3,  4,  7,   8,   16,  17,  24,  32,  33,   40,  47,
                                 48, 56, 64, 96, 128, 200, 256, 300, 512, 700, 1024, 3000}) {
        const Numbers some = project<__nv_bfloat16>(products, x, rows, shape, weight, with);
        EXPECT_EQ(std::memcmp(some.data(), all.data(), some.size() * 2), 0)
            << rows << " rows of [" << shape.outputs << ", " << shape.inputs << "]"
            << (biased ? " with bias" : "");
        compared += rows;
      }
    }
    // Float32 results are what the bf16 ones are rounded from.
    const Numbers narrow = project<__nv_bfloat16>(products, x, 512, shape, weight, nullptr);
    for (const int64_t rows : {1, 8, 64, 512}) {
      const std::vector<float> wide = project<float>(products, x, rows, shape, weight, nullptr);
      int64_t different = 0;
      for (size_t i = 0; i < wide.size(); ++i) {
        const __nv_bfloat16 rounded = __float2bfloat16(wide[i]);
        different += std::memcmp(&rounded, &narrow[i], 2) != 0;
      }
      EXPECT_EQ(different, 0) << rows << " rows of [" << shape.outputs << ", " << shape.inputs
                              << "]";
      compared += rows;
    }
  }
  std::printf("%lld rows compared\n", static_cast<long long>(compared));
}

// As gradients by inputs are made.
TEST(Products, WithTheWeightByInputsHaveTheBitsOfItsTranspose) {
  LEEWAY_NEEDS_GPU();
  Products products;
  for (const Shape& shape : {Shape{1024, 4096}, Shape{2048, 1024}, Shape{3072, 1024}, {24, 40}}) {
    Rng rng(3);
    const Numbers x = random_numbers(kMostRows * shape.inputs, rng);
    const Numbers weight = random_numbers(shape.outputs * shape.inputs, rng);
    Numbers turned(weight.size());
    for (int64_t o = 0; o < shape.outputs; ++o) {
      for (int64_t i = 0; i < shape.inputs; ++i) {
        turned[static_cast<size_t>(i * shape.outputs + o)] =
            weight[static_cast<size_t>(o * shape.inputs + i)];
      }
    }
    const DeviceArray<__nv_bfloat16> by_outputs(weight), by_inputs(turned);
    for (const int64_t rows : {int64_t{1}, int64_t{24}, int64_t{300}, kMostRows}) {
      const Numbers expected =
          project<__nv_bfloat16>(products, x, rows, shape, by_outputs, nullptr);
      const Numbers got =
          project<__nv_bfloat16>(products, x, rows, shape, by_inputs, nullptr, true);
      EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * 2), 0)
          << rows << " rows of [" << shape.outputs << ", " << shape.inputs << "]";
    }
  }
}

TEST(Products, GatedRowsHaveTheBitsOfAProductAndSwiGlu) {
  LEEWAY_NEEDS_GPU();
  Products products;
  for (const Shape& shape : kShapes) {
    if (shape.outputs % 16 != 0) continue;
    Rng rng(3);
    const Numbers x = random_numbers(kMostFewRows * shape.inputs, rng);
    const DeviceArray<__nv_bfloat16> weight(random_numbers(shape.outputs * shape.inputs, rng));
    for (const int64_t rows : {1, 2, 8, 24, 64, 65, 128, 200, 256}) {
      const Numbers both = project<__nv_bfloat16>(products, x, rows, shape, weight, nullptr);
      const DeviceArray<__nv_bfloat16> gate_up(both);
      const int64_t half = shape.outputs / 2;
      const DeviceArray<__nv_bfloat16> in_two(static_cast<size_t>(rows * half));
      swiglu(Dtype::bf16, gate_up.data(), gate_up.data() + half, shape.outputs, rows, half,
             in_two.data(), nullptr);
      const DeviceArray<__nv_bfloat16> on_device(
          std::span<const __nv_bfloat16>(x.data(), static_cast<size_t>(rows * shape.inputs)));
      const DeviceArray<__nv_bfloat16> in_one(static_cast<size_t>(rows * half));
      Projection p;
      p.rows = rows, p.inputs = shape.inputs, p.outputs = shape.outputs;
      p.x = on_device.data(), p.weight = weight.data(), p.y = in_one.data();
      if (rows <= 128 && !has_gated_few_row_kernel(p)) {
        GTEST_SKIP() << "no GPU of compute capability 9.0";
      }
      project_few_rows_gated(p, nullptr);
      const Numbers wanted = in_two.values(), got = in_one.values();
      EXPECT_EQ(std::memcmp(got.data(), wanted.data(), got.size() * 2), 0)
          << rows << " rows of [" << shape.outputs << ", " << shape.inputs << "]";
    }
  }
}

TEST(Products, EqualADotProductInDouble) {
  LEEWAY_NEEDS_GPU();
  Products products;
  const Shape shape{24, 40};
  Rng rng(2);
  const Numbers x = random_numbers(5 * shape.inputs, rng);
  const Numbers weight = random_numbers(shape.outputs * shape.inputs, rng);
  const Numbers bias = random_numbers(shape.outputs, rng);
  const DeviceArray<__nv_bfloat16> on_device(weight), bias_on_device(bias);
  const Numbers y = project<__nv_bfloat16>(products, x, 5, shape, on_device, &bias_on_device);
  for (int64_t row = 0; row < 5; ++row) {
    for (int64_t o = 0; o < shape.outputs; ++o) {
      double sum = __bfloat162float(bias[static_cast<size_t>(o)]);
      for (int64_t i = 0; i < shape.inputs; ++i) {
        sum += double{__bfloat162float(x[static_cast<size_t>(row * shape.inputs + i)])} *
               double{__bfloat162float(weight[static_cast<size_t>(o * shape.inputs + i)])};
      }
      const double got = __bfloat162float(y[static_cast<size_t>(row * shape.outputs + o)]);
      EXPECT_NEAR(got, sum, 0.005 * std::abs(sum) + 1e-4);
    }
  }
}

}  // namespace
}  // namespace leeway::cuda
