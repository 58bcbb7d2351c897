// Matrix products against simple ones: the documented chain bit for bit, and double precision
// within its error.

#include "kernels/matmul.h"

#include <algorithm>
#include <array>

#include "kernels/test_support.h"

namespace leeway {
namespace {

using testing::at_every_level;
using testing::close_to;
using testing::fuses;
using testing::kEps;
using testing::kFloatInfinity;
using testing::kFloatNan;
using testing::multiply_add;
using testing::random_floats;
using testing::same_bits;

constexpr float kUntouched = -77.0f;

uint16_t upper_half(float value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
}
float from_upper_half(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// A matrix in the possible memory layouts: by rows or by columns, with a few NaNs after each.
struct Matrix {
  int64_t rows, columns;
  std::vector<float> values;  // row-major, dense
  std::array<std::vector<float>, 2> memory;
  std::array<std::vector<uint16_t>, 2> halves;
  static constexpr int64_t kGap = 3;

  Matrix(Rng& rng, int64_t row_count, int64_t column_count, bool bf16 = false)
      : rows(row_count), columns(column_count), values(random_floats(rng, rows * columns)) {
    for (float& value : values) value = bf16 ? from_upper_half(upper_half(value)) : value;
    memory[0].assign(rows * (columns + kGap) + 1, kFloatNan);
    memory[1].assign(columns * (rows + kGap) + 1, kFloatNan);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        memory[0][i * (columns + kGap) + j] = at(i, j);
        memory[1][j * (rows + kGap) + i] = at(i, j);
      }
    }
    for (int across : {0, 1}) {
      for (float value : memory[across]) halves[across].push_back(upper_half(value));
    }
  }
  float at(int64_t i, int64_t j) const { return values[i * columns + j]; }
  Operand operand(int across, bool bf16 = false) const {
    const float* data = memory[across].data();
    Operand out = across ? columns_of(data, rows + kGap) : rows_of(data, columns + kGap);
    if (bf16) out.data = halves[across].data(), out.bf16 = true;
    return out;
  }
};

// start + A B by the documented chain, with and without fused multiply-adds, and in double.
struct Expected {
  std::array<std::vector<float>, 2> chain;
  std::vector<double> exact, magnitude;

  Expected(const Matrix& a, const Matrix& b, const std::vector<float>& start) {
    const int64_t n = b.columns;
    chain = {start, start};
    exact = magnitude = testing::widened(start);
    for (double& value : magnitude) value = std::abs(value);
    for (int64_t i = 0; i < a.rows; ++i) {
      for (int64_t k = 0; k < a.columns; ++k) {
        const float x = a.at(i, k);
        for (int64_t j = 0; j < n; ++j) {
          const float y = b.at(k, j);
          for (bool fused : {false, true}) {
            float& sum = chain[fused][i * n + j];
            sum = multiply_add(fused, x, y, sum);
          }
          const double product = static_cast<double>(x) * static_cast<double>(y);
          exact[i * n + j] += product;
          magnitude[i * n + j] += std::abs(product);
        }
      }
    }
  }
};

// The dense [rows, columns] part of memory whose rows are `ld` apart; checks that the rest is
// untouched.
std::vector<float> dense(const std::vector<float>& c, int64_t rows, int64_t columns, int64_t ld) {
  std::vector<float> out;
  for (int64_t i = 0; i * ld < std::ssize(c); ++i) {
    for (int64_t j = 0; j < ld && i * ld + j < std::ssize(c); ++j) {
      const float value = c[i * ld + j];
      if (i < rows && j < columns) {
        out.push_back(value);
      } else if (value != kUntouched) {
        ADD_FAILURE() << "row " << i << " column " << j << " was written";
        return out;
      }
    }
  }
  return out;
}

// Memory for an output with gaps after its rows and one extra row.
std::vector<float> spread(const std::vector<float>& values, int64_t rows, int64_t columns,
                          int64_t ld) {
  std::vector<float> out((rows + 1) * ld, kUntouched);
  for (int64_t i = 0; i < rows; ++i) {
    std::copy_n(values.begin() + i * columns, columns, out.begin() + i * ld);
  }
  return out;
}

std::vector<float> run_gemm(ThreadPool& pool, int64_t m, int64_t n, int64_t k, const Operand& a,
                            const Operand& b, const std::vector<float>& old, Start start) {
  const int64_t ldc = n + 5;
  std::vector<float> c = spread(old, m, n, ldc);
  pool.run_team([&](Team& team) { gemm(team, m, n, k, a, b, c.data(), ldc, start); });
  return dense(c, m, n, ldc);
}

// Every layout and both initial values, at every SIMD level.
void check_shape(ThreadPool& pool, int64_t m, int64_t n, int64_t k, bool bf16) {
  SCOPED_TRACE(::testing::Message() << m << " x " << n << " x " << k << (bf16 ? " bf16" : ""));
  Rng rng(static_cast<uint64_t>(m * 1000003 + n * 1009 + k));
  const Matrix a(rng, m, k), b(rng, k, n, bf16);
  const std::vector<float> old = random_floats(rng, m * n, 10.0);
  const Expected from_zero(a, b, std::vector<float>(m * n)), from_old(a, b, old);
  at_every_level([&](int64_t target) {
    for (const Start start : {Start::zero, Start::old_value}) {
      const Expected& expected = start == Start::zero ? from_zero : from_old;
      for (int layout = 0; layout < 4; ++layout) {
        SCOPED_TRACE(layout);
        const std::vector<float> c =
            run_gemm(pool, m, n, k, a.operand(layout / 2), b.operand(layout % 2, bf16), old, start);
        ASSERT_TRUE(same_bits(c, expected.chain[fuses(target)]));
        const double roundings = static_cast<double>(k + 1);
        ASSERT_TRUE(close_to(c, expected.exact,
                             [&](size_t i) { return roundings * kEps * expected.magnitude[i]; }));
      }
    }
  });
}

TEST(Gemm, IsTheDocumentedChainForSmallShapesInEveryLayout) {
  ThreadPool pool(1);
  for (int64_t m : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 47, 48, 49}) {
    for (int64_t n : {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65}) {
      for (int64_t k : {0, 1, 2, 3, 8, 9}) {
        check_shape(pool, m, n, k, (m + n + k) % 3 == 0);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Gemm, IsTheDocumentedChainAcrossBlocksOfRowsColumnsAndDepth) {
  ThreadPool pool(1);
  bool bf16 = false;
  for (const auto& [m, n, k] : std::vector<std::array<int64_t, 3>>{{1, 33, 255},
                                                                   {1, 33, 256},
                                                                   {6, 33, 257},
                                                                   {13, 70, 513},
                                                                   {48, 31, 256},
                                                                   {50, 33, 300},
                                                                   {97, 65, 257},
                                                                   {1, 2047, 257},
                                                                   {2, 2048, 3},
                                                                   {7, 2049, 5},
                                                                   {3, 4097, 2},
                                                                   {49, 2081, 2},
                                                                   {2, 2049, 258},
                                                                   {200, 1, 40}}) {
    check_shape(pool, m, n, k, bf16 = !bf16);
    if (HasFatalFailure()) return;
  }
}

TEST(Gemm, NothingToDoTouchesNothing) {
  ThreadPool pool(2);
  Rng rng(3);
  const Matrix a(rng, 5, 4), b(rng, 4, 6);
  for (const auto& [m, n] : {std::pair<int64_t, int64_t>{0, 6}, {5, 0}, {0, 0}}) {
    EXPECT_TRUE(run_gemm(pool, m, n, 4, a.operand(0), b.operand(0), {}, Start::zero).empty());
  }
}

TEST(Gemm, IsTheSameBitForBitWhateverTheNumberOfThreads) {
  Rng rng(4);
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{101, 150, 270}, {5, 2100, 3}}) {
    const Matrix a(rng, m, k), b(rng, k, n);
    const std::vector<float> old = random_floats(rng, m * n);
    at_every_level([&](int64_t) {
      for (int layout = 0; layout < 4; ++layout) {
        std::vector<float> one;
        for (int threads : {1, 2, 3, 5}) {
          ThreadPool pool(threads);
          const std::vector<float> c = run_gemm(pool, m, n, k, a.operand(layout / 2),
                                                b.operand(layout % 2), old, Start::old_value);
          if (one.empty()) one = c;
          ASSERT_TRUE(same_bits(c, one)) << threads << " threads, layout " << layout;
        }
      }
    });
  }
}

TEST(Gemm, ARowHasTheSameBitsWhicheverRowsComeWithIt) {
  Rng rng(5);
  const int64_t m = 70, n = 65, k = 300;
  const Matrix a(rng, m, k), b(rng, k, n);
  ThreadPool pool(2);
  at_every_level([&](int64_t) {
    const std::vector<float> all =
        run_gemm(pool, m, n, k, a.operand(0), b.operand(0), std::vector<float>(m * n), Start::zero);
    for (int trial = 0; trial < 60; ++trial) {
      const int64_t count = 1 + static_cast<int64_t>(rng.below(60));
      std::vector<float> chosen, expected;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = static_cast<int64_t>(rng.below(m));
        chosen.insert(chosen.end(), a.values.begin() + row * k, a.values.begin() + (row + 1) * k);
        expected.insert(expected.end(), all.begin() + row * n, all.begin() + (row + 1) * n);
      }
      const std::vector<float> c =
          run_gemm(pool, count, n, k, rows_of(chosen.data(), k), b.operand(0),
                   std::vector<float>(count * n), Start::zero);
      ASSERT_TRUE(same_bits(c, expected)) << count << " rows";
    }
  });
}

PackedMatrix packed(ThreadPool& pool, Precision precision, const std::vector<float>& weights,
                    int64_t outputs, int64_t inputs) {
  PackedMatrix out(precision, outputs, inputs);
  const PackedMatrix::Part part{weights.data(), outputs};
  pool.run_team([&](Team& team) { out.pack(team, {&part, 1}); });
  return out;
}

std::vector<float> rows_back(const PackedMatrix& w) {
  std::vector<float> out(w.outputs() * w.inputs(), kUntouched);
  for (int64_t i = 0; i < w.outputs(); ++i) w.row(i, out.data() + i * w.inputs());
  return out;
}

// What the sums of a product start from.
enum class Begin { zero, old_value, bias };

std::vector<float> run_product(ThreadPool& pool, const std::vector<float>& x, int64_t rows,
                               const PackedMatrix& w, const std::vector<float>& old,
                               const std::vector<float>& bias, Begin begin) {
  const int64_t ldx = w.inputs() + 2, ldy = w.outputs() + 3;
  std::vector<float> wide(rows * ldx + 1, kFloatNan);
  for (int64_t i = 0; i < rows; ++i) {
    std::copy_n(x.begin() + i * w.inputs(), w.inputs(), wide.begin() + i * ldx);
  }
  std::vector<float> y = spread(old, rows, w.outputs(), ldy);
  pool.run_team([&](Team& team) {
    product(team, wide.data(), rows, ldx, w, y.data(), ldy,
            begin == Begin::old_value ? Start::old_value : Start::zero,
            begin == Begin::bias ? bias.data() : nullptr);
  });
  return dense(y, rows, w.outputs(), ldy);
}

// The initial values of the sums, as a matrix.
std::vector<float> beginning(int64_t rows, const std::vector<float>& old,
                             const std::vector<float>& bias, Begin begin) {
  if (begin == Begin::old_value) return old;
  std::vector<float> out;
  for (int64_t i = 0; i < rows; ++i) out.insert(out.end(), bias.begin(), bias.end());
  if (begin == Begin::zero) std::fill(out.begin(), out.end(), 0.0f);
  return out;
}

struct ProductShape {
  int64_t rows, outputs, inputs;
};
std::vector<ProductShape> product_shapes() {
  std::vector<ProductShape> list;
  for (int64_t rows : {1, 2, 5, 6, 7, 11, 12, 13, 48, 49}) {
    for (int64_t outputs : {1, 31, 32, 33, 70}) {
      for (int64_t inputs : {0, 1, 7, 64}) list.push_back({rows, outputs, inputs});
    }
  }
  for (int64_t rows : {191, 192, 193, 400}) list.push_back({rows, 40, 33});
  for (int64_t rows : {1, 3}) list.push_back({rows, 1100, 300});
  return list;
}

TEST(Product, HasTheBitsOfGemmInFloat32) {
  ThreadPool pool(1);
  Rng rng(6);
  for (const ProductShape& s : product_shapes()) {
    SCOPED_TRACE(::testing::Message() << s.rows << " x " << s.outputs << " x " << s.inputs);
    const std::vector<float> x = random_floats(rng, s.rows * s.inputs + 1);
    const std::vector<float> weights = random_floats(rng, s.outputs * s.inputs + 1);
    const std::vector<float> old = random_floats(rng, s.rows * s.outputs);
    const std::vector<float> bias = random_floats(rng, s.outputs);
    const PackedMatrix w = packed(pool, Precision::float32, weights, s.outputs, s.inputs);
    at_every_level([&](int64_t) {
      for (const Begin begin : {Begin::zero, Begin::old_value, Begin::bias}) {
        const std::vector<float> expected =
            run_gemm(pool, s.rows, s.outputs, s.inputs, rows_of(x.data(), s.inputs),
                     columns_of(weights.data(), s.inputs), beginning(s.rows, old, bias, begin),
                     begin == Begin::zero ? Start::zero : Start::old_value);
        ASSERT_TRUE(same_bits(run_product(pool, x, s.rows, w, old, bias, begin), expected));
      }
    });
    if (HasFatalFailure()) return;
  }
}

// bf16: the chain over the rounded weights. int8: the chain over the integers, times the scale.
TEST(Product, OfNarrowWeightsIsTheChainOverWhatTheyBecame) {
  ThreadPool pool(1);
  Rng rng(7);
  for (const Precision precision : {Precision::bf16, Precision::int8}) {
    for (const ProductShape& s : product_shapes()) {
      SCOPED_TRACE(::testing::Message() << name_of(precision) << " " << s.rows << " x " << s.outputs
                                        << " x " << s.inputs);
      const bool scaled = precision == Precision::int8;
      const std::vector<float> weights = random_floats(rng, s.outputs * s.inputs + 1);
      const std::vector<float> old = random_floats(rng, s.rows * s.outputs);
      const std::vector<float> bias = random_floats(rng, s.outputs);
      const PackedMatrix w = packed(pool, precision, weights, s.outputs, s.inputs);
      const std::vector<float> became = rows_back(w);
      const Matrix x(rng, s.rows, s.inputs);
      Matrix w_t(rng, s.inputs, s.outputs), w_real = w_t;
      for (int64_t k = 0; k < s.inputs; ++k) {
        for (int64_t j = 0; j < s.outputs; ++j) {
          const float value = became[j * s.inputs + k];
          w_real.values[k * s.outputs + j] = value;
          w_t.values[k * s.outputs + j] = scaled ? std::round(value / w.scales()[j]) : value;
        }
      }
      for (const Begin begin : {Begin::zero, Begin::old_value, Begin::bias}) {
        const std::vector<float> from = beginning(s.rows, old, bias, begin);
        Expected expected(x, w_t, scaled ? std::vector<float>(from.size()) : from);
        for (size_t i = 0; scaled && i < from.size(); ++i) {
          const float scale = w.scales()[i % s.outputs];
          for (bool fused : {false, true}) {
            float& value = expected.chain[fused][i];
            value =
                begin == Begin::zero ? value * scale : multiply_add(fused, value, scale, from[i]);
          }
        }
        const Expected real(x, w_real, from);
        at_every_level([&](int64_t target) {
          const std::vector<float> y = run_product(pool, x.values, s.rows, w, old, bias, begin);
          ASSERT_TRUE(same_bits(y, expected.chain[fuses(target)]));
          const double roundings = static_cast<double>(s.inputs + 3);
          ASSERT_TRUE(close_to(y, real.exact,
                               [&](size_t i) { return roundings * kEps * real.magnitude[i]; }));
        });
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Product, IsTheSameBitForBitWhateverTheNumberOfThreadsAndRows) {
  Rng rng(8);
  const int64_t rows = 230, outputs = 333, inputs = 100;
  const std::vector<float> x = random_floats(rng, rows * inputs);
  const std::vector<float> weights = random_floats(rng, outputs * inputs);
  const std::vector<float> old = random_floats(rng, rows * outputs);
  const std::vector<float> bias = random_floats(rng, outputs);
  for (const Precision precision : {Precision::float32, Precision::bf16, Precision::int8}) {
    SCOPED_TRACE(name_of(precision));
    at_every_level([&](int64_t) {
      std::vector<float> one;
      for (int threads : {1, 2, 3, 5}) {
        ThreadPool pool(threads);
        const PackedMatrix w = packed(pool, precision, weights, outputs, inputs);
        const std::vector<float> y = run_product(pool, x, rows, w, old, bias, Begin::bias);
        if (one.empty()) one = y;
        ASSERT_TRUE(same_bits(y, one)) << threads << " threads";
      }
      ThreadPool pool(1);
      const PackedMatrix w = packed(pool, precision, weights, outputs, inputs);
      for (int64_t row = 0; row < rows; row += 7) {
        const int64_t count = std::min<int64_t>(row % 5 + 1, rows - row);
        const std::vector<float> some(x.begin() + row * inputs, x.begin() + (row + count) * inputs);
        const std::vector<float> y = run_product(
            pool, some, count, w, std::vector<float>(count * outputs), bias, Begin::bias);
        ASSERT_TRUE(same_bits(y, std::span(one).subspan(row * outputs, count * outputs)))
            << count << " rows from " << row;
      }
    });
  }
}

TEST(PackedMatrix, GivesBackFloat32AsItWas) {
  ThreadPool pool(2);
  Rng rng(9);
  for (int64_t outputs : {1, 31, 32, 33, 65}) {
    std::vector<float> weights = random_floats(rng, outputs * 19);
    weights[0] = kFloatNan, weights[7] = -kFloatInfinity, weights[18] = -0.0f;
    const PackedMatrix w = packed(pool, Precision::float32, weights, outputs, 19);
    EXPECT_EQ(w.outputs(), outputs);
    EXPECT_EQ(w.inputs(), 19);
    EXPECT_EQ(w.precision(), Precision::float32);
    EXPECT_TRUE(same_bits(rows_back(w), weights));
  }
}

// Every upper half of a float32 with lower halves around the midpoint.
TEST(PackedMatrix, RoundsToTheNearestBf16AndTiesToEven) {
  ThreadPool pool(2);
  const std::vector<uint32_t> lower = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
  const int64_t inputs = std::ssize(lower) * 256;
  std::vector<float> weights;
  for (uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (uint32_t low : lower) weights.push_back(std::bit_cast<float>(upper << 16 | low));
  }
  const PackedMatrix w = packed(pool, Precision::bf16, weights, 256, inputs);
  const std::vector<float> became = rows_back(w);
  // Magnitudes as numbers, with infinity where the next power of two would be.
  const auto magnitude = [](float value) {
    return std::isinf(value) ? 0x1p128 : std::abs(static_cast<double>(value));
  };
  for (size_t i = 0; i < weights.size(); ++i) {
    const float from = weights[i], to = became[i];
    ASSERT_EQ(std::bit_cast<uint32_t>(to) & 0xffff, 0u) << std::hexfloat << from;
    if (std::isnan(from)) {
      ASSERT_TRUE(std::isnan(to));
      continue;
    }
    ASSERT_EQ(std::signbit(to), std::signbit(from)) << std::hexfloat << from;
    if (std::isinf(from)) {
      ASSERT_EQ(to, from);
      continue;
    }
    const uint16_t bits = upper_half(std::abs(to));
    const double distance = std::abs(magnitude(from) - magnitude(to));
    for (int step : {-1, 1}) {
      if ((bits == 0 && step < 0) || (std::isinf(to) && step > 0)) continue;
      const double other = magnitude(from_upper_half(static_cast<uint16_t>(bits + step)));
      const double theirs = std::abs(magnitude(from) - other);
      ASSERT_TRUE(distance < theirs || (distance == theirs && bits % 2 == 0))
          << std::hexfloat << from << " became " << to;
    }
  }
}

TEST(PackedMatrix, ScalesEachOutputSoThatItsLargestBecomes127) {
  ThreadPool pool(2);
  Rng rng(10);
  const int64_t outputs = 75, inputs = 37;
  std::vector<float> weights = random_floats(rng, outputs * inputs);
  for (int64_t i = 0; i < outputs; ++i) {
    const float scale = static_cast<float>(std::pow(10.0, rng.uniform() * 30 - 15));
    for (int64_t k = 0; k < inputs; ++k) weights[i * inputs + k] *= scale;
  }
  std::fill_n(weights.begin() + 33 * inputs, inputs, 0.0f);
  std::fill_n(weights.begin() + 34 * inputs + 1, inputs - 1, 0.0f);
  const PackedMatrix w = packed(pool, Precision::int8, weights, outputs, inputs);
  const std::vector<float> became = rows_back(w);
  for (int64_t i = 0; i < outputs; ++i) {
    SCOPED_TRACE(i);
    float largest = 0.0f;
    for (int64_t k = 0; k < inputs; ++k) {
      largest = std::max(largest, std::abs(weights[i * inputs + k]));
    }
    const float scale = w.scales()[i];
    ASSERT_FLOAT_EQ(scale, largest / 127.0f);
    for (int64_t k = 0; k < inputs; ++k) {
      const float from = weights[i * inputs + k], to = became[i * inputs + k];
      if (largest == 0.0f) {
        ASSERT_EQ(to, 0.0f);
        continue;
      }
      const float integer = std::round(to / scale);
      ASSERT_EQ(to, integer * scale);
      ASSERT_LE(std::abs(integer), 127.0f);
      ASSERT_LE(std::abs(from - to), scale * 0.50001f);
      if (std::abs(from) == largest) {
        ASSERT_EQ(integer, std::copysign(127.0f, from));
      }
    }
  }
}

TEST(PackedMatrix, NarrowWeightsTakeHalfAndAQuarterOfTheMemory) {
  for (int64_t outputs : {1, 32, 33, 2048}) {
    for (int64_t inputs : {1, 100, 1024}) {
      const size_t rounded = static_cast<size_t>((outputs + 31) / 32 * 32);
      const size_t whole = PackedMatrix(Precision::float32, outputs, inputs).bytes();
      EXPECT_EQ(whole, rounded * static_cast<size_t>(inputs) * 4);
      EXPECT_EQ(PackedMatrix(Precision::bf16, outputs, inputs).bytes(), whole / 2);
      EXPECT_EQ(PackedMatrix(Precision::int8, outputs, inputs).bytes(), whole / 4 + rounded * 4);
    }
  }
  EXPECT_EQ(PackedMatrix().bytes(), 0u);
}

TEST(PackedMatrix, StackedPartsAreOneMatrix) {
  ThreadPool pool(2);
  Rng rng(11);
  const int64_t inputs = 21;
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{
           {1, 31, 33}, {33, 31}, {5, 0, 64, 1}, {16, 8, 8}, {2, 2, 2, 90}, {0, 7}}) {
    int64_t outputs = 0;
    for (int64_t size : sizes) outputs += size;
    const std::vector<float> weights = random_floats(rng, outputs * inputs);
    std::vector<std::vector<float>> apart;
    std::vector<PackedMatrix::Part> parts;
    int64_t at = 0;
    for (int64_t size : sizes) {
      apart.emplace_back(weights.begin() + at * inputs, weights.begin() + (at + size) * inputs);
      parts.push_back({apart.back().data(), size});
      at += size;
    }
    for (const Precision precision : {Precision::float32, Precision::bf16, Precision::int8}) {
      PackedMatrix stacked(precision, outputs, inputs);
      pool.run_team([&](Team& team) { stacked.pack(team, parts); });
      const PackedMatrix whole = packed(pool, precision, weights, outputs, inputs);
      const std::vector<float> x = random_floats(rng, 3 * inputs), none(3 * outputs);
      EXPECT_TRUE(same_bits(rows_back(stacked), rows_back(whole)));
      EXPECT_TRUE(same_bits(run_product(pool, x, 3, stacked, none, {}, Begin::zero),
                            run_product(pool, x, 3, whole, none, {}, Begin::zero)));
    }
  }
}

TEST(PackedMatrix, PackedAgainHoldsTheNewWeightsAlone) {
  ThreadPool pool(3);
  Rng rng(12);
  const int64_t outputs = 45, inputs = 30;
  const std::vector<float> x = random_floats(rng, 4 * inputs), none(4 * outputs);
  for (const Precision precision : {Precision::float32, Precision::bf16, Precision::int8}) {
    PackedMatrix w(precision, outputs, inputs);
    for (double scale : {1.0, 100.0, 0.0, 0.01}) {
      const std::vector<float> weights = random_floats(rng, outputs * inputs, scale);
      const PackedMatrix::Part part{weights.data(), outputs};
      pool.run_team([&](Team& team) { w.pack(team, {&part, 1}); });
      const PackedMatrix fresh = packed(pool, precision, weights, outputs, inputs);
      EXPECT_TRUE(same_bits(rows_back(w), rows_back(fresh)));
      EXPECT_TRUE(same_bits(run_product(pool, x, 4, w, none, {}, Begin::zero),
                            run_product(pool, x, 4, fresh, none, {}, Begin::zero)));
    }
  }
}

TEST(Precision, HasTheNamesOfTheSettings) {
  EXPECT_STREQ(name_of(Precision::float32), "float32");
  EXPECT_STREQ(name_of(Precision::bf16), "bf16");
  EXPECT_STREQ(name_of(Precision::int8), "int8");
}

}  // namespace
}  // namespace leeway
