// The frozen weights below an adapter on a device: one copy for all that read it.
#pragma once

#include <ATen/ATen.h>

#include <memory>

#include "torch/flat_layout.h"

namespace leeway {

struct SharedBase {
  FlatLayout layout;
  at::Tensor flat;  // in the compute type
  NetworkTensors network;
};

// The weights of `base` on the device in this type, to be read only. They are copied to the device
// once: as long as a returned pointer lives, further calls return the same weights. So a trainer,
// its reference and the engines of a process share one copy, although their backends are made
// apart. From any thread; any stream may read what it returns.
std::shared_ptr<const SharedBase> base_on_device(const std::shared_ptr<const Parameters>& base,
                                                 at::Device device, at::ScalarType compute);

}  // namespace leeway
