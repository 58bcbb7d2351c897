// The processes that share one run: those of --ranks, which rank 0 starts, or those that a launcher
// has started (torchrun, Slurm, Open MPI).
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <memory>
#include <optional>

#include "cli/commands.h"
#include "ranks/local_workers.h"
#include "ranks/ranks.h"
#include "run/run_ranks.h"

namespace leeway {

void add_ranks_option(CLI::App& command, int64_t& count);

class RankGroup {
 public:
  // `asked`: --ranks, 0 if it was not given. Meets the other ranks; returns when all are there.
  // Throws Error and Lost.
  explicit RankGroup(int64_t asked);
  // Ranks that this process has started have ended, and what one of them ended with is said.

  ~RankGroup();
  RankGroup(const RankGroup&) = delete;
  RankGroup& operator=(const RankGroup&) = delete;

  // Another rank than 0: `serve` is all there is to do. Throws Lost.
  bool serves() const { return ranks_ != nullptr && ranks_->rank() > 0; }
  void serve(const Catalog& catalog);

  // What rank 0 hands to its run; null without a group. The other ranks end when this goes.
  RunRanks* run() { return run_ ? &*run_ : nullptr; }

 private:
  std::unique_ptr<LocalWorkers> workers_;  // of --ranks, on rank 0
  std::unique_ptr<Ranks> ranks_;
  std::optional<RunRanks> run_;
  int local_size_ = 1;
};

}  // namespace leeway
