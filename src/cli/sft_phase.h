// Supervised training on demonstrations: the warm start of a run, and the job of `leeway sft`.
#pragma once

#include "cli/interrupt.h"
#include "cli/run_files.h"
#include "cli/run_progress.h"
#include "cli/run_setup.h"
#include "leeway/presets.h"

namespace leeway {

struct SftResult {
  Parameters weights;
  int64_t steps = 0;
  double seconds = 0.0;
  double loss = 0.0;     // of the last step
  int64_t tokens = 0;    // of all training passes
  bool stopped = false;  // by Ctrl-C
  std::string failure;   // not empty: gave up before a step; weights are the last good ones
};

// Trains setup.weights as [sft] says, writing sft.jsonl. Demonstrations come from the file of
// `data`, gone through in epochs of random order, or fresh from the environments. Throws Error for
// demonstrations that cannot be had.
SftResult run_sft(const RunSetup& setup, const Catalog& catalog, RunFiles& files,
                  RunProgress& progress, const Interrupt& interrupt);

}  // namespace leeway
