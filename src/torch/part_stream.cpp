#include "torch/part_stream.h"

#ifdef LEEWAY_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <map>

#include "cuda/device.h"
#include "cuda/device_part.h"
#endif

namespace leeway {

#ifdef LEEWAY_CUDA

struct PartStream::Part {
  Part(std::unique_ptr<cuda::DevicePart> of, c10::DeviceIndex device)
      : part(std::move(of)), stream(c10::cuda::getStreamFromExternal(part->stream(), device)) {}
  std::unique_ptr<cuda::DevicePart> part;
  c10::cuda::CUDAStream stream;
};

struct PartStream::Scope::Guard {
  explicit Guard(c10::cuda::CUDAStream stream) : guard(stream) {}
  c10::cuda::CUDAStreamGuard guard;
};

// One for a device, which stays as torch's own streams do: memory belongs to the stream that it was
// allocated on, and snapshots outlive the trainer that made them.
PartStream::PartStream(at::Device device, double share) {
  if (!device.is_cuda()) return;
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, const Part*> parts;
  const std::lock_guard lock(mutex);
  const auto [at, is_new] = parts.try_emplace(device.index(), nullptr);
  if (is_new) {
    const c10::cuda::CUDAGuard guard(device);
    try {
      settle(device);  // the driver needs memory, of which torch may hold all
      auto part = cuda::DevicePart::make(static_cast<int>(share * cuda::multiprocessors()));
      if (part) at->second = new Part(std::move(part), device.index());
    } catch (...) {
      parts.erase(at);  // nothing was decided
      throw;
    }
  }
  part_ = at->second;
}

PartStream::Scope::Scope(const PartStream& stream)
    : guard_(stream.part_ != nullptr ? std::make_unique<Guard>(stream.part_->stream) : nullptr) {}

void settle(at::Device device) {
  if (!device.is_cuda()) return;
  c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
  const auto turn = capture_turn();
  c10::cuda::CUDACachingAllocator::emptyCache();
}

#else

struct PartStream::Part {};
struct PartStream::Scope::Guard {};
PartStream::PartStream(at::Device, double) {}
PartStream::Scope::Scope(const PartStream&) {}
void settle(at::Device) {}

#endif

std::unique_lock<std::mutex> capture_turn() {
  static std::mutex mutex;
  return std::unique_lock(mutex);
}

PartStream::Scope::~Scope() = default;

}  // namespace leeway
