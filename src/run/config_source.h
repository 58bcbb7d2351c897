// Where a run's configuration comes from: a file, and what the command line changes in it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace leeway {

class RunRanks;

struct ConfigSource {
  std::string file;               // empty: the default of whoever reads it
  std::vector<std::string> sets;  // key=value
  std::vector<std::string> unsets;
  RunRanks* ranks = nullptr;  // that share the run; null: this process alone
  int64_t spawn_servers = 0;  // processes that sample for training; 0: as [inference] says
};

}  // namespace leeway
