#include "cli/rank_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>

#include "base/files.h"
#include "cli/output.h"
#include "cli/version.h"
#include "leeway/error.h"
#include "ranks/discovery.h"
#include "ranks/gloo_ranks.h"
#include "run/devices.h"

namespace leeway {
namespace {

constexpr int64_t kMostRanks = 1024;
constexpr double kLongestEnd = 10.0;  // seconds that ranks have to end when the run has

// The words of this program's command line.
std::vector<std::string> own_arguments() {
  const std::string all = read_file("/proc/self/cmdline");
  std::vector<std::string> words;
  for (size_t begin = 0; begin < all.size();) {
    const size_t end = std::min(all.find('\0', begin), all.size());
    words.push_back(all.substr(begin, end - begin));
    begin = end + 1;
  }
  words.erase(words.begin());
  return words;
}

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
                  "and on CPUs give the bits of one (docs/scaling.md). A launcher's ranks\n"
                  "(torchrun, Slurm, Open MPI) are found by themselves")
      ->type_name("N")
      ->check(CLI::Range(int64_t{1}, kMostRanks));
}

RankGroup::RankGroup(int64_t asked) {
  std::optional<RanksOptions> options = launched(asked);
  if (!options && asked > 1) {
    workers_ = std::make_unique<LocalWorkers>(
        LocalWorkersOptions{.size = static_cast<int>(asked), .arguments = own_arguments()});
    options = workers_->leader();
  }
  if (!options) return;
  options->version = version_number();
  local_size_ = options->local_size;
  choose_gpu(options->local_rank, options->local_size);
  ranks_ = join_ranks(*options);
  if (ranks_->rank() == 0) run_.emplace(*ranks_, local_size_);
}

RankGroup::~RankGroup() {
  const bool began = run_ && run_->has_begun();  // else the mistake is rank 0's, and it is said
  run_.reset();
  ranks_.reset();
  if (!workers_) return;
  const std::string failure = workers_->wait(kLongestEnd);
  if (began && !failure.empty()) say("leeway: " + failure);
}

void RankGroup::serve(const Catalog& catalog) {
  // Rank 0 decides when the run ends, also when a terminal or a launcher asks every process to: it
  // saves first, and that needs all ranks.
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, SIG_IGN);
  serve_run(*ranks_, local_size_, catalog);
}

}  // namespace leeway
