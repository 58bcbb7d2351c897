#include "cli/supervised_output.h"

#include <fmt/format.h>

#include "cli/output.h"
#include "run/resume_hint.h"

namespace leeway {

int show_summary(const SupervisedSummary& summary, bool json) {
  if (summary.end == "gave_up") say("leeway: the run gave up: " + summary.reason);
  if (summary.finished_before) {
    say(
        fmt::format("{}: the supervised training has finished, {} steps; nothing is done. For RL "
                    "from its weights: leeway train --from {}",
                    summary.folder, summary.state.steps, summary.folder));
  }
  print(json ? summary_json(summary) : summary_text(summary));
  if (summary.end != "finished") {
    if (const std::string hint = resume_hint(summary.folder); !hint.empty()) say(hint);
  }
  return summary.end == "gave_up" ? 3 : 0;
}

}  // namespace leeway
