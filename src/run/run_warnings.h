// Warnings that a run's numbers give: things that go wrong without failing. Each is given once,
// with a remedy. Reads no files: the caller hands in what is looked at.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "orchestrator/interfaces.h"

namespace leeway {

// Rollouts that a limit has cut off, by the limit, and what the limits are.
struct CutRollouts {
  int64_t by_new_tokens = 0, by_positions = 0, by_turns = 0;
  int64_t max_new_tokens = 0, positions = 0, max_turns = 0;
};

class RunWarnings {
 public:
  // `groups`: prompts of a batch. `save_bytes`: what a checkpoint and a weights folder take.
  RunWarnings(int64_t groups, uint64_t save_bytes) : groups_(groups), save_bytes_(save_bytes) {}

  // Of a run that goes on: the metrics of its first step, with which later ones are compared.
  void compare_with(const Metrics& first);
  // From a step's metrics, as in metrics.jsonl, and its rollouts. Steps come in order.
  std::vector<std::string> on_step(const Metrics& metrics, const CutRollouts& cut = {});
  // From an evaluation, compared with the one before RL; either may lack a reward.
  std::vector<std::string> on_evaluation(int64_t step, const Metrics& before, const Metrics& now);
  // From the free bytes where the run is written.
  std::vector<std::string> on_disk(uint64_t free_bytes);

 private:
  // The mean of a metric over the last few steps, once there are enough.
  struct Window {
    std::optional<double> add(double value);
    std::deque<double> values;
  };
  void warn(std::vector<std::string>& out, const char* name, const std::string& text);

  int64_t groups_;
  uint64_t save_bytes_;
  Window flat_, truncated_;
  std::optional<double> first_masked_, first_mismatch_;
  std::set<std::string> said_;
};

}  // namespace leeway
