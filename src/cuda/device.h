// CUDA for the kernels' host code: checked calls, and a workspace divided into arrays.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "leeway/error.h"

namespace leeway::cuda {

// Throws Error with CUDA's error message.
inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(std::string("CUDA: ") + what + ": " + cudaGetErrorString(status));
}

inline void check_launch(const char* kernel) { check_cuda(cudaGetLastError(), kernel); }

inline int multiprocessors() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "the current device");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
             "its multiprocessors");
  return count;
}

// Hands out arrays from one block of memory, each 256-byte aligned. With a null block it only
// counts, so that the same code computes a workspace's layout and its size.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <class T>
  T* take(int64_t count) {
    T* place = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return place;
  }
  int64_t used() const { return used_; }

 private:
  char* memory_;
  int64_t used_ = 0;
};

}  // namespace leeway::cuda
