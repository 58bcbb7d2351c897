#include "model/gpu_sizes.h"

#include <gtest/gtest.h>

namespace leeway {
namespace {

ModelConfig model_of(int64_t head_dim, int64_t vocabulary) {
  ModelConfig config;
  config.head_dim = head_dim, config.vocab_size = vocabulary;
  return config;
}

TEST(GpuSizes, HeadsThatCannotBeSampledAreNamedWithTheRemedy) {
  for (const int64_t head_dim : {8, 16, 64, 96, 128, 256}) {
    EXPECT_EQ(why_gpu_cannot_sample(model_of(head_dim, 512)), "") << head_dim;
  }
  for (const int64_t head_dim : {2, 12, 100, 264, 512}) {
    const std::string why = why_gpu_cannot_sample(model_of(head_dim, 512));
    EXPECT_NE(why.find("head_dim is " + std::to_string(head_dim)), std::string::npos) << why;
    EXPECT_NE(why.find("sample on the CPU"), std::string::npos) << why;
  }
}

TEST(GpuSizes, VocabulariesThatCannotBeTrainedAreNamedWithTheRemedy) {
  EXPECT_EQ(why_gpu_cannot_train(model_of(64, 151936), true), "");
  EXPECT_EQ(why_gpu_cannot_train(model_of(64, 151936), false), "");
  const int64_t most = kMostGpuRowBytes / 2;
  EXPECT_EQ(why_gpu_cannot_train(model_of(64, most), true), "");
  const std::string half = why_gpu_cannot_train(model_of(64, most + 1), true);
  EXPECT_NE(half.find("train on the CPU"), std::string::npos) << half;
  EXPECT_EQ(why_gpu_cannot_train(model_of(64, most / 2), false), "");
  const std::string wide = why_gpu_cannot_train(model_of(64, most), false);
  EXPECT_NE(wide.find("trainer.precision = \"bf16\""), std::string::npos) << wide;
}

}  // namespace
}  // namespace leeway
