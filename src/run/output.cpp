#include "run/output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/printable.h"
#include "leeway/error.h"
#include "run/durations.h"

namespace leeway {

void print(std::string_view text) {
  std::string shown;
  if (::isatty(STDOUT_FILENO)) text = shown = printable(text);
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    throw Error(fmt::format("cannot write the result to stdout: {}", std::strerror(errno)));
  }
}

void warn(std::string_view text) { say(fmt::format("leeway: warning: {}", text)); }

void say(std::string_view text) {
  // A stderr that cannot be written must not change what the program does.
  const std::string line = printable(text) + "\n";
  (void)std::fwrite(line.data(), 1, line.size(), stderr);
}

void redraw(std::string_view text) {
  const std::string line = "\r\033[K" + printable(text);
  (void)std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
}

bool draws() { return ::isatty(STDERR_FILENO) != 0; }

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

Progress::Progress(std::string what, std::string unit)
    : what_(std::move(what)),
      unit_(std::move(unit)),
      start_(std::chrono::steady_clock::now()),
      last_(start_) {}

Progress::~Progress() {
  if (drawn_ && draws()) redraw("");
}

void Progress::update(size_t done, size_t total) {
  using Seconds = std::chrono::duration<double>;
  const auto now = std::chrono::steady_clock::now();
  const double elapsed = Seconds(now - start_).count();
  if (elapsed < 2.0 || done == 0) return;
  const bool terminal = draws();
  if (drawn_ && Seconds(now - last_).count() < (terminal ? 0.1 : 2.0)) return;
  last_ = now;
  drawn_ = true;
  const double rate = static_cast<double>(done) / elapsed;
  const double left = static_cast<double>(total - done) / rate;
  const std::string line = fmt::format("{}: {}/{} {}, {:.1f}/s, {}", what_, done, total, unit_,
                                       rate, time_left_text(left));
  terminal ? redraw(line) : say(line);
}

}  // namespace leeway
