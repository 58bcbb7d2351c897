// Copies that look at their numbers: every place of a number that is not finite is seen.
#include "cuda/copy_finite.h"

#include <cuda_bf16.h>

#include <cmath>
#include <cstring>

#include "cuda/gpu_test_support.h"

namespace leeway::cuda {
namespace {

template <class T>
void expect_copy(Dtype dtype, const std::vector<T>& values, bool finite) {
  const DeviceArray<T> from(values), to(values.size());
  const DeviceArray<int32_t> flag(1);
  copy_finite(dtype, from.data(), static_cast<int64_t>(values.size()), to.data(), flag.data(),
              nullptr);
  EXPECT_EQ(flag.values()[0], finite ? 0 : 1) << values.size();
  const std::vector<T> got = to.values();
  EXPECT_EQ(std::memcmp(got.data(), values.data(), values.size() * sizeof(T)), 0) << values.size();
}

TEST(CopyFinite, CopiesAllNumbersAndSeesOneThatIsNotFinite) {
  LEEWAY_NEEDS_GPU();
  for (const size_t count : {1, 3, 8, 17, 4099, 3000001}) {
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i % 97) - 3e38f;
    std::vector<__nv_bfloat16> halves(count, __float2bfloat16(-3.3e38f));
    expect_copy(Dtype::float32, values, true);
    expect_copy(Dtype::bf16, halves, true);
    for (const size_t place : {size_t{0}, count / 2, count - 1}) {
      for (const float bad : {NAN, INFINITY, -INFINITY}) {
        std::vector<float> worse = values;
        std::vector<__nv_bfloat16> worse_halves = halves;
        worse[place] = bad, worse_halves[place] = __float2bfloat16(bad);
        expect_copy(Dtype::float32, worse, false);
        expect_copy(Dtype::bf16, worse_halves, false);
      }
    }
  }
}

}  // namespace
}  // namespace leeway::cuda
