// Float32 weights as the bf16 ones that passes read and 16 more bits each (cuda/split_float.h),
// over flat memory.
#pragma once

#include <ATen/ATen.h>

#include "torch/flat_layout.h"

namespace leeway {

// bf16 and int16, both [layout.size] or a part of it.
struct SplitMasters {
  at::Tensor high, low;

  SplitMasters part(int64_t begin, int64_t count) const {
    return {high.narrow(0, begin, count), low.narrow(0, begin, count)};
  }
};

// float32; and back, changing a number in 100,000 by its last bit, and none that was joined.
at::Tensor joined(const SplitMasters& masters);
void split(const at::Tensor& full, const SplitMasters& masters);

// As copy_to_flat and copy_to_host (flat_layout.h), without a float32 copy on the device. The first
// also for the part of the layout that begins at number `first`.
void copy_to_flat(const FlatLayout& layout, const Parameters& host, const SplitMasters& masters,
                  int64_t first = 0);
void copy_to_host(const FlatLayout& layout, const SplitMasters& masters, Parameters& host);

}  // namespace leeway
