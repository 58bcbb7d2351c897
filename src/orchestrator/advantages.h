// From the rewards of a group (one prompt, N rollouts) to advantages.
//
//   group_mean         A = r - mean(r)
//   group_deviation    A = (r - mean) / deviation, the unbiased one           (GRPO)
//   leave_one_out      A = r - mean of the others = (r - mean) N / (N - 1)    (RLOO)
//   max_rl             A = (r - mean) / mean; 0 where the mean is not positive
//   reinforce_pp       A = (r - mean) / deviation of r - mean over all rollouts of the batch, the
//                      population's; 0 where it is 0                 (REINFORCE++ baseline)
//   batch_mean         A = r - mean over all rollouts of the batch
//   none               A = r                            (REINFORCE without a baseline)
//
// The first five compare rollouts of one prompt: a group of one, and a group whose rewards are all
// equal, have advantages 0, exactly. With the last two they keep their signal, and only a batch of
// equal rewards (batch_mean) or a reward of 0 (none) has advantages 0, exactly.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "config/settings.h"

namespace leeway {

struct AdvantageOptions {
  AdvantageKind kind = AdvantageKind::group_mean;
  // Length shaping, applied first: r' = r - length_penalty * (length - shortest) / (longest -
  // shortest) over the rollouts with the group's best reward, if that is positive; 0: off. Other
  // rewards stay, as do all rewards of a group without a success: a short wrong answer gains
  // nothing.
  double length_penalty = 0.0;
};

struct GroupRewards {
  std::vector<double> rewards;
  std::vector<int64_t> lengths;  // sampled tokens of each; used only with length_penalty
};

struct AdvantageResult {
  std::vector<std::vector<double>> advantages;  // indexed like the groups
  int64_t singleton_groups = 0;
  // Two or more rollouts without a signal: all shaped rewards equal; for batch_mean and none, all
  // advantages 0.
  int64_t zero_variance_groups = 0;
};

// The rewards of a group after length shaping.
std::vector<double> shaped_rewards(const GroupRewards& group, double length_penalty);

// Advantages do not depend on the order of the rollouts or groups, bit for bit. Throws Error naming
// group and rollout for an empty group and for a reward that is not finite; for a length_penalty
// that is negative or not finite; and for rewards so large that an advantage is not finite.
AdvantageResult compute_advantages(std::span<const GroupRewards> groups,
                                   const AdvantageOptions& options);

}  // namespace leeway
