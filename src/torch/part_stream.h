// The queue that a trainer's work on a GPU goes to: torch's usual one, which may use the whole
// device, or one for some of its multiprocessors (cuda/device_part.h).
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <mutex>

namespace leeway {

class PartStream {
 public:
  PartStream() = default;  // the whole device: whatever stream is the thread's current one
  // About that share of a CUDA device's multiprocessors; the whole where it cannot be divided. All
  // of one device are the same stream, whose share is that of the first; whether there is one is
  // decided then as well, once for the process. Throws Error where the device does not answer.
  PartStream(at::Device device, double share);

  bool is_part() const { return part_ != nullptr; }

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
  struct Part;
  const Part* part_ = nullptr;
};

// Waits for the device's current stream, and gives back what torch holds of unused memory: what one
// stream has used is of no use to another.
void settle(at::Device device);

// To be held while a graph is captured. Torch cannot give memory back during a capture, so that
// `settle` waits for its end.
std::unique_lock<std::mutex> capture_turn();

}  // namespace leeway
