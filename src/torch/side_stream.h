// A second queue of work on a device, for transfers beside the computation of the current stream.
// On the CPU there is one queue, and work is done at once.
//
// One thread at a time. Memory that its work uses must be kept until that has ended.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>

namespace leeway {

class SideStream {
 public:
  // A place in the queue; an empty one is always reached.
  using Mark = std::shared_ptr<void>;

  explicit SideStream(at::Device device);
  ~SideStream();  // waits until it is empty
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  // Queues what `work` queues. It begins when all that the current stream has by now has ended;
  // returns where it ends.
  Mark run(const std::function<void()>& work);
  // What the current stream is given from here on begins after `mark`.
  void wait(const Mark& mark) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null on the CPU
};

}  // namespace leeway
