// The configuration of a resumed run.
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

// The configuration in `folder`, or in `file` if given, without `unsets` and overridden by `sets`.
// Throws Error if the folder is not a run's; for keys that must not change but do, with both
// values; for a config.toml that is not the one the run wrote; and for data files whose content has
// changed since the run began. Writes nothing.
ResumedConfig resumed_config(const Catalog& catalog, const std::string& folder,
                             const std::string& file, const std::vector<std::string>& sets,
                             const std::vector<std::string>& unsets);

}  // namespace leeway
