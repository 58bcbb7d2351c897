// A group of ranks with a GPU each, by NCCL. The ranks' own links carry what NCCL needs to begin,
// and say when it must stop: NCCL itself would wait for a lost rank for ever.
#pragma once

#include <memory>
#include <string>

#include "ranks/ranks.h"
#include "torch/device_group.h"

namespace leeway {

// Why this build has no such groups; empty if it has.
std::string why_no_nccl();

// Called on all ranks at once; `ranks` must outlive it. When a rank is lost, what waits on a device
// ends, with numbers that mean nothing, and the next call throws Lost. Throws Error with NCCL's
// message, too.
std::unique_ptr<DeviceGroup> make_nccl_group(Ranks& ranks, at::Device device);

}  // namespace leeway
