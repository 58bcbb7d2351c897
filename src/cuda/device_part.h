// Some of a device's multiprocessors as a stream: what runs on it leaves the others free, for work
// that must not wait until a large kernel has ended. Green contexts of CUDA's driver.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

namespace leeway::cuda {

class DevicePart {
 public:
  // `wanted` multiprocessors of the current device, rounded up to what it can be divided into; null
  // where the driver cannot do it, or none would be left. Throws Error where the device itself does
  // not answer, also for what failed on it before.
  static std::unique_ptr<DevicePart> make(int wanted);
  ~DevicePart();  // the stream must be done
  DevicePart(const DevicePart&) = delete;
  DevicePart& operator=(const DevicePart&) = delete;

  // Does not wait for the default stream, nor that for it.
  cudaStream_t stream() const { return stream_; }
  int multiprocessors() const { return multiprocessors_; }

 private:
  DevicePart() = default;
  void* context_ = nullptr;
  cudaStream_t stream_ = nullptr;
  int multiprocessors_ = 0;
};

// How many multiprocessors a stream's kernels run on, where that is not all of them; else 0.
int multiprocessors_of(cudaStream_t stream);

}  // namespace leeway::cuda
