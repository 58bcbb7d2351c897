// Runs as a user starts them: from the folder of another run, whatever kind it is.
#pragma once

#include <string>
#include <variant>

#include "leeway/presets.h"
#include "run/config_source.h"
#include "run/progress.h"
#include "run/run_summary.h"
#include "run/supervised_run.h"

namespace leeway {

// Goes on with the run in `folder` from its newest checkpoint that is whole, with its own
// configuration or that of `source`. One that has finished is left as it is. Throws Error for the
// user's mistakes, such as settings that may not change.
using ResumedSummary = std::variant<RunSummary, SupervisedSummary>;
ResumedSummary resume_run(const Catalog& catalog, const std::string& folder,
                          const ConfigSource& source, Progress& progress,
                          const StopCondition& should_stop);
// The same for a run of `leeway sft`; one of `leeway train` is refused.
SupervisedSummary resume_supervised_run(const Catalog& catalog, const std::string& folder,
                                        const ConfigSource& source, Progress& progress,
                                        const StopCondition& should_stop);

// A new training run with the last weights of the one in `folder` and, with `keep_optimizer`, its
// moments. Throws Error for the user's mistakes.
struct StartingPoint {
  std::string folder;
  bool keep_optimizer = false;
};
RunSummary start_from_run(const Catalog& catalog, const StartingPoint& from,
                          const ConfigSource& source, Progress& progress,
                          const StopCondition& should_stop);

}  // namespace leeway
