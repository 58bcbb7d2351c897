// The rows of a training pass one by one: kernels against the formulas in plain ATen, at the widths
// and numbers of rows that have kernels of their own.

#include "torch/training_operations.h"

#include <gtest/gtest.h>

#include "base/test_size.h"
#include "torch/torch_decoder_test_support.h"

namespace leeway {
namespace {

using testing::relative_difference;
using torch::Tensor;

const torch::Device kGpu(at::kCUDA, 0);

Tensor random(at::IntArrayRef sizes) {
  return at::randn(sizes, at::TensorOptions(kGpu)).to(at::kBFloat16);
}
Tensor wide(const Tensor& x) { return x.to(at::kFloat).cpu(); }

TEST(TrainingOperations, GradientsOfNormsAreThoseOfTheFormula) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  for (const int64_t width : {8, 64, 256, 264, 576, 896, 1024, 1032, 2048}) {
    for (const int64_t rows : {1, 7, testing::small_cases() ? 301 : 3001}) {
      at::manual_seed(1);
      const Tensor x = random({rows, width}), weight = random({width}), d_y = random({rows, width});
      const Tensor add = random({rows, width});
      const Tensor d_weight = at::ones({width}, at::TensorOptions(kGpu)), h = at::empty_like(x);
      const Tensor host_weight = at::ones({width}), host_h = at::empty({rows, width});
      const Tensor expected =
          norm_backward(wide(x), wide(weight), 1e-6, wide(d_y), wide(add), host_weight, host_h);
      const Tensor got = norm_backward(x, weight, 1e-6, d_y, add.clone(), d_weight, h);
      const auto where = std::to_string(rows) + " rows of " + std::to_string(width);
      // Results are rounded to bf16; sums over rows are not.
      EXPECT_LT(relative_difference(wide(got), expected), 0.005) << where;
      EXPECT_LT(relative_difference(wide(h), host_h), 0.005) << where;
      EXPECT_LT(relative_difference(wide(d_weight), host_weight), 1e-4) << where;
    }
  }
}

TEST(TrainingOperations, NormsOfManyRowsHaveTheBitsOfFew) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  std::vector<int64_t> widths{64, 256, 264, 512, 576, 1000, 1024, 1536};
  if (testing::small_cases()) widths = {64, 264, 1024};
  for (const int64_t width : widths) {
    at::manual_seed(2);
    const int64_t rows = 5000;
    const Tensor x = random({rows, width}), delta = random({rows, width}), weight = random({width});
    Tensor h = at::empty_like(x);
    const Tensor sum = sum_and_norm(x, delta, weight, 1e-6, h);
    for (int64_t first = 0; first < rows; first += 1000) {
      Tensor part = at::empty({1000, width}, x.options());
      const Tensor of_part =
          sum_and_norm(x.narrow(0, first, 1000), delta.narrow(0, first, 1000), weight, 1e-6, part);
      EXPECT_TRUE(at::equal(of_part, sum.narrow(0, first, 1000))) << width;
      EXPECT_TRUE(at::equal(part, h.narrow(0, first, 1000))) << width;
    }
  }
}

TEST(TrainingOperations, GradientsOfHeadsAreThoseOfTheFormula) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  struct Sizes {
    int64_t query_heads, kv_heads, head_dim;
    bool normed;
  };
  for (const Sizes& s : {Sizes{16, 8, 128, true}, Sizes{9, 3, 64, true}, Sizes{4, 2, 64, false},
                         Sizes{5, 1, 40, true}, Sizes{3, 3, 16, true}, Sizes{2, 1, 256, true}}) {
    at::manual_seed(3);
    // A warp of the kernel has more than one row of the first.
    const int64_t rows = s.head_dim == 128 && !testing::small_cases() ? 3001 : 301;
    const int64_t heads = s.query_heads + 2 * s.kv_heads, half = s.head_dim / 2;
    const Tensor angles = at::randn({64, half}, at::TensorOptions(kGpu));
    const Tensor positions = at::randint(64, {rows}, at::TensorOptions(kGpu).dtype(at::kInt));
    HeadWeights on_device{{s.query_heads, s.kv_heads, s.head_dim}, {}, {}, 1e-6, {}};
    on_device.rope.cosines = angles.cos(), on_device.rope.sines = angles.sin();
    HeadWeights on_host = on_device;
    on_host.rope.cosines = on_device.rope.cosines.cpu();
    on_host.rope.sines = on_device.rope.sines.cpu();
    const Tensor d_norms = at::ones({2, s.head_dim}, at::TensorOptions(kGpu));
    const Tensor host_norms = wide(d_norms);
    if (s.normed) {
      on_device.query_norm = random({s.head_dim}), on_device.key_norm = random({s.head_dim});
      on_host.query_norm = wide(on_device.query_norm);
      on_host.key_norm = wide(on_device.key_norm);
    }
    const Tensor qkv = random({rows, heads * s.head_dim}),
                 d_all = random({rows, heads, s.head_dim});
    const auto parts = [&](const Tensor& all) {
      return HeadGradients{all.narrow(1, 0, s.query_heads),
                           all.narrow(1, s.query_heads, s.kv_heads),
                           all.narrow(1, s.query_heads + s.kv_heads, s.kv_heads)};
    };
    const auto backward = [&](const HeadWeights& weights, const Tensor& at_positions,
                              const Tensor& from, const HeadGradients& d, const Tensor& norms) {
      return heads_backward(weights, at_positions, from, d, s.normed ? norms[0] : Tensor(),
                            s.normed ? norms[1] : Tensor());
    };
    const Tensor expected =
        backward(on_host, positions.cpu(), wide(qkv), parts(wide(d_all)), host_norms);
    const Tensor got = backward(on_device, positions, qkv, parts(d_all), d_norms);
    const auto where = std::to_string(s.query_heads) + " heads of " + std::to_string(s.head_dim);
    // Rounded to bf16 once.
    EXPECT_LT(relative_difference(wide(got), expected), 0.005) << where;
    EXPECT_LT(relative_difference(wide(d_norms), host_norms), 1e-4) << where;
  }
}

}  // namespace
}  // namespace leeway
