// Shared by the tests that run on a GPU. Without one they are skipped with a message.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <memory>
#include <span>
#include <vector>

#include "core/float32/sequence_math.h"
#include "cuda/device.h"
#include "cuda/loss.h"

namespace leeway::cuda {

inline bool has_gpu() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

#define LEEWAY_NEEDS_GPU() \
  if (!has_gpu()) GTEST_SKIP() << "no GPU: the kernels were compiled, not run"

// An array on the device. Memory that was not copied to contains NaN, so that forgotten writes of a
// kernel show.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : count_(count) {
    void* place = nullptr;
    check_cuda(cudaMalloc(&place, count * sizeof(T) + 16), "memory");
    data_ = static_cast<T*>(place);
    check_cuda(cudaMemset(place, 0xff, count * sizeof(T) + 16), "memory");
  }
  explicit DeviceArray(std::span<const T> values) : DeviceArray(values.size()) {
    if (values.empty()) return;
    check_cuda(cudaMemcpy(data_, values.data(), values.size_bytes(), cudaMemcpyHostToDevice),
               "a copy to the device");
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(std::span<const T>(values)) {}
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  T* or_null() const { return count_ == 0 ? nullptr : data_; }
  std::vector<T> values() const {
    std::vector<T> out(count_);
    check_cuda(cudaDeviceSynchronize(), "a kernel");
    check_cuda(cudaMemcpy(out.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost),
               "a copy from the device");
    return out;
  }

 private:
  size_t count_;
  T* data_ = nullptr;
};

// A batch on the device.
class DeviceBatch {
 public:
  explicit DeviceBatch(const BatchView<float>& view)
      : offsets_(view.offsets),
        advantages_(view.advantages),
        weights_(view.weights),
        mask_(view.mask),
        versions_(view.versions),
        rollout_ids_(view.rollout_ids) {
    batch_.tokens = view.token_count();
    batch_.sequences = view.sequence_count();
    batch_.offsets = offsets_.data();
    batch_.advantages = advantages_.data();
    batch_.weights = weights_.or_null();
    batch_.mask = mask_.or_null();
    batch_.versions = versions_.or_null();
    batch_.rollout_ids = rollout_ids_.or_null();
    for (int k = 0; k < kStreamCount; ++k) {
      streams_.push_back(std::make_unique<DeviceArray<float>>(view.stream(static_cast<Stream>(k))));
      batch_.streams[k] = streams_.back()->or_null();
    }
  }
  const LossBatch& batch() const { return batch_; }

 private:
  DeviceArray<int64_t> offsets_;
  DeviceArray<float> advantages_, weights_;
  DeviceArray<uint8_t> mask_;
  DeviceArray<int32_t> versions_, rollout_ids_;
  std::vector<std::unique_ptr<DeviceArray<float>>> streams_;
  LossBatch batch_;
};

}  // namespace leeway::cuda
