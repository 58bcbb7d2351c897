#include "run/resumption.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/files.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
#include "run/run_files.h"

namespace leeway {
namespace {

// What a finished run lacks besides its checkpoints; empty if complete.
std::vector<std::string> missing_of(const Resumption& resumption, int64_t steps) {
  std::vector<std::string> missing;
  const std::string weights = weights_folder(resumption.folder, steps);
  if (!is_complete_folder(weights)) missing.push_back(weights);
  if (!is_present(resumption.folder + "/report.html")) {
    missing.push_back(resumption.folder + "/report.html");
  }
  if (resumption.supervised()) return missing;
  const auto evaluation = last_evaluation(resumption.folder);
  if (!evaluation || evaluation->first != steps) {
    missing.push_back(
        fmt::format("the evaluation of step {} in {}/eval.jsonl", steps, resumption.folder));
  }
  return missing;
}

}  // namespace

Resumption look_at_run(const std::string& folder,
                       const std::function<void(const Checkpoint&)>& check) {
  FolderHold hold(folder, kAtWorkOnRun);
  Resumption found{.folder = folder, .hold = std::move(hold), .identity = read_identity(folder)};
  found.end = read_run_end(folder);
  found.from = CheckpointStore(folder, {}, found.identity).newest(found.notes, check);
  // A folder written before end.json existed has finished if everything is there.
  if (!found.identity && !found.end && found.from && found.from->phase == Phase::rl &&
      missing_of(found, found.from->step).empty()) {
    found.end = RunEnd{.end = "finished", .steps = found.from->step, .max_steps = found.from->step};
  }
  return found;
}

bool has_finished(Resumption& resumption, int64_t max_steps) {
  if (!resumption.end || resumption.end->end != "finished") return false;
  const RunEnd& end = *resumption.end;
  if (max_steps > end.max_steps) return false;
  const std::vector<std::string> missing = missing_of(resumption, end.steps);
  if (missing.empty()) return true;
  // What came after the last checkpoint can be recreated.
  const Phase phase = resumption.supervised() ? Phase::sft : Phase::rl;
  if (resumption.from && resumption.from->phase == phase && resumption.from->step == end.steps) {
    return false;
  }
  resumption.notes.push_back(fmt::format(
      "missing, and not recreated since there is no complete checkpoint of the last step: {}",
      fmt::join(missing, ", ")));
  return true;
}

void refuse_without_checkpoint(const Resumption& resumption) {
  if (resumption.from) return;
  std::string why;
  for (const std::string& note : resumption.notes) why += "\n  " + note;
  const char* command = resumption.supervised() ? "sft" : "train";
  const bool weights = is_present(resumption.folder + "/weights");
  throw Error(fmt::format(
      "--resume {}: there is no checkpoint to continue from; nothing was changed{}{}\nStart again, "
      "in "
      "a "
      "new folder, with\n  leeway {} {}/config.toml{}",
      resumption.folder, why.empty() ? "" : ":", why, command, resumption.folder,
      weights ? fmt::format("\nor start from its last weights with\n  leeway train --from {}",
                            resumption.folder)
              : ""));
}

void refuse_fewer_steps(const Resumption& resumption, const char* key, int64_t max_steps) {
  const Phase phase = std::string_view(key) == "sft.max_steps" ? Phase::sft : Phase::rl;
  const bool finished = resumption.end && resumption.end->end == "finished";
  int64_t done =
      finished && (phase == Phase::sft) == resumption.supervised() ? resumption.end->steps : 0;
  if (resumption.from && resumption.from->phase == phase) {
    done = std::max(done, resumption.from->step);
  }
  if (max_steps >= done) return;
  throw Error(fmt::format("--resume {}: {} = {}: the run has already done {} steps",
                          resumption.folder, key, max_steps, done));
}

}  // namespace leeway
