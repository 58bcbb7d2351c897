#include "torch/part_stream.h"

#ifdef LEEWAY_CUDA
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/device.h"
#include "cuda/device_part.h"
#endif

namespace leeway {

#ifdef LEEWAY_CUDA

struct PartStream::Impl {
  Impl(std::unique_ptr<cuda::DevicePart> of, c10::DeviceIndex device)
      : part(std::move(of)), stream(c10::cuda::getStreamFromExternal(part->stream(), device)) {}
  // Torch's memory for the stream must not outlive it.
  ~Impl() {
    static_cast<void>(cudaStreamSynchronize(part->stream()));
    c10::cuda::CUDACachingAllocator::emptyCache();
  }
  std::unique_ptr<cuda::DevicePart> part;
  c10::cuda::CUDAStream stream;
};

struct PartStream::Scope::Guard {
  explicit Guard(c10::cuda::CUDAStream stream) : guard(stream) {}
  c10::cuda::CUDAStreamGuard guard;
};

PartStream::PartStream(at::Device device, double share) {
  if (!device.is_cuda()) return;
  const c10::cuda::CUDAGuard guard(device);
  auto part = cuda::DevicePart::make(static_cast<int>(share * cuda::multiprocessors()));
  if (part) impl_ = std::make_unique<Impl>(std::move(part), device.index());
}

PartStream::Scope::Scope(const PartStream& stream)
    : guard_(stream.impl_ ? std::make_unique<Guard>(stream.impl_->stream) : nullptr) {}

void settle(at::Device device) {
  if (!device.is_cuda()) return;
  c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
  c10::cuda::CUDACachingAllocator::emptyCache();
}

#else

struct PartStream::Impl {};
struct PartStream::Scope::Guard {};
PartStream::PartStream(at::Device, double) {}
PartStream::Scope::Scope(const PartStream&) {}
void settle(at::Device) {}

#endif

PartStream::PartStream() = default;
PartStream::~PartStream() = default;
PartStream::PartStream(PartStream&&) noexcept = default;
PartStream& PartStream::operator=(PartStream&&) noexcept = default;
PartStream::Scope::~Scope() = default;

}  // namespace leeway
