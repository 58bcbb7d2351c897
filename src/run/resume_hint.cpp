#include "run/resume_hint.h"

#include <algorithm>
#include <cctype>
#include <string_view>

#include "run/checkpoints.h"

namespace leeway {

std::string shell_word(const std::string& word) {
  const auto plain = [](unsigned char c) {
    return c >= 0x80 || std::isalnum(c) != 0 ||
           std::string_view("_-./+:@%,=").find(static_cast<char>(c)) != std::string_view::npos;
  };
  if (!word.empty() && std::all_of(word.begin(), word.end(), plain)) return word;
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string resume_hint(const std::string& run_folder) {
  if (!CheckpointStore(run_folder, {}, {}).any()) return "";
  return "to continue:  leeway train --resume " + shell_word(run_folder);
}

}  // namespace leeway
