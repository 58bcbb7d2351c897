#include "trainer/minibatches.h"

#include <algorithm>

#include "base/rng.h"

namespace leeway {

std::vector<std::vector<size_t>> split_minibatches(std::span<const Sample> samples, int64_t count,
                                                   uint64_t seed) {
  std::vector<std::vector<size_t>> rollouts = samples_by_rollout(samples);
  const size_t parts = static_cast<size_t>(count);
  if (parts > 1) {
    Rng rng(seed);
    for (size_t i = rollouts.size(); i > 1; --i) std::swap(rollouts[i - 1], rollouts[rng.below(i)]);
  }
  std::vector<std::vector<size_t>> out;
  for (size_t part = 0; part < parts; ++part) {
    std::vector<size_t> samples_of;
    for (size_t r = rollouts.size() * part / parts; r < rollouts.size() * (part + 1) / parts; ++r) {
      samples_of.insert(samples_of.end(), rollouts[r].begin(), rollouts[r].end());
    }
    std::sort(samples_of.begin(), samples_of.end());
    if (!samples_of.empty()) out.push_back(std::move(samples_of));
  }
  return out;
}

}  // namespace leeway
