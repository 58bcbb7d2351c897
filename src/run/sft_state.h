// What a checkpoint of the supervised training contains besides the trainer: sft.json. The position
// among the demonstrations follows from the number of steps.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace leeway {

struct SftState {
  int64_t steps = 0;
  int64_t tokens = 0;           // of all training passes
  double seconds = 0.0;         // including those before a resume
  double loss = 0.0;            // of the last step
  double reward = -1.0;         // of the last check; -1: none yet
  bool reached_reward = false;  // sft.stop_at_reward was reached: nothing left to do
};

std::string sft_state_json(const SftState& state);
// Throws Error naming `name` and the key for invalid JSON, a missing key and an impossible value.
SftState parse_sft_state(const std::string& name, std::string_view json);

}  // namespace leeway
