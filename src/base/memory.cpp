#include "base/memory.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <string>

namespace leeway {
namespace {

// Files of /proc and /sys have no size, so they are read to their end.
std::string system_text(const char* path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::optional<uint64_t> number_in(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
  uint64_t number = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), number);
  if (result.ec != std::errc()) return std::nullopt;
  return number;
}

// The number after `name` at the beginning of a line.
std::optional<uint64_t> entry(std::string_view text, std::string_view name) {
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    if (line.starts_with(name)) return number_in(line.substr(name.size()));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return std::nullopt;
}

}  // namespace

std::optional<uint64_t> available_memory(const MemoryTexts& texts) {
  std::optional<uint64_t> available;
  if (const auto kib = entry(texts.meminfo, "MemAvailable:")) {
    available = (*kib + entry(texts.meminfo, "SwapFree:").value_or(0)) * 1024;
  }
  // "max" is no number: no limit.
  const std::optional<uint64_t> limit = number_in(texts.limit), used = number_in(texts.used);
  if (limit && used) {
    // The cache of files counts as used, and is given back when memory is short.
    const uint64_t cache = entry(texts.statistics, "inactive_file ").value_or(0);
    const uint64_t held = *used - std::min(cache, *used);
    const uint64_t left = *limit - std::min(held, *limit);
    available = std::min(available.value_or(left), left);
  }
  return available;
}

std::optional<uint64_t> available_memory() {
  const std::string meminfo = system_text("/proc/meminfo");
  const std::string limit = system_text("/sys/fs/cgroup/memory.max");
  const std::string used = system_text("/sys/fs/cgroup/memory.current");
  const std::string statistics = system_text("/sys/fs/cgroup/memory.stat");
  return available_memory({meminfo, limit, used, statistics});
}

}  // namespace leeway
