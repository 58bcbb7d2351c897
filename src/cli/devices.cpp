#include "cli/devices.h"

#include <fmt/format.h>

#include "core/cuda/loss_plan.h"
#include "leeway/error.h"
#ifdef LEEWAY_CUDA
#include "torch/cuda_backends.h"
#endif

namespace leeway {
namespace {

// Why there is no GPU to compute on; empty: there is.
std::string missing_gpu() {
#ifdef LEEWAY_CUDA
  return why_no_cuda();
#else
  return "this build of leeway has no PyTorch for CUDA; build it with one (docs/dependencies.md)";
#endif
}

}  // namespace

void check_device(const std::string& device, const std::string& where) {
  if (device != "cuda") return;
  const std::string problem = missing_gpu();
  if (!problem.empty()) throw Error(fmt::format("{}: {}, or take \"cpu\"", where, problem));
}

void check_device(const Config& config) {
  const std::string& device = config.run.model.device;
  if (device == "cuda") cuda::make_loss_plan(config.loss_spec);  // or says why there is none
  check_device(device, "model.device = \"" + device + "\"");
}

MakeSamplingBackend sampling_backend(const std::string& device,
                                     [[maybe_unused]] const std::string& precision) {
#ifdef LEEWAY_CUDA
  if (device == "cuda") return cuda_sampling(precision == "bf16");
#endif
  LEEWAY_CHECK(device == "cpu", "a device that was checked");
  return {};
}

MakeSamplingBackend sampling_backend(const RunConfig& run) {
  return sampling_backend(run.model.device, run.rollout.precision);
}

MakeTrainingBackend training_backend(const std::string& device,
                                     [[maybe_unused]] const std::string& precision) {
#ifdef LEEWAY_CUDA
  if (device == "cuda") return cuda_training(precision == "bf16");
#endif
  LEEWAY_CHECK(device == "cpu", "a device that was checked");
  return {};
}

MakeTrainingBackend training_backend(const RunConfig& run) {
  return training_backend(run.model.device,
                          run.trainer.precision == "auto" ? "bf16" : run.trainer.precision);
}

}  // namespace leeway
