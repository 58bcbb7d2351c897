#include "base/text_table.h"

#include <fmt/format.h>

#include <algorithm>

namespace leeway {

std::string format_table(const std::vector<std::string>& header,
                         const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const std::string& cell : header) widths.push_back(cell.size());
  for (const auto& row : rows) {
    for (size_t c = 0; c < row.size() && c < widths.size(); ++c) {
      widths[c] = std::max(widths[c], row[c].size());
    }
  }
  auto line = [&](const std::vector<std::string>& cells) {
    std::string out;
    for (size_t c = 0; c < cells.size(); ++c) {
      const size_t width = c < widths.size() ? widths[c] : 0;
      if (c == 0) {
        out += fmt::format("{:<{}}", cells[c], width);
      } else if (c < header.size() && header[c] == "settings") {
        out += "  " + cells[c];
      } else {
        out += fmt::format("  {:>{}}", cells[c], width);
      }
    }
    return out + "\n";
  };
  size_t total = 0;
  for (size_t width : widths) total += width + 2;
  std::string out = line(header) + std::string(total - 2, '-') + "\n";
  for (const auto& row : rows) out += line(row);
  return out;
}

}  // namespace leeway
