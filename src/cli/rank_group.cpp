#include "cli/rank_group.h"

#include <fmt/format.h>

#include <csignal>
#include <cstdlib>

#include "cli/version.h"
#include "leeway/error.h"
#include "ranks/discovery.h"
#include "ranks/gloo_ranks.h"

namespace leeway {
namespace {

constexpr int64_t kMostRanks = 1024;

std::optional<RanksOptions> launched(int64_t asked) {
  const auto found = ranks_from_environment([](const char* name) { return std::getenv(name); });
  if (found && asked > 0 && asked != found->size) {
    throw Error(
        fmt::format("--ranks {}: a launcher has started {} ranks already (its variables say so); "
                    "leave --ranks out, or set LEEWAY_RANKS=off to ignore the variables",
                    asked, found->size));
  }
  return found;
}

}  // namespace

void add_ranks_option(CLI::App& command, int64_t& count) {
  command
      .add_option("--ranks", count,
                  "Train with this many processes on this machine, which share each step's work\n"
                  "and give the bits of one (docs/scaling.md). A launcher's ranks (torchrun,\n"
                  "Slurm, Open MPI) are found by themselves")
      ->type_name("N")
      ->check(CLI::Range(int64_t{1}, kMostRanks));
}

RankGroup::RankGroup(int64_t asked) {
  std::optional<RanksOptions> options = launched(asked);
  if (!options) return;
  options->version = version_number();
  local_size_ = options->local_size;
  ranks_ = join_ranks(*options);
  if (ranks_->rank() == 0) run_.emplace(*ranks_, local_size_);
}

RankGroup::~RankGroup() = default;

void RankGroup::serve(const Catalog& catalog) {
  // Rank 0 decides when the run ends, also when a terminal or a launcher asks every process to: it
  // saves first, and that needs all ranks.
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, SIG_IGN);
  serve_run(*ranks_, local_size_, catalog);
}

}  // namespace leeway
