#include "cuda/device_part.h"

#include <cuda.h>

#include "cuda/device.h"

namespace leeway::cuda {
namespace {

// The driver's functions, found at run time: a program starts where no driver is.
struct Driver {
  decltype(&cuDeviceGetDevResource) device_resource = nullptr;
  decltype(&cuDevSmResourceSplitByCount) split = nullptr;
  decltype(&cuDevResourceGenerateDesc) describe = nullptr;
  decltype(&cuGreenCtxCreate) create = nullptr;
  decltype(&cuGreenCtxDestroy) destroy = nullptr;
  decltype(&cuGreenCtxStreamCreate) create_stream = nullptr;
  decltype(&cuStreamGetGreenCtx) context_of = nullptr;
  decltype(&cuGreenCtxGetDevResource) context_resource = nullptr;
  bool is_there = false;

  Driver() {
    is_there =
        find("cuDeviceGetDevResource", device_resource) &&
        find("cuDevSmResourceSplitByCount", split) && find("cuDevResourceGenerateDesc", describe) &&
        find("cuGreenCtxCreate", create) && find("cuGreenCtxDestroy", destroy) &&
        find("cuGreenCtxStreamCreate", create_stream) && find("cuStreamGetGreenCtx", context_of) &&
        find("cuGreenCtxGetDevResource", context_resource);
  }

 private:
  template <class Function>
  static bool find(const char* name, Function& function) {
    constexpr unsigned kVersion = 12050;  // the first with all of them
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result);
    if (status != cudaSuccess) static_cast<void>(cudaGetLastError());
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) return false;
    function = reinterpret_cast<Function>(found);
    return true;
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

}  // namespace

std::unique_ptr<DevicePart> DevicePart::make(int wanted) {
  if (!driver().is_there || wanted <= 0 || wanted >= cuda::multiprocessors()) return nullptr;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "the current device");
  check_cuda(cudaFree(nullptr), "the device");  // its context is there
  CUdevResource all{}, part{}, rest{};
  CUdevResourceDesc description = nullptr;
  unsigned groups = 1;
  CUgreenCtx context = nullptr;
  if (driver().device_resource(device, &all, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS ||
      driver().split(&part, &groups, &all, &rest, 0, static_cast<unsigned>(wanted)) !=
          CUDA_SUCCESS ||
      groups != 1 || part.sm.smCount >= all.sm.smCount ||
      driver().describe(&description, &part, 1) != CUDA_SUCCESS ||
      driver().create(&context, description, device, CU_GREEN_CTX_DEFAULT_STREAM) != CUDA_SUCCESS) {
    return nullptr;
  }
  std::unique_ptr<DevicePart> result(new DevicePart);
  result->context_ = context;
  result->multiprocessors_ = static_cast<int>(part.sm.smCount);
  CUstream stream = nullptr;
  if (driver().create_stream(&stream, context, CU_STREAM_NON_BLOCKING, 0) != CUDA_SUCCESS) {
    return nullptr;
  }
  result->stream_ = stream;
  return result;
}

DevicePart::~DevicePart() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
  if (context_ != nullptr) driver().destroy(static_cast<CUgreenCtx>(context_));
}

int multiprocessors_of(cudaStream_t stream) {
  if (stream == nullptr || !driver().is_there) return 0;
  CUgreenCtx context = nullptr;
  CUdevResource part{};
  if (driver().context_of(stream, &context) != CUDA_SUCCESS || context == nullptr ||
      driver().context_resource(context, &part, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS) {
    return 0;
  }
  return static_cast<int>(part.sm.smCount);
}

}  // namespace leeway::cuda
