// Split rollouts for people and for programs: which step extends which sample, where the prefix
// breaks and why.
#pragma once

#include <string>
#include <vector>

#include "text/tokenizer.h"
#include "text/trajectory_json.h"

namespace leeway {

struct SplitRollout {
  NamedTrajectory trajectory;
  SplitTrajectory split;
};

// Reads a file of steps and splits every rollout (parse_trajectories, split_trajectory).
std::vector<SplitRollout> split_rollouts(const std::string& name, std::string_view text);

// With a tokenizer, tokens are shown as text too; ids that it does not have, and all without one,
// as numbers. `rollouts` is not empty.
std::string trajectory_json(const std::vector<SplitRollout>& rollouts, const Tokenizer* tokenizer);
std::string trajectory_text(const std::vector<SplitRollout>& rollouts, const Tokenizer* tokenizer);

}  // namespace leeway
