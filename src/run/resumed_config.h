// The configuration of a run that goes on.
#pragma once

#include <string>
#include <vector>

#include "config/config.h"
#include "leeway/presets.h"

namespace leeway {

struct ResumedConfig {
  Config now;
  int64_t max_steps_before = 0, sft_max_steps_before = 0;  // in the run
};

// That of `folder`, or of `file` where one is named, without `unsets` and with `sets` over it.
// Throws Error: no run's folder; keys that may not change and do, with both values; a config.toml
// that is not the one the run wrote; data files whose content is another than when the run began.
// Nothing is written.
ResumedConfig resumed_config(const Catalog& catalog, const std::string& folder,
                             const std::string& file, const std::vector<std::string>& sets,
                             const std::vector<std::string>& unsets);

}  // namespace leeway
