// Several arrays in one allocation that is reused from pass to pass.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/aligned.h"

namespace leeway {

// Register the arrays with `want`; `lay_out` then points them into `memory`, each aligned to a
// cache line, growing it if necessary. Their contents are unspecified.
class Workspace {
 public:
  void want(float*& array, int64_t floats) { wanted_.emplace_back(&array, floats); }

  void lay_out(AlignedVector<float>& memory) const {
    size_t total = 0;
    for (const auto& [array, floats] : wanted_) total += padded(floats);
    if (memory.size() < total) {
      memory = {};  // drop the old contents first: they need not be copied
      memory.resize(total);
    }
    float* next = memory.data();
    for (const auto& [array, floats] : wanted_) {
      *array = next;
      next += padded(floats);
    }
  }

 private:
  static size_t padded(int64_t floats) { return static_cast<size_t>((floats + 15) / 16 * 16); }
  std::vector<std::pair<float**, int64_t>> wanted_;
};

}  // namespace leeway
