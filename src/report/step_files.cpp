#include "report/step_files.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <string_view>
#include <system_error>

namespace leeway {

std::vector<StepFile> step_files(const std::string& folder) {
  constexpr std::string_view kBefore = "step_", kAfter = ".jsonl";
  std::vector<StepFile> files;
  std::error_code missing;
  for (const auto& entry : std::filesystem::directory_iterator(folder, missing)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kBefore) || !name.ends_with(kAfter)) continue;
    const char* end = name.data() + name.size() - kAfter.size();
    int64_t step = 0;
    const auto read = std::from_chars(name.data() + kBefore.size(), end, step);
    if (read.ec != std::errc() || read.ptr != end) continue;
    files.push_back({step, entry.path().string()});
  }
  std::sort(files.begin(), files.end(),
            [](const StepFile& a, const StepFile& b) { return a.step < b.step; });
  return files;
}

}  // namespace leeway
