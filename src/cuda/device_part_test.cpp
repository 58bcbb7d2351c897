// Parts of a device: how large they are, and that kernels and products on them give what they give
// on the whole.
#include "cuda/device_part.h"

#include <cuda_bf16.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <vector>

#include "base/rng.h"
#include "cuda/gpu_test_support.h"
#include "cuda/products.h"

namespace leeway::cuda {
namespace {

TEST(DevicePart, HasAtLeastWhatWasWantedAndNotAll) {
  LEEWAY_NEEDS_GPU();
  const int all = multiprocessors();
  EXPECT_EQ(DevicePart::make(0), nullptr);
  EXPECT_EQ(DevicePart::make(-3), nullptr);
  EXPECT_EQ(DevicePart::make(all), nullptr);
  EXPECT_EQ(multiprocessors_of(nullptr), 0);
  cudaStream_t ordinary = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&ordinary, cudaStreamNonBlocking), cudaSuccess);
  EXPECT_EQ(multiprocessors_of(ordinary), 0);
  cudaStreamDestroy(ordinary);
  // The other tests skip where a device cannot be divided: this one says that it can be.
  int device = 0, major = 0, driver = 0;
  ASSERT_EQ(cudaGetDevice(&device), cudaSuccess);
  ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), cudaSuccess);
  ASSERT_EQ(cudaDriverGetVersion(&driver), cudaSuccess);
  const bool divides = major >= 9 && driver >= 12050;
  for (int round = 0; round < 3; ++round) {
    const auto part = DevicePart::make(all * 2 / 3);
    ASSERT_TRUE(part != nullptr || !divides);
    if (part == nullptr) GTEST_SKIP() << "no GPU that the driver can divide";
    EXPECT_GE(part->multiprocessors(), all * 2 / 3);
    EXPECT_LT(part->multiprocessors(), all);
    EXPECT_EQ(multiprocessors_of(part->stream()), part->multiprocessors());
    std::printf("%d of %d multiprocessors\n", part->multiprocessors(), all);
  }
}

TEST(DevicePart, ProductsHaveTheBitsOfTheWhole) {
  LEEWAY_NEEDS_GPU();
  const auto part = DevicePart::make(multiprocessors() * 2 / 3);
  if (part == nullptr) GTEST_SKIP() << "no GPU that the driver can divide";
  Rng rng(3);
  const auto random = [&](int64_t count) {
    std::vector<__nv_bfloat16> values(static_cast<size_t>(count));
    for (auto& value : values) value = __float2bfloat16(static_cast<float>(rng.normal()));
    return values;
  };
  for (const auto& [rows, inputs, outputs] :
       {std::array<int64_t, 3>{3000, 1024, 4096}, {2500, 3072, 1024}, {300, 576, 49152}}) {
    const DeviceArray<__nv_bfloat16> x(random(rows * inputs)), weight(random(outputs * inputs));
    const DeviceArray<__nv_bfloat16> y(static_cast<size_t>(rows * outputs));
    Projection projection;
    projection.rows = rows, projection.inputs = inputs, projection.outputs = outputs;
    projection.x = x.data(), projection.weight = weight.data(), projection.y = y.data();
    Products products;
    products.project(projection, nullptr);
    const std::vector<__nv_bfloat16> expected = y.values();
    check_cuda(cudaMemset(y.data(), 0xff, expected.size() * sizeof expected[0]), "memory");
    check_cuda(cudaDeviceSynchronize(), "memory");
    products.change_stream();
    products.project(projection, part->stream());
    const std::vector<__nv_bfloat16> got = y.values();
    EXPECT_EQ(std::memcmp(got.data(), expected.data(), got.size() * sizeof got[0]), 0) << outputs;
  }
}

}  // namespace
}  // namespace leeway::cuda
