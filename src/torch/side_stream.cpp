#include "torch/side_stream.h"

#ifdef LEEWAY_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace leeway {

#ifdef LEEWAY_CUDA

// Before the computation where both are ready: others wait for what is moved.
struct SideStream::Impl {
  explicit Impl(at::Device device)
      : stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/true, device.index())) {}
  c10::cuda::CUDAStream current() const {
    return c10::cuda::getCurrentCUDAStream(stream.device_index());
  }
  c10::cuda::CUDAStream stream;
};

SideStream::SideStream(at::Device device) {
  if (device.is_cuda()) impl_ = std::make_unique<Impl>(device);
}

SideStream::~SideStream() {
  // A destructor must not throw. A device that has failed says so at its next use.
  if (impl_) static_cast<void>(cudaStreamSynchronize(impl_->stream.stream()));
}

SideStream::Mark SideStream::run(const std::function<void()>& work) {
  if (!impl_) {
    work();
    return {};
  }
  at::cuda::CUDAEvent so_far;
  so_far.record(impl_->current());
  so_far.block(impl_->stream);
  const c10::cuda::CUDAStreamGuard guard(impl_->stream);
  work();
  auto end = std::make_shared<at::cuda::CUDAEvent>();
  end->record(impl_->stream);
  return end;
}

void SideStream::wait(const Mark& mark) const {
  if (mark) static_cast<at::cuda::CUDAEvent*>(mark.get())->block(impl_->current());
}

#else

struct SideStream::Impl {};
SideStream::SideStream(at::Device) {}
SideStream::~SideStream() = default;
SideStream::Mark SideStream::run(const std::function<void()>& work) {
  work();
  return {};
}
void SideStream::wait(const Mark&) const {}

#endif

}  // namespace leeway
