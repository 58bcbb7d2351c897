// A run folder as it is written (docs/runs.md).
#pragma once

#include <fstream>
#include <memory>
#include <string>

#include "cli/run_setup.h"
#include "orchestrator/loop.h"
#include "report/tensorboard.h"

namespace leeway {

// Used by one thread. Every method throws Error naming the file if it cannot be written (a full
// disk).
class RunFiles {
 public:
  // Makes the folder and writes config.toml and objective.txt. A folder that holds a run already is
  // left alone: the first of NAME-2, NAME-3, .. that does not is taken.
  RunFiles(const Config& config, const std::string& objective);

  const std::string& folder() const { return folder_; }
  std::string path(const std::string& name) const { return folder_ + "/" + name; }

  void log(const std::string& line);  // to log.txt
  void write_step(const StepRecord& record);
  void write_sft(int64_t step, const MetricList& metrics);
  void write_eval(int64_t step, const MetricList& metrics);
  // Sample rollouts of a step: `groups` groups (0: all), evenly spread.
  void write_rollouts(const StepRecord& record, const RunSetup& setup, const LossSpec& spec,
                      int64_t groups);

 private:
  void append(std::ofstream& file, const std::string& name, const std::string& text);
  void append_metrics(std::ofstream& file, const std::string& name, int64_t step,
                      const MetricList& metrics);

  std::string folder_;
  std::ofstream metrics_, sft_, eval_, log_;
  std::unique_ptr<TensorBoardWriter> tensorboard_;
};

}  // namespace leeway
