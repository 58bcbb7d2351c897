#include "cli/devices.h"

#include <gtest/gtest.h>

#include "cli/run_setup.h"
#include "leeway/error.h"

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
  RunConfig run;
  EXPECT_EQ(error_of([&] { check_device(run.model); }), "");
  EXPECT_FALSE(training_backend(run));
  EXPECT_FALSE(sampling_backend(run));
}

TEST(Devices, CudaIsThereOrItsKeyAndTheRemedyAreNamed) {
  Config config;
  config.run.model.device = "cuda";
  const std::string error = error_of([&] { check_device(config.run.model); });
  if (error.empty()) {
    EXPECT_TRUE(training_backend(config.run));
    EXPECT_TRUE(sampling_backend(config.run));
    return;
  }
  EXPECT_TRUE(error.starts_with("model.device = \"cuda\": ")) << error;
  EXPECT_NE(error.find("take \"cpu\""), std::string::npos) << error;
  EXPECT_EQ(error_of([&] { RunSetup setup(config, false); }), error);
  EXPECT_TRUE(error_of([] { check_device("cuda", "--device cuda"); }).starts_with("--device cuda"));
}

}  // namespace
}  // namespace leeway
