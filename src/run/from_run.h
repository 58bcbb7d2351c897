// `leeway train --from RUN`: a new run that starts from another run's weights.
#pragma once

#include <string>
#include <vector>

#include "config/config.h"
#include "leeway/presets.h"
#include "run/checkpoints.h"

namespace leeway {

// Where a run can start from: another run's last weights.
struct RunOrigin {
  std::string run;        // its folder
  std::string step;       // "step 12", "supervised step 3"
  std::string weights;    // a Hugging Face folder
  std::string optimizer;  // the checkpoint with the moments; empty: not requested
  bool rounded = false;   // these weights are bf16, and the run had them in float32
};

// The last weights of a run of `leeway train` or `leeway sft`, whether it finished, was stopped or
// was killed: its newest checkpoint or the newest folder in weights/, whichever is later; of the
// same step the folder, unless its weights are rounded. With `keep_optimizer` it is a checkpoint,
// which has the moments. Throws Error if the folder is not a run or has nothing to start from.
// Changes nothing.
RunOrigin origin_of(const std::string& run, bool keep_optimizer);

// The configuration of the new run: that of `file`, or of the origin if none is given, without
// `unsets` and overridden by `sets`; its model is the origin's weights, and it has no [sft].
// `notes` says which parts of the file are dropped.
Config config_from(const Catalog& catalog, const RunOrigin& origin, const std::string& file,
                   const std::vector<std::string>& sets, const std::vector<std::string>& unsets,
                   std::vector<std::string>& notes);

}  // namespace leeway
