// A description of a loss, as `leeway loss explain` prints it and a run folder stores it.
#pragma once

#include <string>

#include "leeway/loss.h"

namespace leeway {

std::string explain_text(const LossSpec& spec);

}  // namespace leeway
