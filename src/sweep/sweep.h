// Runs every combination of a sweep file as a process of its own, `leeway train`, and reads what
// they leave. src/config/sweep_config.h describes the file.
//
// A run lives in OUTPUT/TABLE/ROW/seed_N; beside that folder lie
//
//   seed_N.settings.json   what was asked for: its --set values and a hash of the base file
//   seed_N.summary.json    what `train --json` printed, there once the process has succeeded
//   seed_N.log             its stderr
//
// With keep_weights = false a finished run's weights and checkpoints are removed.
//
// A run counts as finished where the summary says so and the settings are those of now; everything
// else is removed and run again. What the base file merely names, such as data, is not looked at.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "config/sweep_config.h"
#include "run/progress.h"

namespace leeway {

struct SweepRun {
  size_t table = 0, row = 0;  // index in SweepConfig
  int64_t seed = 0;
  std::string name;               // "reuse/icepop/seed_1"
  std::string folder;             // of the run: output_dir, slash, name
  std::vector<std::string> sets;  // all except output_dir and `thread_sets`
  // One thread for each side of the loop, unless the base or the sweep sets the numbers. Used with
  // several jobs. Not part of the settings: results do not depend on threads.
  std::vector<std::string> thread_sets;
  int64_t steps = 0;      // number of steps to train
  bool finished = false;  // before anything is run
};

struct SweepPlan {
  SweepConfig config;
  std::string base;            // path of the base file
  std::string base_hash;       // of its text
  std::vector<SweepRun> runs;  // the selected ones, in file order
};

// Reads the sweep file and its base and checks every run, selected or not. `only` are names of
// tables, of rows, or TABLE/ROW; empty: all. Notes go to `progress`. Writes nothing. Throws Error.
SweepPlan plan_sweep(const Catalog& catalog, const std::string& file,
                     const std::vector<std::string>& only, Progress& progress);

struct SweepResult {
  bool interrupted = false;
  std::vector<std::string> failures;  // one per run of the plan; empty: it is finished
};

// What a sweep needs of the program around it. `wait` waits until a child process may have ended,
// for half a second at most; true ends the sweep. `in_child` is called in every new process before
// its run starts.
struct SweepHost {
  Progress& progress;
  std::function<bool()> wait;
  std::function<void()> in_child;
};

// Runs what is not finished, at most `jobs` (at least 1) at a time, in processes of this program. A
// run that fails does not stop the others. When `wait` says so, all of them are killed. Must be
// called from a process of one thread, since it forks. Throws Error where files cannot be written;
// no run outlives this call.
SweepResult run_sweep(const SweepPlan& plan, int jobs, const SweepHost& host);

// The numbers of a finished run for a table; NaN if it has no such number.
struct SweepNumbers {
  double reward;                // held out, after the last step
  double max_mismatch_kl;       // maximum over steps of mismatch_kl/all/mean
  double dropped_share;         // 1 - kept_share, mean over steps
  double max_off_policy_level;  // maximum over all trained tokens
  double seconds;
};
// Throws Error if a file is not as `leeway train` writes it.
SweepNumbers read_numbers(const SweepRun& run);

// Writes OUTPUT/report.html with the finished runs of the first seed overlaid, and returns its
// path; nothing if there are none. Throws Error.
std::optional<std::string> write_sweep_report(const SweepPlan& plan, const SweepResult& result);

}  // namespace leeway
