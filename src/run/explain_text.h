// A loss in words, as `leeway loss explain` prints it and a run folder keeps it.
#pragma once

#include <string>

#include "leeway/loss.h"

namespace leeway {

std::string explain_text(const LossSpec& spec);

}  // namespace leeway
