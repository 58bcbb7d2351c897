// A run folder as it is written (docs/runs.md).
#pragma once

#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "cli/run_setup.h"
#include "orchestrator/loop.h"
#include "report/tensorboard.h"

namespace leeway {

// Holds its folder: while it lives, another one of the same folder, also of another process, is
// refused with an Error. Used by one thread. Every method throws Error naming the file and the
// reason if it cannot be written (a full disk).
class RunFiles {
 public:
  // Makes the folder and writes config.toml and objective.txt. A folder that holds a run already is
  // left alone: the first of NAME-2, NAME-3, .. that does not is taken.
  RunFiles(const Config& config, const std::string& objective);
  // The folder of a run that goes on after step `step` (-1: from the very beginning): lines and
  // files of later steps are taken away, with whatever a killed process left half written and the
  // report, so that a report is there when a run has ended.
  RunFiles(const Config& config, const std::string& objective, const std::string& folder,
           int64_t step);

  const std::string& folder() const { return folder_; }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  void log(const std::string& line);              // to log.txt
  void write_given_up(const StepRecord& record);  // to given_up.jsonl
  void write_step(const StepRecord& record);
  void write_sft(int64_t step, const MetricList& metrics);
  void write_eval(int64_t step, const MetricList& metrics);
  // After it a power cut does not take lines away.
  void sync() const;
  // Sample rollouts of a step: `groups` groups (0: all), evenly spread.
  void write_rollouts(const StepRecord& record, const RunSetup& setup, const LossSpec& spec,
                      int64_t groups);
  // To weights/step_N, with the tokenizer of `model_path` (may be empty) beside them, so that the
  // folder loads anywhere. Its name.
  std::string save_weights(const Parameters& weights, int64_t step, const std::string& model_path);
  void write_report() const;  // report.html, of what the folder holds now

 private:
  // A lock that ends with the process, however that ends.
  class Hold {
   public:
    explicit Hold(const std::string& folder);
    ~Hold();
    Hold(Hold&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
    Hold& operator=(Hold&&) = delete;

   private:
    int file_;
  };

  void open(const Config& config, const std::string& objective);
  void remove_temporary_files();
  void forget_after(const std::string& name, int64_t step);
  void append(std::ofstream& file, const std::string& name, const std::string& text);
  void append_metrics(std::ofstream& file, const std::string& name, int64_t step,
                      const MetricList& metrics);

  std::string folder_;
  Hold hold_;
  std::vector<std::string> environment_ids_;
  std::ofstream metrics_, sft_, eval_, given_up_, log_;
  std::unique_ptr<TensorBoardWriter> tensorboard_;
};

std::string weights_folder(const std::string& run_folder, int64_t step);

// The last evaluation in the run folder `folder`: its step and metrics.
std::optional<std::pair<int64_t, MetricList>> last_evaluation(const std::string& folder);

}  // namespace leeway
