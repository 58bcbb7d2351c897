// How much memory this process can still get.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace leeway {

// Bytes that can be allocated and used before something is killed: what the system has, swap
// included, or what the process's container leaves, whichever is less. None: the system does not
// say.
std::optional<uint64_t> available_memory();

// The same from the texts of /proc/meminfo and of the container's memory.max, memory.current and
// memory.stat, each empty if there is no such file.
struct MemoryTexts {
  std::string_view meminfo, limit, used, statistics;
};
std::optional<uint64_t> available_memory(const MemoryTexts& texts);

}  // namespace leeway
