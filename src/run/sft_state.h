// What a checkpoint of the supervised training holds beside the trainer: sft.json. The place among
// the demonstrations follows from the number of steps.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace leeway {

struct SftState {
  int64_t steps = 0;
  int64_t tokens = 0;           // of all training passes
  double seconds = 0.0;         // resumes included
  double loss = 0.0;            // of the last step
  double reward = -1.0;         // of the last look; -1: there was none
  bool reached_reward = false;  // sft.stop_at_reward: there is nothing left to do
};

std::string sft_state_json(const SftState& state);
// Throws Error naming `name` and the key: no JSON, a key that is missing, a value that cannot be.
SftState parse_sft_state(const std::string& name, std::string_view json);

}  // namespace leeway
