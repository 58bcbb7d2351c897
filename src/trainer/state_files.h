// A trainer's state on disk.
//
//   config.json, model.safetensors   the policy, a Hugging Face folder
//   optimizer.safetensors            moments: `m.NAME` and `v.NAME` for each parameter
//   trainer.json                     {"format": 1, "optimizer_steps": n}; written last
#pragma once

#include <string>

#include "trainer/optimizer.h"

namespace leeway {

// Each file is written atomically. Throws Error (a full disk).
void save_state(const std::string& folder, const Parameters& policy, const AdamW& optimizer);

// Throws Error naming file and tensor: missing files, another model's state (other parameters, or
// the same ones put to another use), values that are not finite, squares that are negative. Nothing
// is changed then.
void load_state(const std::string& folder, Parameters& policy, AdamW& optimizer);

}  // namespace leeway
