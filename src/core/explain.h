// Describes a spec: the objective it actually computes.
#pragma once

#include <string>
#include <vector>

#include "leeway/loss.h"

namespace leeway {

struct Explanation {
  std::vector<std::string> objective;    // lines of formulas
  std::vector<std::string> dropped;      // what loses its policy term, and the consequences
  std::vector<std::string> gradient;     // where it flows and where it does not
  std::vector<std::string> denominator;  // what the sum is divided by
  std::vector<std::string> notes;        // double corrections and other surprises
  std::vector<std::string> streams;      // what it reads
};

Explanation explain(const LossSpec& spec);

}  // namespace leeway
