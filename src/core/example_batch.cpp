#include "core/example_batch.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/rng.h"

namespace leeway {

Batch example_batch(int sequences, int mean_length, uint64_t seed) {
  constexpr int kGroup = 8, kCurrentVersion = 12;
  Rng rng(seed);
  Batch batch;
  std::vector<double> rewards(kGroup);
  double mean = 0.0;
  for (int s = 0; s < sequences; ++s) {
    if (s % kGroup == 0) {
      const double skill = rng.uniform();
      mean = 0.0;
      for (double& reward : rewards) mean += (reward = rng.uniform() < skill ? 1.0 : 0.0) / kGroup;
    }
    const double advantage = rewards[static_cast<size_t>(s % kGroup)] - mean;
    const int age = static_cast<int>(rng.below(4));
    const int prompt = 8 + static_cast<int>(rng.below(24));
    const int length =
        prompt + 1 +
        static_cast<int>(static_cast<double>(mean_length) * (0.25 + 1.5 * rng.uniform()));
    for (int t = 0; t < length; ++t) {
      // Most tokens are nearly certain, some are real choices.
      const double surprise = rng.uniform() < 0.7 ? 0.05 : 1.2;
      const double pi = -surprise * -std::log(1.0 - rng.uniform()) - 1e-4;
      const double softness = std::min(1.0, -pi + 0.02);  // certain tokens hardly move
      double drift = softness * 0.12 * static_cast<double>(age) * rng.normal();
      if (rng.uniform() < 0.002) drift += 2.5 * rng.normal();
      const double numeric = softness * 0.03 * rng.normal();
      batch.pi.push_back(pi);
      batch.prox.push_back(std::min(-1e-6, pi - 0.25 * drift));
      batch.rollout.push_back(std::min(-1e-6, pi - drift - numeric));
      batch.ref.push_back(std::min(-1e-6, pi + softness * 0.3 * rng.normal()));
      batch.teacher.push_back(std::min(-1e-6, pi + softness * 0.5 * rng.normal()));
      batch.advantages.push_back(advantage);
      batch.mask.push_back(t >= prompt);
      batch.versions.push_back(kCurrentVersion - age);
    }
    batch.offsets.push_back(static_cast<int64_t>(batch.pi.size()));
    batch.groups.push_back(std::to_string(s / kGroup));
  }
  return batch;
}

}  // namespace leeway
