// Writes a run folder (docs/runs.md).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "orchestrator/loop.h"
#include "report/tensorboard.h"
#include "run/append_file.h"
#include "run/checkpoints.h"
#include "run/folder_hold.h"
#include "run/resumption.h"
#include "run/run_identity.h"
#include "run/run_setup.h"

namespace leeway {

class Superseded;

// Holds its folder: while this object lives, another one for the same folder, also in another
// process, is refused with an Error. Not thread-safe. Every method throws Error naming the file and
// the reason if it cannot be written (a full disk), or if it is no longer the file that was opened:
// a run whose files are deleted must not continue as if they existed.
class RunFiles {
 public:
  // A folder claimed for a new run. `begin`, called before anything but weights is written, gives
  // it an identity and writes identity.json, config.toml and objective.txt; `job` is "train" or
  // "sft".
  explicit RunFiles(ClaimedFolder claimed);
  void begin(const Config& config, const std::string& objective, const std::string& job);
  // The folder of a run that continues from its checkpoint `from`. Lines and files of later steps
  // and unused checkpoints are moved to RUN/superseded_K, with the report if there is one; `moved`
  // says so. Leftovers of a killed process are removed, and so is end.json, which is written again
  // when the run ends.
  RunFiles(const Config& config, const std::string& objective, Resumption resumption);

  const std::string& folder() const { return folder_; }
  const RunIdentity& identity() const { return identity_; }
  // What a resume moved aside, as text; empty: nothing.
  const std::string& moved() const { return moved_; }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  void log(const std::string& line);              // to log.txt
  void write_given_up(const StepRecord& record);  // to given_up.jsonl
  // To servers.jsonl: a server of the run's pool has entered a state.
  void write_server_event(const std::string& server, const std::string& state,
                          const std::string& text);
  void write_step(const StepRecord& record);
  void write_sft(int64_t step, const Metrics& metrics);
  void write_eval(int64_t step, const Metrics& metrics);
  // Flushes the appended lines to disk: they survive a power cut.
  void sync() const;
  // Sample rollouts of a step: `groups` groups (0: all), evenly spread.
  void write_rollouts(const StepRecord& record, const RunSetup& setup, int64_t groups);
  void write_batch(const StepRecord& record);  // to batches/step_N.json, whole
  // Saves to weights/step_N, with the tokenizer, so that the folder can be loaded anywhere, and
  // with checksums. `rounded`: the trainer has them with more digits, which leeway.json says.
  // Returns the folder's name. May be called from any thread, one call at a time.
  std::string save_weights(const Parameters& weights, int64_t step, const RunSetup& setup,
                           bool rounded = false) const;
  void write_report() const;  // report.html, from the current contents of the folder

 private:
  void open(const Config& config, const std::string& objective);
  void remove_temporary_files();
  void set_aside_after(const Checkpoint& from);
  void set_aside_lines(const std::string& name, int64_t step, Superseded& superseded);
  void append(AppendFile& file, const std::string& name, const std::string& text);
  void append_metrics(AppendFile& file, const std::string& name, int64_t step,
                      const Metrics& metrics);

  std::string folder_;
  FolderHold hold_;
  RunIdentity identity_;
  std::string moved_;
  std::vector<std::string> environment_ids_;
  int64_t rollouts_keep_ = 0;
  AppendFile metrics_, sft_, eval_, given_up_, servers_;
  LogFile log_;
  std::unique_ptr<TensorBoardWriter> tensorboard_;
};

std::string weights_folder(const std::string& run_folder, int64_t step);

// An evaluation in the run folder `folder`: its step and metrics.
using Evaluation = std::pair<int64_t, Metrics>;
std::optional<Evaluation> last_evaluation(const std::string& folder);
std::optional<Evaluation> first_evaluation(const std::string& folder);
// Of metrics.jsonl; nothing where its first line is damaged, or there is none.
std::optional<Metrics> metrics_of_first_step(const std::string& folder);

}  // namespace leeway
