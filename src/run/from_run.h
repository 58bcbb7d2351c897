// `leeway train --from RUN`: a new run that starts where another one is.
#pragma once

#include <string>
#include <vector>

#include "config/config.h"
#include "leeway/presets.h"
#include "run/checkpoints.h"

namespace leeway {

// Where a run is: its last weights.
struct RunOrigin {
  std::string run;        // its folder
  std::string step;       // "step 12", "supervised step 3"
  std::string weights;    // a Hugging Face folder
  std::string optimizer;  // the checkpoint with the moments; empty: not asked for
};

// The last weights of a run of `leeway train` or `leeway sft`, whether it has finished, was stopped
// or killed: its newest checkpoint or the newest folder of weights/, whichever is later. With
// `keep_optimizer` it is a checkpoint, which has the moments. Throws Error: no run's folder,
// nothing to start from. Changes nothing.
RunOrigin origin_of(const std::string& run, bool keep_optimizer);

// The configuration of the new run: that of `file`, or of the origin where none is named, with
// `sets` over it and without `unsets`; its model is the origin's weights, and it has no [sft].
// `notes` says what of the file is left out.
Config config_from(const Catalog& catalog, const RunOrigin& origin, const std::string& file,
                   const std::vector<std::string>& sets, const std::vector<std::string>& unsets,
                   std::vector<std::string>& notes);

}  // namespace leeway
