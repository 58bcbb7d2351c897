// Trajectories as JSON lines: one step, or one rollout with its steps, a line.
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
// {"rollout"?, "steps": [..]}; steps of equal `rollout` belong together, in file order, and lines
// without one to a rollout named "0". Missing log-probabilities are zeros. Empty lines are skipped.
// Throws Error "NAME line N: .." for what is malformed or disagrees in length, and if there is no
// step at all.
std::vector<NamedTrajectory> parse_trajectories(const std::string& name, std::string_view text);

}  // namespace leeway
