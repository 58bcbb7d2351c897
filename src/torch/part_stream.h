// The queue that a trainer's work on a GPU goes to: torch's usual one, which may use the whole
// device, or one for some of its multiprocessors (cuda/device_part.h).
#pragma once

#include <ATen/ATen.h>

#include <memory>

namespace leeway {

class PartStream {
 public:
  PartStream();  // the whole device: whatever stream is the thread's current one
  // About that share of a CUDA device's multiprocessors; the whole where it cannot be divided.
  PartStream(at::Device device, double share);
  ~PartStream();  // waits for what is queued
  PartStream(PartStream&&) noexcept;
  PartStream& operator=(PartStream&&) noexcept;

  bool is_part() const { return impl_ != nullptr; }

  // While it lives, what the calling thread computes is queued here.
  class Scope {
   public:
    explicit Scope(const PartStream& stream);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    struct Guard;
    std::unique_ptr<Guard> guard_;
  };

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Waits for the device's current stream, and gives back what torch keeps of the memory that was
// used there: another stream has no use for it.
void settle(at::Device device);

}  // namespace leeway
