#include "torch/device_room.h"

#include <cstdlib>
#include <limits>

#ifdef LEEWAY_CUDA
#include <c10/cuda/CUDAAllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace leeway {

void use_expandable_segments() {
#ifdef LEEWAY_CUDA
  for (const char* name : {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"}) {
    if (std::getenv(name) != nullptr) return;
  }
  c10::cuda::CUDACachingAllocator::setAllocatorSettings("expandable_segments:True");
#endif
}

int64_t free_bytes([[maybe_unused]] c10::Device device) {
#ifdef LEEWAY_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    size_t free = 0, total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return static_cast<int64_t>(free);
  }
#endif
  return std::numeric_limits<int64_t>::max();
}

int64_t spare_bytes(c10::Device device) {
#ifdef LEEWAY_CUDA
  if (device.is_cuda()) {
    constexpr size_t kAll = 0;  // both of the allocator's pools
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
    return free_bytes(device) + stats.reserved_bytes[kAll].current -
           stats.allocated_bytes[kAll].peak;
  }
#endif
  return free_bytes(device);
}

SnapshotForm snapshot_form(const SnapshotRoom& room) {
  constexpr int64_t kFull = 4, kRounded = 2;  // bytes of a weight
  const int64_t copies = room.may_round && !room.last_is_there ? 2 : 1;
  if (room.spare - room.keep_free >= copies * kFull * room.weights) return SnapshotForm::full;
  const bool fits_rounded = room.spare >= kRounded * room.weights;
  return room.may_round && fits_rounded ? SnapshotForm::rounded : SnapshotForm::on_host;
}

}  // namespace leeway
