// Where a run's configuration comes from: a file, and what the command line changes in it.
#pragma once

#include <string>
#include <vector>

namespace leeway {

struct ConfigSource {
  std::string file;               // empty: the default of whoever reads it
  std::vector<std::string> sets;  // key=value
  std::vector<std::string> unsets;
};

}  // namespace leeway
