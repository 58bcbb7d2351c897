// What ranks with a device each exchange in a step: gradients are summed to the part of the flat
// layout that a rank updates, new weights are handed to all. A rank has the weights that passes
// read and the gradients whole, and the other half of the masters and the moments of its part; or
// its part of all of these (sharded_weights.h).
//
// All functions are called on all ranks at once unless they say otherwise.
#pragma once

#include <functional>
#include <memory>

#include "ranks/ranks.h"
#include "torch/device_group.h"
#include "torch/flat_layout.h"
#include "torch/split_masters.h"

namespace leeway {

class ShardExchange {
 public:
  // `ranks` must outlive it.
  ShardExchange(Ranks& ranks, std::unique_ptr<DeviceGroup> group) noexcept
      : ranks_(ranks), group_(std::move(group)) {}

  Ranks& ranks() const { return ranks_; }
  int rank() const { return ranks_.rank(); }
  int size() const { return ranks_.size(); }
  DeviceGroup& group() const { return *group_; }

  // The own part of the gradients becomes the sum over ranks.
  void sum(const at::Tensor& gradients);
  // The norm of all gradients from that of the own part.
  double norm(double own);
  // The own part of these weights goes to all.
  void hand_out(const at::Tensor& weights);
  // To rank 0: float32 weights, a piece after the other in their order, as each(first number,
  // numbers). The others give the `low` of their part, and the `high` where that is of the part
  // too, and call nothing. Without a `low` the other is float32.
  void collect(const FlatLayout& layout, const at::Tensor& high, const at::Tensor& low,
               const std::function<void(int64_t, const at::Tensor&)>& each);

  // The reverse for weights in parts: from rank 0's `host` to all, of each rank's own part float32
  // numbers on `device`, as each(first number in the part, numbers). Others' `host` is not read.
  void spread(const FlatLayout& layout, const Parameters& host, at::Device device,
              const std::function<void(int64_t, const at::Tensor&)>& each);

  // `work` for the device of `numbers`, which waits for other ranks.
  void timed(const at::Tensor& numbers, const std::function<void()>& work);
  // Seconds in these since the last question.
  double take_seconds();

 private:
  Ranks& ranks_;
  std::unique_ptr<DeviceGroup> group_;
  double seconds_ = 0.0;
};

}  // namespace leeway
