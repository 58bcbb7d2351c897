#include "run/devices.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include "base/folders.h"
#include "leeway/error.h"
#include "leeway/presets.h"
#include "run/run_setup.h"

namespace leeway {
namespace {

std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Devices, TheCpuIsThereAndNeedsNoBackend) {
  const Config config;
  EXPECT_EQ(error_of([&] { check_device(config); }), "");
  EXPECT_FALSE(training_backend(config.run));
  EXPECT_FALSE(sampling_backend(config.run));
}

TEST(Devices, CudaIsThereOrItsKeyAndTheRemedyAreNamed) {
  Config config;
  config.run.model.device = Device::cuda;
  const std::string error = error_of([&] { check_device(config); });
  if (error.empty()) {
    EXPECT_TRUE(training_backend(config.run));
    EXPECT_TRUE(sampling_backend(config.run));
    return;
  }
  EXPECT_TRUE(error.starts_with("model.device = \"cuda\": ")) << error;
  EXPECT_NE(error.find("use \"cpu\""), std::string::npos) << error;
  EXPECT_EQ(error_of([&] { RunSetup setup(config, false); }), error);
  EXPECT_TRUE(
      error_of([] { check_device(Device::cuda, "--device cuda"); }).starts_with("--device cuda"));
}

TEST(Devices, AnErrorThatTheLibraryForGpusThrowsIsCaughtHere) {
  if (!path_exists(LEEWAY_BINARY_DIR "/libleeway_cuda.so")) GTEST_SKIP() << "built without torch";
  ModelConfig model;
  model.num_hidden_layers = model.num_attention_heads = model.num_key_value_heads = 1;
  model.head_dim = 12;  // no multiple of 8
  const MakeSamplingBackend make = sampling_backend(Device::cuda, Precision::float32);
  const std::string error = error_of([&] { make(model, EngineOptions(), 1); });
  EXPECT_NE(error.find("head_dim"), std::string::npos) << error;
}

// What a rank sees of the GPUs of its machine.
TEST(Devices, ARankSeesTheGpuOfItsNumber) {
  constexpr const char* kVariable = "CUDA_VISIBLE_DEVICES";
  const char* const before = std::getenv(kVariable);
  const std::string kept = before == nullptr ? "" : before;
  const auto seen = [&](const char* given, int rank, int size) {
    given == nullptr ? ::unsetenv(kVariable) : ::setenv(kVariable, given, 1);
    choose_gpu(rank, size);
    return std::string(std::getenv(kVariable));
  };
  EXPECT_EQ(seen(nullptr, 0, 4), "0");
  EXPECT_EQ(seen(nullptr, 3, 4), "3");
  EXPECT_EQ(seen("4,5,6,7", 2, 4), "6");
  EXPECT_EQ(seen("GPU-8f1a,GPU-77b0", 1, 2), "GPU-77b0");
  EXPECT_EQ(seen("5", 1, 2), "5");  // the launcher has chosen
  EXPECT_EQ(seen("", 1, 2), "");    // there are none
  const std::string error = error_of([&] { seen("4,5", 1, 4); });
  EXPECT_NE(error.find("CUDA_VISIBLE_DEVICES=4,5: names 2 GPUs for 4 ranks"), std::string::npos)
      << error;
  before == nullptr ? ::unsetenv(kVariable) : ::setenv(kVariable, kept.c_str(), 1);
}

TEST(Devices, TheCpuSharesNoMemoryAndHasAGibibyteForKeys) {
  EXPECT_FALSE(weight_sharing(Device::cpu).has_value());
  EXPECT_EQ(default_kv_bytes(Device::cpu), int64_t{1} << 30);
}

}  // namespace
}  // namespace leeway
