// Small programs for the tests of process environments, and checks for what is left of them.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "orchestrator/environment.h"

namespace leeway::testing {

// Says hello and runs `body` for every request, with $line and $id set.
inline std::string answering(const std::string& body) {
  return R"(read -r hello; echo '{"type": "hello", "protocol": 1}'; )"
         R"(while read -r line; do id=${line#*'"id": '}; id=${id%%,*}; )" +
         body + "; done";
}

// A command that prints the request's answer: {"id": .., MEMBERS}, with $variables expanded.
inline std::string answer(const std::string& members) {
  std::string escaped;
  for (const char c : members) escaped += c == '"' ? std::string("\\\"") : std::string(1, c);
  return fmt::format(R"(echo "{{\"id\": $id, {}}}")", escaped);
}

template <class Poll>
Turn wait_for(Poll poll, double seconds = 300.0) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    Turn turn = poll();
    if (turn.kind != Turn::Kind::pending || Clock::now() > deadline) return turn;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

inline std::string text_of_file(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream text;
  text << stream.rdbuf();
  return text.str();
}

// `file` of every process; empty if one ends meanwhile.
inline std::vector<std::string> of_all_processes(const std::string& file) {
  std::vector<std::string> texts;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    texts.push_back(text_of_file(entry.path() / file));
  }
  return texts;
}

// Children of this process, including zombies.
inline int count_children() {
  int count = 0;
  for (const std::string& stat : of_all_processes("stat")) {
    const size_t name_end = stat.rfind(')');
    if (name_end == std::string::npos || stat.size() < name_end + 4) continue;
    count += std::atoi(stat.c_str() + name_end + 4) == ::getpid();
  }
  return count;
}

// Processes of any user whose command line contains `text`.
inline int count_running(const std::string& text) {
  int count = 0;
  for (const std::string& line : of_all_processes("cmdline")) {
    count += line.find(text) != std::string::npos;
  }
  return count;
}

inline int count_open_files() {
  int count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

}  // namespace leeway::testing
