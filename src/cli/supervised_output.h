// The last screen of a supervised run, which `leeway sft` and `leeway train --resume` share.
#pragma once

#include "run/supervised_run.h"

namespace leeway {

// The summary on stdout, what a person should know besides on stderr. Returns the exit code.
int show_summary(const SupervisedSummary& summary, bool json);

}  // namespace leeway
