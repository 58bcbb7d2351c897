// Names and numbers of a step, in the order they are written.
#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace leeway {

using Metrics = std::vector<std::pair<std::string, double>>;

// NaN if there is none of this name.
inline double metric_of(const Metrics& metrics, std::string_view name) {
  for (const auto& [key, value] : metrics) {
    if (key == name) return value;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

}  // namespace leeway
