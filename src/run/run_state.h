// What a checkpoint contains besides trainer and scheduler: run.json.
#pragma once

#include <cstdint>
#include <string>

#include "orchestrator/interfaces.h"

namespace leeway {

struct RunState {
  int64_t trained_tokens = 0, sft_steps = 0;
  double sft_seconds = 0.0;
  uint32_t initial_checksum = 0;  // of the policy at step 0, if the loss needs it
  int64_t schedule_begin = 0;     // optimizer steps taken before the learning rate's schedule began
  Metrics before;                 // the evaluation before RL
};

std::string run_state_json(const RunState& state);

// Throws Error naming `name` and the key for invalid JSON, a missing key and an impossible value.
RunState parse_run_state(const std::string& name, std::string_view json);

}  // namespace leeway
