#include "cli/devices.h"

#include <gtest/gtest.h>

#include "cli/run_setup.h"
#include "leeway/error.h"
#include "leeway/presets.h"

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
  config.run.model.device = "cuda";
  const std::string error = error_of([&] { check_device(config); });
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

TEST(Devices, ALossThatOnlyTheCpuComputesIsRefusedBeforeTheRun) {
  Config config;
  config.loss_spec = Catalog().make_spec("slime/ppo+mis", {});
  EXPECT_EQ(error_of([&] { check_device(config); }), "");
  config.run.model.device = "cuda";
  const std::string error = error_of([&] { check_device(config); });
  EXPECT_NE(error.find("slime/ppo+mis"), std::string::npos) << error;
  EXPECT_NE(error.find("on the CPU"), std::string::npos) << error;
}

}  // namespace
}  // namespace leeway
