// Rows as codes and products of them on a GPU, against base/e4m3.h: the same codes, sums within
// what tensor cores lose, and a row's bits do not depend on the rows beside it.
#include "cuda/coded_products.h"

#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/e4m3.h"
#include "base/rng.h"
#include "cuda/coded_rows.h"
#include "cuda/gpu_test_support.h"
#include "cuda/norm_rope_swiglu.h"

namespace leeway::cuda {
namespace {

using Bf16 = __nv_bfloat16;
using Numbers = std::vector<Bf16>;
using Codes = std::vector<uint8_t>;

// FP8 begins with compute capability 8.9.
bool has_fp8() {
  int device = 0, major = 0, minor = 0;
  check_cuda(cudaGetDevice(&device), "the current device");
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return 10 * major + minor >= 89;
}
#define LEEWAY_NEEDS_FP8() \
  LEEWAY_NEEDS_GPU();      \
  if (!has_fp8()) GTEST_SKIP() << "no GPU with products in fp8"

Numbers random_numbers(int64_t count, Rng& rng, double size = 1.0) {
  Numbers numbers(static_cast<size_t>(count));
  for (Bf16& number : numbers) number = __float2bfloat16(static_cast<float>(size * rng.normal()));
  return numbers;
}

// ---------------------------------------------------------------------------------------------
// Rows

struct Coded {
  Codes codes;
  std::vector<float> scales;
};

// What `make` leaves in rows of codes.
template <class Make>
Coded coded_by(int64_t rows, int64_t width, const Make& make) {
  const DeviceArray<uint8_t> codes(static_cast<size_t>(rows * width));
  const DeviceArray<float> scales(static_cast<size_t>(rows));
  make(CodedRows{rows, width, codes.data(), scales.data()});
  return {codes.values(), scales.values()};
}

template <class T>
Coded coded(const std::vector<T>& numbers, int64_t rows, int64_t width) {
  const DeviceArray<T> x(numbers);
  return coded_by(rows, width, [&](const CodedRows& to) {
    code_rows(sizeof(T) == 4 ? Dtype::float32 : Dtype::bf16, x.data(), to, nullptr);
  });
}

Coded coded_by_host(const std::vector<float>& numbers, int64_t rows, int64_t width) {
  Coded result{Codes(numbers.size()), std::vector<float>(static_cast<size_t>(rows))};
  std::vector<float> row(static_cast<size_t>(width));
  for (int64_t i = 0; i < rows; ++i) {
    const auto begin = static_cast<size_t>(i * width);
    for (size_t k = 0; k < row.size(); ++k) {
      row[k] = __bfloat162float(__float2bfloat16(numbers[begin + k]));
    }
    result.scales[static_cast<size_t>(i)] =
        to_e4m3_row(row.data(), width, result.codes.data() + begin);
  }
  return result;
}

void expect_same(const Coded& got, const Coded& expected) {
  ASSERT_EQ(got.codes.size(), expected.codes.size());
  size_t different = 0, first = 0;
  for (size_t i = 0; i < got.codes.size(); ++i) {
    if (got.codes[i] == expected.codes[i]) continue;
    if (different++ == 0) first = i;
  }
  EXPECT_EQ(different, 0u) << "code " << first << ": " << int{got.codes[first]} << " instead of "
                           << int{expected.codes[first]};
  EXPECT_EQ(
      std::memcmp(got.scales.data(), expected.scales.data(), got.scales.size() * sizeof(float)), 0);
}

const std::vector<int64_t> kWidths = {16, 64, 240, 576, 1024, 1536, 3072, 4096, 12288, 28672};

TEST(CodedRows, AreTheHosts) {
  LEEWAY_NEEDS_GPU();
  for (const int64_t width : kWidths) {
    SCOPED_TRACE(width);
    constexpr int64_t kRows = 37;
    Rng rng(1);
    std::vector<float> numbers(static_cast<size_t>(kRows * width));
    for (size_t i = 0; i < numbers.size(); ++i) {
      // Rows of every size; within a row from its largest number to what becomes zero.
      const double size = std::exp2(static_cast<double>(i / static_cast<size_t>(width)) - 18.0);
      numbers[i] = static_cast<float>(size * rng.normal() * std::exp2(-14.0 * rng.uniform()));
    }
    const auto row = [&](int64_t i) { return numbers.data() + i * width; };
    std::fill(row(3), row(4), 0.0f);
    std::fill(row(4), row(5), 1e-38f);
    row(5)[7] = std::numeric_limits<float>::quiet_NaN();
    row(6)[9] = std::numeric_limits<float>::infinity();
    std::fill(row(7), row(8), std::numeric_limits<float>::quiet_NaN());
    row(8)[width - 1] = -3e38f;
    const Coded expected = coded_by_host(numbers, kRows, width);
    expect_same(coded(numbers, kRows, width), expected);
    Numbers narrow(numbers.size());
    std::transform(numbers.begin(), numbers.end(), narrow.begin(),
                   [](float x) { return __float2bfloat16(x); });
    expect_same(coded(narrow, kRows, width), expected);
  }
}

TEST(CodedRows, OfANormAreThoseOfItsResult) {
  LEEWAY_NEEDS_GPU();
  for (const int64_t width : kWidths) {
    for (const bool with_delta : {false, true}) {
      SCOPED_TRACE(width);
      constexpr int64_t kRows = 29;
      Rng rng(2);
      const Numbers x = random_numbers(kRows * width, rng);
      const DeviceArray<Bf16> delta(random_numbers(kRows * width, rng));
      const DeviceArray<Bf16> weight(random_numbers(width, rng)), y(x.size()), also(x.size());
      const DeviceArray<Bf16> in_two(x), in_one(x);
      RmsNorm norm;
      norm.rows = kRows, norm.width = width, norm.eps = 1e-6f;
      norm.weight = weight.data();
      if (with_delta) norm.delta = delta.data();
      norm.x = norm.sum = in_two.data(), norm.y = y.data();
      rms_norm(Dtype::bf16, norm, nullptr);
      const Coded expected = coded(y.values(), kRows, width);
      for (Bf16* to : {also.data(), static_cast<Bf16*>(nullptr)}) {
        const DeviceArray<Bf16> sum(x);
        norm.x = norm.sum = sum.data(), norm.y = to;
        expect_same(coded_by(kRows, width,
                             [&](const CodedRows& rows) { code_normed_rows(norm, rows, nullptr); }),
                    expected);
        EXPECT_EQ(std::memcmp(sum.values().data(), in_two.values().data(), 2 * x.size()), 0);
      }
      EXPECT_EQ(std::memcmp(also.values().data(), y.values().data(), 2 * x.size()), 0);
    }
  }
}

TEST(CodedRows, OfSwiGluAreThoseOfItsResult) {
  LEEWAY_NEEDS_GPU();
  for (const int64_t width : kWidths) {
    SCOPED_TRACE(width);
    constexpr int64_t kRows = 29;
    Rng rng(3);
    const DeviceArray<Bf16> gate_up(random_numbers(kRows * 2 * width, rng, 2.0));
    const DeviceArray<Bf16> s(static_cast<size_t>(kRows * width)), also(s.values().size());
    swiglu(Dtype::bf16, gate_up.data(), gate_up.data() + width, 2 * width, kRows, width, s.data(),
           nullptr);
    const Coded expected = coded(s.values(), kRows, width);
    for (Bf16* to : {also.data(), static_cast<Bf16*>(nullptr)}) {
      expect_same(coded_by(kRows, width,
                           [&](const CodedRows& rows) {
                             code_gated_rows(gate_up.data(), to, rows, nullptr);
                           }),
                  expected);
    }
    EXPECT_EQ(std::memcmp(also.values().data(), s.values().data(), 2 * s.values().size()), 0);
  }
}

// ---------------------------------------------------------------------------------------------
// Products

struct Shape {
  int64_t outputs, inputs;
};
// Of SmolLM2 135 M, Qwen3 0.6 B and Qwen3 8 B, and some that no tile divides.
const std::vector<Shape> kShapes = {{960, 576},   {576, 576},   {3072, 576},   {576, 1536},
                                    {4096, 1024}, {1024, 2048}, {6144, 1024},  {1024, 3072},
                                    {6144, 4096}, {4096, 4096}, {24576, 4096}, {4096, 12288},
                                    {48, 16},     {16, 48},     {1008, 208},   {144, 1040}};
constexpr int64_t kMostRows = 4096;

// Of exponents in the middle, both signs; quickly, since there are many.
Codes random_codes(int64_t count, Rng& rng) {
  Codes codes(static_cast<size_t>(count));
  for (size_t i = 0; i < codes.size();) {
    uint64_t bits = rng.next();
    for (int k = 0; k < 8 && i < codes.size(); ++k, ++i, bits >>= 8) {
      codes[i] = static_cast<uint8_t>((bits & 0x80) | (0x20 + (bits & 0x1f)));
    }
  }
  return codes;
}
std::vector<float> random_scales(int64_t count, Rng& rng) {
  std::vector<float> scales(static_cast<size_t>(count));
  for (float& scale : scales) scale = static_cast<float>(std::exp2(4.0 * rng.uniform() - 8.0));
  return scales;
}

enum class Route { usual, library };

// A matrix, rows for it, and what they make together.
struct Case {
  explicit Case(const Shape& shape_, uint64_t seed = 1)
      : shape(shape_),
        rng(seed),
        x(random_codes(kMostRows * shape.inputs, rng)),
        weight(random_codes(shape.outputs * shape.inputs, rng)),
        x_scales(random_scales(kMostRows, rng)),
        weight_scales(random_scales(shape.outputs, rng)),
        bias(random_numbers(shape.outputs, rng)),
        on_device{DeviceArray<uint8_t>(weight), DeviceArray<float>(weight_scales),
                  DeviceArray<Bf16>(bias)} {}

  // Rows from `first` on.
  Numbers product(Products& products, int64_t first, int64_t rows, bool biased,
                  Route route = Route::usual) const {
    // Aligned as a pass's rows are: in arrays of their own.
    const DeviceArray<uint8_t> some(std::span<const uint8_t>(
        x.data() + first * shape.inputs, static_cast<size_t>(rows * shape.inputs)));
    const DeviceArray<float> scales(
        std::span<const float>(x_scales.data() + first, static_cast<size_t>(rows)));
    const DeviceArray<Bf16> y(static_cast<size_t>(rows * shape.outputs));
    Projection p;
    p.rows = rows, p.inputs = shape.inputs, p.outputs = shape.outputs;
    p.x = some.data(), p.weight = on_device.weight.data(), p.y = y.data();
    p.x_scales = scales.data(), p.weight_scales = on_device.weight_scales.data();
    if (biased) p.bias = on_device.bias.data();
    if (route == Route::library) {
      products.project_codes_by_library(p, nullptr);
    } else {
      products.project(p, nullptr);
    }
    return y.values();
  }

  // Elements here and there against the sum in double. Rounding to bf16 is 2^-9 of a number; the
  // tensor cores cut products and sums of up to 128 of them off at 2^-13 of the largest, which is
  // less than 2^-12 of the sum of all magnitudes.
  void expect_near_double(const Numbers& y, int64_t first, int64_t rows, bool biased) {
    for (int trial = 0; trial < 400; ++trial) {
      const auto row = static_cast<int64_t>(rng.below(static_cast<uint64_t>(rows)));
      const auto output = static_cast<int64_t>(rng.below(static_cast<uint64_t>(shape.outputs)));
      double sum = 0.0, magnitudes = 0.0;
      for (int64_t i = 0; i < shape.inputs; ++i) {
        const double product =
            double{from_e4m3(x[static_cast<size_t>((first + row) * shape.inputs + i)])} *
            double{from_e4m3(weight[static_cast<size_t>(output * shape.inputs + i)])};
        sum += product, magnitudes += std::abs(product);
      }
      const double scale = double{x_scales[static_cast<size_t>(first + row)]} *
                           double{weight_scales[static_cast<size_t>(output)]};
      double expected = sum * scale;
      if (biased) expected += double{__bfloat162float(bias[static_cast<size_t>(output)])};
      const double got = __bfloat162float(y[static_cast<size_t>(row * shape.outputs + output)]);
      ASSERT_NEAR(got, expected, 0x1p-8 * std::abs(expected) + 0x1p-12 * magnitudes * scale + 1e-30)
          << "row " << row << " of " << rows << ", output " << output << " of [" << shape.outputs
          << ", " << shape.inputs << "]";
    }
  }

  Shape shape;
  Rng rng;
  Codes x, weight;
  std::vector<float> x_scales, weight_scales;
  Numbers bias;
  struct {
    DeviceArray<uint8_t> weight;
    DeviceArray<float> weight_scales;
    DeviceArray<Bf16> bias;
  } on_device;
};

bool same_bits(const Numbers& some, const Numbers& all) {
  return std::memcmp(some.data(), all.data(), some.size() * sizeof(Bf16)) == 0;
}

TEST(CodedProducts, AreSumsOfWhatTheCodesStandFor) {
  LEEWAY_NEEDS_FP8();
  Products products;
  for (const Shape& shape : kShapes) {
    Case one(shape);
    for (const int64_t rows : {int64_t{1}, int64_t{7}, int64_t{64}, int64_t{300}}) {
      for (const bool biased : {false, true}) {
        const int64_t first = 3 * rows;
        one.expect_near_double(one.product(products, first, rows, biased), first, rows, biased);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(CodedProducts, ARowHasTheSameBitsWithAnyNumberOfRows) {
  LEEWAY_NEEDS_FP8();
  Products products;
  int64_t compared = 0;
  for (const Shape& shape : kShapes) {
    const Case one(shape);
    for (const bool biased : {false, true}) {
      const Numbers all = one.product(products, 0, kMostRows, biased);
      for (const int64_t rows : {1, 2, 7, 8, 64, 65, 128, 129, 200, 256, 300, 1024, 3000}) {
        EXPECT_TRUE(same_bits(one.product(products, 0, rows, biased), all))
            << rows << " rows of [" << shape.outputs << ", " << shape.inputs << "]"
            << (biased ? " with bias" : "");
        compared += rows;
      }
    }
  }
  std::printf("%lld rows compared\n", static_cast<long long>(compared));
}

TEST(CodedProducts, OfTheLibraryAreTheSameUpToRounding) {
  LEEWAY_NEEDS_FP8();
  Products products;
  for (const Shape& shape : kShapes) {
    Case one(shape);
    const Numbers all = one.product(products, 0, kMostRows, false, Route::library);
    const Numbers usual = one.product(products, 0, kMostRows, false);
    int64_t same = 0;
    for (size_t i = 0; i < all.size(); ++i) same += std::memcmp(&all[i], &usual[i], 2) == 0;
    std::printf("[%lld, %lld]: %.4f %% have the same bits\n", static_cast<long long>(shape.outputs),
                static_cast<long long>(shape.inputs),
                100.0 * static_cast<double>(same) / static_cast<double>(all.size()));
    one.expect_near_double(all, 0, kMostRows, false);
    for (const int64_t rows : {1, 7, 64, 300}) {
      EXPECT_TRUE(same_bits(one.product(products, 0, rows, false, Route::library), all))
          << rows << " rows of [" << shape.outputs << ", " << shape.inputs << "]";
      one.expect_near_double(one.product(products, 0, rows, true, Route::library), 0, rows, true);
    }
    if (HasFatalFailure()) return;
  }
}

TEST(CodedProducts, OfRowsWithoutANumberHaveNone) {
  LEEWAY_NEEDS_FP8();
  Products products;
  Case one({64, 256});
  one.x[5] = kNanE4m3;  // row 0
  const Numbers y = one.product(products, 0, 2, false);
  for (size_t i = 0; i < 64; ++i) {
    EXPECT_TRUE(std::isnan(__bfloat162float(y[i]))) << i;
    EXPECT_FALSE(std::isnan(__bfloat162float(y[64 + i]))) << i;
  }
}

}  // namespace
}  // namespace leeway::cuda
