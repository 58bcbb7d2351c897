#include "torch/weight_sharing.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <memory>
#include <string>

#include "base/crc32c.h"
#include "leeway/error.h"
#include "torch/device_weights.h"
#include "torch/torch_errors.h"

#ifdef LEEWAY_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#endif

namespace leeway {

uint32_t layout_sum(const FlatLayout& layout) {
  std::string text = fmt::format("float32 {}\n", layout.size);
  for (size_t i = 0; i < layout.table.size(); ++i) {
    const ParameterInfo& info = layout.table[i];
    text += fmt::format("{} {} {}\n", info.name, fmt::join(info.shape, "x"), layout.offsets[i]);
  }
  return crc32c(text);
}

#ifdef LEEWAY_CUDA

namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == kWeightHandleBytes);

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // so that nobody else takes it for an error of their own
  throw Error(fmt::format("{}: {}", what, cudaGetErrorString(status)));
}

std::string uuid_of(torch::Device device) {
  cudaDeviceProp properties = {};
  check(cudaGetDeviceProperties(&properties, device.index()), "the GPU's properties");
  std::string text = "GPU";
  for (size_t i = 0; i < sizeof properties.uuid.bytes; ++i) {
    const bool dash = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
    text += fmt::format("{}{:02x}", dash ? "-" : "",
                        static_cast<unsigned char>(properties.uuid.bytes[i]));
  }
  return text;
}

struct Allocation {
  char* begin = nullptr;
  size_t bytes = 0;
};

// The allocation that a pointer is in. The driver's library, which PyTorch has loaded, is found by
// its name: linking it would keep programs from starting where there is no GPU.
Allocation allocation_of(const void* memory) {
  using Function = int (*)(char** base, size_t* size, const void* pointer);
  static const auto function = [] {
    void* driver = ::dlopen("libcuda.so.1", RTLD_LAZY);
    return driver == nullptr
               ? nullptr
               : reinterpret_cast<Function>(::dlsym(driver, "cuMemGetAddressRange_v2"));
  }();
  Allocation found;
  const int status = function == nullptr ? -1 : function(&found.begin, &found.bytes, memory);
  if (status != 0) throw Error(fmt::format("memory of the GPU is not known ({})", status));
  return found;
}

// Another process's allocation, while this lives.
class OpenedHandle {
 public:
  explicit OpenedHandle(const std::string& bytes) {
    cudaIpcMemHandle_t handle = {};
    LEEWAY_CHECK(bytes.size() == sizeof handle, "a handle");
    std::memcpy(&handle, bytes.data(), sizeof handle);
    check(cudaIpcOpenMemHandle(&memory_, handle, cudaIpcMemLazyEnablePeerAccess),
          "the memory of the other process cannot be opened");
  }
  ~OpenedHandle() {
    if (cudaIpcCloseMemHandle(memory_) != cudaSuccess) cudaGetLastError();
  }
  OpenedHandle(const OpenedHandle&) = delete;
  OpenedHandle& operator=(const OpenedHandle&) = delete;
  void* memory() const { return memory_; }

 private:
  void* memory_ = nullptr;
};

SharedWeights share(const std::string& device, const PolicySnapshot& snapshot) {
  const auto* weights = dynamic_cast<const TorchDeviceWeights*>(snapshot.device());
  if (weights == nullptr || !weights->flat().is_cuda() ||
      weights->flat().scalar_type() != at::kFloat) {
    throw Error("the weights are not in the GPU's memory in float32");
  }
  const c10::cuda::CUDAGuard guard(weights->flat().device());
  const char* memory = static_cast<const char*>(weights->flat().data_ptr());
  const Allocation allocation = allocation_of(memory);
  cudaIpcMemHandle_t handle = {};
  // Not every memory has one: PyTorch's expandable segments have none.
  check(cudaIpcGetMemHandle(&handle, allocation.begin), "the memory has no handle");
  return {.device = device,
          .handle = {reinterpret_cast<const char*>(&handle), sizeof handle},
          .offset = memory - allocation.begin,
          .count = weights->layout().size,
          .layout = layout_sum(weights->layout()),
          .checksum = snapshot.checksum()};
}

std::shared_ptr<const PolicySnapshot> take(torch::Device device, const SharedWeights& shared,
                                           const ModelConfig& config, PolicyVersion version) {
  FlatLayout layout(config);
  if (shared.count != layout.size || shared.layout != layout_sum(layout)) {
    throw Error(
        fmt::format("the weights are of another model: {} numbers in layout {:08x}, not {} in "
                    "layout {:08x}",
                    shared.count, shared.layout, layout.size, layout_sum(layout)));
  }
  const c10::cuda::CUDAGuard guard(device);
  const auto bytes = static_cast<size_t>(layout.size) * sizeof(float);
  std::unique_ptr<TorchDeviceWeights> copy;
  {
    const OpenedHandle opened(shared.handle);
    const Allocation allocation = allocation_of(opened.memory());
    char* const end = allocation.begin + allocation.bytes;
    char* const begin = static_cast<char*>(opened.memory()) + shared.offset;
    if (shared.offset < 0 || shared.offset % 16 != 0 || begin < allocation.begin || begin > end ||
        bytes > static_cast<size_t>(end - begin)) {
      throw Error(fmt::format("{} bytes at {} are not within the memory of the handle, {} bytes",
                              bytes, shared.offset, allocation.bytes));
    }
    copy = std::make_unique<TorchDeviceWeights>(
        std::move(layout),
        at::from_blob(begin, {shared.count}, at::device(device).dtype(at::kFloat)).clone());
  }
  auto snapshot = std::make_shared<const PolicySnapshot>(config, std::move(copy), version);
  if (snapshot->checksum() != shared.checksum) {
    throw Error(
        fmt::format("the weights have the checksum {:08x}, not {:08x}: they were changed "
                    "before they were copied",
                    snapshot->checksum(), shared.checksum));
  }
  return snapshot;
}

}  // namespace

WeightSharing cuda_weight_sharing(torch::Device device) {
  WeightSharing sharing;
  sharing.device = uuid_of(device);
  sharing.share = [uuid = sharing.device](const PolicySnapshot& snapshot) {
    return with_plain_errors([&] { return share(uuid, snapshot); });
  };
  sharing.take = [device](const SharedWeights& shared, const ModelConfig& config,
                          PolicyVersion version) {
    return with_plain_errors([&] { return take(device, shared, config, version); });
  };
  return sharing;
}

#else

WeightSharing cuda_weight_sharing(torch::Device device) {
  throw Error(fmt::format("device {}: this build has no CUDA", device.str()));
}

#endif

}  // namespace leeway
