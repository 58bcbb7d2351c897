// An adapter put into its base: a plain Hugging Face folder.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace leeway {

struct MergeResult {
  int64_t tensors = 0;  // in the folder
  int64_t merged = 0;   // of them changed by the adapter
  uint64_t bytes = 0;   // of the weights
};

// Writes to `out`, which must not exist, the folder `base` with W + scale B A in place of each
// matrix that the adapter has: summed in float32, rounded to the base's dtype. Files and shards are
// those of the base; a tensor at a time is in memory. The folder appears whole or not at all.
// `progress` may be empty: tensors done, of how many. Throws Error as load_adapter does, and for a
// base that is an adapter itself, a full disk and numbers that are not finite after the sum.
MergeResult merge_adapter(const std::string& base, const std::string& adapter,
                          const std::string& out,
                          const std::function<void(size_t done, size_t total)>& progress = {});

}  // namespace leeway
