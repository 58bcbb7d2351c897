#include "model/gpu_sizes.h"

#include <gtest/gtest.h>

namespace leeway {
namespace {

ModelConfig model_of(int64_t head_dim, int64_t vocabulary) {
  ModelConfig config;
  config.head_dim = head_dim, config.vocab_size = vocabulary;
  return config;
}

TEST(GpuSizes, HeadsThatCannotBeSampledAreNamedWithTheBound) {
  for (const int64_t head_dim : {8, 16, 64, 96, 128, 256}) {
    EXPECT_EQ(why_gpu_cannot_sample(model_of(head_dim, 512)), "") << head_dim;
  }
  for (const int64_t head_dim : {2, 12, 100, 264, 512}) {
    const std::string why = why_gpu_cannot_sample(model_of(head_dim, 512));
    EXPECT_NE(why.find("head_dim is " + std::to_string(head_dim)), std::string::npos) << why;
    EXPECT_NE(why.find("multiples of 8 up to 256"), std::string::npos) << why;
  }
}

TEST(GpuSizes, VocabulariesThatCannotBeTrainedAreNamedWithTheRemedy) {
  EXPECT_EQ(why_gpu_cannot_train(model_of(64, 151936), true), "");
  EXPECT_EQ(why_gpu_cannot_train(model_of(64, 151936), false), "");
  const int64_t most = kMostGpuRowBytes / 2;
  EXPECT_EQ(why_gpu_cannot_train(model_of(64, most), true), "");
  const std::string half = why_gpu_cannot_train(model_of(64, most + 1), true);
  EXPECT_NE(half.find("model.device = \"cpu\""), std::string::npos) << half;
  EXPECT_EQ(why_gpu_cannot_train(model_of(64, most / 2), false), "");
  const std::string wide = why_gpu_cannot_train(model_of(64, most), false);
  EXPECT_NE(wide.find("trainer.precision = \"bf16\""), std::string::npos) << wide;
}

TEST(GpuSizes, WidthsWithoutTrainingKernelsAreNamed) {
  ModelConfig model = model_of(64, 512);
  model.hidden_size = kMostGpuNormWidth, model.intermediate_size = 4096;
  EXPECT_EQ(why_gpu_has_no_training_kernels(model), "");
  const auto refused = [](ModelConfig with, int64_t ModelConfig::*size, int64_t value,
                          const std::string& part) {
    with.*size = value;
    const std::string why = why_gpu_has_no_training_kernels(with);
    EXPECT_NE(why.find(part), std::string::npos) << why;
  };
  refused(model, &ModelConfig::hidden_size, 8200, "hidden_size is 8200");
  refused(model, &ModelConfig::hidden_size, 8200, "multiples of 8 up to 8192");
  refused(model, &ModelConfig::hidden_size, 100, "hidden_size is 100");
  refused(model, &ModelConfig::intermediate_size, 4100, "intermediate_size is 4100");
  refused(model, &ModelConfig::head_dim, 20, "head_dim is 20");
}

TEST(GpuSizes, RanksThatAreNotComputedAreNamedWithTheNext) {
  for (const int64_t rank : {8, 16, 24, 128}) EXPECT_EQ(why_gpu_takes_no_rank(rank), "");
  EXPECT_NE(why_gpu_takes_no_rank(4).find("rank 4"), std::string::npos);
  EXPECT_NE(why_gpu_takes_no_rank(4).find("multiple of 8, as 8"), std::string::npos);
  EXPECT_NE(why_gpu_takes_no_rank(17).find("as 24"), std::string::npos);
}

}  // namespace
}  // namespace leeway
