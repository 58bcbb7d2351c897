#include "run/devices.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string_view>

#include "base/folders.h"
#include "leeway/error.h"
#include "torch/cuda_backends.h"

namespace leeway {
namespace {

// The GPU library, or why there is none.
struct LoadedBackends {
  const CudaBackends* backends = nullptr;
  std::string problem;
};

// Beside the program in a build, in the library folder where both are installed.
std::string library_path() {
  std::string program(4096, '\0');
  const ssize_t length = ::readlink("/proc/self/exe", program.data(), program.size());
  program.resize(length < 0 ? 0 : static_cast<size_t>(length));
  const std::string folder = program.substr(0, program.rfind('/') + 1);
  for (const char* place : {"", LEEWAY_LIBRARY_FOLDER "/"}) {
    const std::string path = folder + place + "libleeway_cuda.so";
    if (path_exists(path)) return path;
  }
  return "";
}

LoadedBackends load_backends() {
  const std::string path = library_path();
  if (path.empty()) {
    return {nullptr,
            "this build of leeway has no PyTorch for CUDA; build it with one "
            "(docs/dependencies.md)"};
  }
  void* library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    return {nullptr, fmt::format("{} cannot be loaded: {}", path, ::dlerror())};
  const auto entry = reinterpret_cast<CudaBackendsEntry>(::dlsym(library, kCudaBackendsEntry));
  const CudaBackends* backends = entry == nullptr ? nullptr : entry();
  if (backends == nullptr || std::string_view(backends->version) != LEEWAY_VERSION) {
    return {nullptr, path + " belongs to another build of the program; rebuild both"};
  }
  return {backends, backends->why_no_cuda()};
}

// Loaded once and kept: PyTorch cannot be unloaded.
const LoadedBackends& cuda_backends() {
  static const LoadedBackends loaded = load_backends();
  return loaded;
}

}  // namespace

void check_device(Device device, const std::string& where) {
  if (device != Device::cuda) return;
  const std::string& problem = cuda_backends().problem;
  if (!problem.empty()) throw Error(fmt::format("{}: {}, or use \"cpu\"", where, problem));
}

void check_device(const Config& config) {
  const Device device = config.run.model.device;
  check_device(device, fmt::format("model.device = \"{}\"", name_of(device)));
}

void check_precision(Device device, Precision precision) {
  if (device == Device::cuda && precision == Precision::int8) {
    throw Error(
        "--precision int8: works on the CPU only; with --device cuda use fp8, bf16 or float32");
  }
  if (device == Device::cpu && precision == Precision::fp8) {
    throw Error("--precision fp8: works on a GPU only; use int8, or --device cuda");
  }
}

int64_t rows_per_step(Device device) { return device == Device::cpu ? 512 : 8192; }

void choose_device_memory(Device device, bool shares_weights) {
  if (device == Device::cuda && !shares_weights) {
    cuda_backends().backends->use_expandable_segments();
  }
}

int64_t free_device_memory() { return cuda_backends().backends->free_memory(); }

MakeSamplingBackend sampling_backend(Device device, Precision precision) {
  if (device == Device::cpu) return {};
  return cuda_backends().backends->sampling(precision);
}

MakeSamplingBackend sampling_backend(const RunConfig& run) {
  return sampling_backend(run.model.device, rollout_precision(run));
}

MakeTrainingBackend training_backend(Device device, TrainingPrecision precision,
                                     SnapshotUse snapshots) {
  if (device == Device::cpu) return {};
  return cuda_backends().backends->training(precision != TrainingPrecision::float32, snapshots);
}

MakeTrainingBackend training_backend(const RunConfig& run, SnapshotUse snapshots) {
  return training_backend(run.model.device, run.trainer.precision, snapshots);
}

MakeRankBackend rank_backend(const RunConfig& run) {
  if (run.model.device == Device::cpu) return cpu_rank_backend();
  return cuda_backends().backends->rank_training(run.trainer.precision !=
                                                 TrainingPrecision::float32);
}

void choose_gpu(int local_rank, int local_size) {
  constexpr const char* kVariable = "CUDA_VISIBLE_DEVICES";
  const char* const given = std::getenv(kVariable);
  std::vector<std::string> names;
  std::istringstream list(given == nullptr ? "" : given);
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  if (given == nullptr) {
    ::setenv(kVariable, std::to_string(local_rank).c_str(), 1);
  } else if (names.size() > 1) {
    if (names.size() < static_cast<size_t>(local_size)) {
      throw Error(fmt::format("{}={}: names {} GPUs for {} ranks on this machine", kVariable, given,
                              names.size(), local_size));
    }
    ::setenv(kVariable, names[static_cast<size_t>(local_rank)].c_str(), 1);
  }
}

int64_t default_kv_bytes(Device device) {
  constexpr int64_t kGibibyte = int64_t{1} << 30;
  if (device == Device::cpu) return kGibibyte;
  return std::clamp(free_device_memory() / 2, kGibibyte, 16 * kGibibyte);
}

std::optional<WeightSharing> weight_sharing(Device device) {
  if (device == Device::cpu) return {};
  return cuda_backends().backends->sharing();
}

}  // namespace leeway
