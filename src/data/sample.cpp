#include "data/sample.h"

#include <map>

namespace leeway {

std::vector<std::vector<size_t>> samples_by_rollout(std::span<const Sample> samples) {
  std::vector<std::vector<size_t>> rollouts;
  std::map<int32_t, size_t> places;
  for (size_t i = 0; i < samples.size(); ++i) {
    size_t place = rollouts.size();
    if (samples[i].rollout_id >= 0) {
      place = places.try_emplace(samples[i].rollout_id, place).first->second;
    }
    if (place == rollouts.size()) rollouts.emplace_back();
    rollouts[place].push_back(i);
  }
  return rollouts;
}

}  // namespace leeway
