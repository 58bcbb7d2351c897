// A number that is not finite is seen at every place.
#include "cuda/finite.h"

#include <cuda_bf16.h>

#include <cmath>

#include "cuda/gpu_test_support.h"

namespace leeway::cuda {
namespace {

template <class T>
void expect_finite(Dtype dtype, const std::vector<T>& values, bool finite) {
  const DeviceArray<T> from(values);
  const DeviceArray<int32_t> flag(1);
  find_not_finite(dtype, from.data(), static_cast<int64_t>(values.size()), flag.data(), nullptr);
  EXPECT_EQ(flag.values()[0], finite ? 0 : 1) << values.size();
}

TEST(Finite, SeesANumberThatIsNotFiniteAtEveryPlace) {
  LEEWAY_NEEDS_GPU();
  for (const size_t count : {1, 3, 8, 17, 4099, 3000001}) {
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i % 97) - 3e38f;
    std::vector<__nv_bfloat16> halves(count, __float2bfloat16(-3.3e38f));
    expect_finite(Dtype::float32, values, true);
    expect_finite(Dtype::bf16, halves, true);
    for (const size_t place : {size_t{0}, count / 2, count - 1}) {
      for (const float bad : {NAN, INFINITY, -INFINITY}) {
        std::vector<float> worse = values;
        std::vector<__nv_bfloat16> worse_halves = halves;
        worse[place] = bad, worse_halves[place] = __float2bfloat16(bad);
        expect_finite(Dtype::float32, worse, false);
        expect_finite(Dtype::bf16, worse_halves, false);
      }
    }
  }
}

}  // namespace
}  // namespace leeway::cuda
