// The last tokens of a sequence, with all that belongs to them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "data/sampling.h"

namespace leeway {

// The tokens from number `first` on.
inline SampledSequence tokens_from(const SampledSequence& all, size_t first) {
  SampledSequence tail;
  tail.request = all.request, tail.sample = all.sample, tail.finish = all.finish;
  const auto copy = [&](const auto& from, auto& to) {
    to.assign(from.begin() + static_cast<std::ptrdiff_t>(std::min(first, from.size())), from.end());
  };
  copy(all.ids, tail.ids);
  copy(all.raw_logprobs, tail.raw_logprobs);
  copy(all.processed_logprobs, tail.processed_logprobs);
  copy(all.versions, tail.versions);
  return tail;
}

}  // namespace leeway
