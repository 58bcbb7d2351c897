// Golden files: cases of other code bases with their results, and whether we get the same.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/foreign/foreign.h"
#include "leeway/presets.h"

namespace leeway {

struct CaseResult {
  std::string name;
  bool ok = false;
  bool has_loss = false;
  double loss = 0.0;
  std::vector<std::vector<double>> grad;     // [S][..]
  std::vector<std::vector<double>> weights;  // applied detached weights, [S][..]
  std::vector<std::vector<double>> mask;     // positions left in the loss, [S][..]
  std::vector<ForeignMetric> metrics;
  std::vector<std::pair<std::string, std::vector<double>>> outputs;  // proximal approximations
  std::vector<std::string> inert;
  std::string difference;  // the first thing that differs, or why nothing could be computed
  int compared_numbers = 0;
};

// Runs every case of a golden file with the double reference. Throws Error if the file itself is
// invalid; a case that cannot be computed is a result that is not ok.
std::vector<CaseResult> run_golden(const Catalog& catalog, const std::string& name,
                                   std::string_view text);

}  // namespace leeway
