#include "run/devices.h"

#include <gtest/gtest.h>

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

TEST(Devices, TheCpuSharesNoMemoryAndHasAGibibyteForKeys) {
  EXPECT_FALSE(weight_sharing(Device::cpu).has_value());
  EXPECT_EQ(default_kv_bytes(Device::cpu), int64_t{1} << 30);
}

}  // namespace
}  // namespace leeway
