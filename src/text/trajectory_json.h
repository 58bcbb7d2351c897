// Trajectories as JSON lines: one step, or one rollout with its steps, per line.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/trajectory.h"

namespace leeway {

struct NamedTrajectory {
  std::string rollout;
  std::vector<TrajectoryStep> steps;
};

// Lines {"rollout"?, "prompt_ids", "completion_ids", "logprobs"?, "versions"?, "mask"?} or
// {"rollout"?, "steps": [..]}. Steps with equal `rollout` belong together, in file order; lines
// without one belong to a rollout named "0". Missing logprobs are zeros. Empty lines are skipped.
// Throws Error "NAME line N: .." for malformed lines and mismatched lengths, and if there are no
// steps at all.
std::vector<NamedTrajectory> parse_trajectories(const std::string& name, std::string_view text);

}  // namespace leeway
