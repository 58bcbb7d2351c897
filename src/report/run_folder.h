// Reads a run folder for the page of `leeway report`. docs/runs.md describes the files.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "report/jsonl_table.h"

namespace leeway {

// How much of `rollouts/` goes into a page, per run.
struct RolloutLimits {
  size_t files = 8;
  size_t rollouts = 64;
  size_t tokens = 200000;  // of all rollouts; the first is always taken, whatever its length
};

// One setting of an effective configuration, all three as text. `key` is the full path, such as
// trainer.loss.preset or environment[0].name; `origin` is the comment after the value.
struct ConfigEntry {
  std::string key, value, origin;
};

// The settings in a config.toml as a run writes it, one per line. Lines of any other form are
// skipped, since the page shows the whole text as well.
std::vector<ConfigEntry> config_entries(std::string_view toml);

// One JSON object for the page:
//
//   {"name", "path",
//    "end": {"end", "reason", "steps"} or null,
//    "metrics", "eval", "sft": {"step": [..], "columns": {"reward/all/mean": [..], ..}},
//    "objective", "config": text, "config_entries": [{"key", "value", "origin"}, ..],
//    "given_up": [the last objects of given_up.jsonl], "given_up_count",
//    "rollouts": [objects of the files], "rollout_steps": [steps of all files],
//    "notes": [what was left out and why]}
//
// Every column is as long as its "step"; null stands for null, NaN and missing values. If a step
// repeats, as after a resume, it replaces the lines from that step on. Rollouts come from the last
// file and from others spread evenly over the run; of long runs only every second, fourth, .. row
// is read (jsonl_table.h).
//
// A missing file gives empty lists and texts, but one of metrics.jsonl, eval.jsonl and sft.jsonl
// must exist. Damaged lines are skipped, and a note says so. Notes are added to `said`, which may
// be null. Throws Error with file and line if all lines of a table are damaged.
std::string run_folder_json(const std::string& folder, const std::string& name,
                            const RolloutLimits& limits = {}, ReportNotes* said = nullptr);

// Names for several folders: the last path component, or the path as given if that is ambiguous.
std::vector<std::string> run_names(std::span<const std::string> folders);

// {"runs": [run_folder_json of each folder]}, the input of run_page.
std::string run_folders_json(std::span<const std::string> folders, const RolloutLimits& limits = {},
                             ReportNotes* said = nullptr);

}  // namespace leeway
