#include "sweep/sweep_progress.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "run/durations.h"

namespace leeway {
namespace {

using Steady = std::chrono::steady_clock;

double between(Steady::time_point from, Steady::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

std::string sweep_progress_text(size_t total, size_t before, size_t done, size_t running,
                                double share, double seconds) {
  const double all = static_cast<double>(done) + share;
  const double here = all - static_cast<double>(before);
  std::string out = fmt::format("{}/{} runs done, {} running, {:.0f} %", done, total, running,
                                100 * all / static_cast<double>(std::max<size_t>(1, total)));
  if (here <= 0.0) return out;
  const double left = (static_cast<double>(total) - all) * seconds / here;
  return out + fmt::format(", {}, {}", rate_text(here, seconds, "runs"), time_left_text(left));
}

SweepProgress::SweepProgress(size_t total, size_t finished, Progress& progress)
    : total_(total),
      before_(finished),
      done_(finished),
      progress_(progress),
      begin_(Steady::now()) {}

void SweepProgress::began(size_t run, const std::string& folder, int64_t steps) {
  running_[run] = {.file = folder + "/metrics.jsonl", .steps = std::max<int64_t>(1, steps)};
}

void SweepProgress::ended(size_t run, const std::string& text) {
  running_.erase(run);
  ++done_;
  const double here = static_cast<double>(done_ - before_);
  const double left = static_cast<double>(total_ - done_) * between(begin_, Steady::now()) / here;
  progress_.note(fmt::format("[{}/{}] {}{}", done_, total_, text,
                             done_ == total_ ? "" : ", " + time_left_text(left)));
}

void SweepProgress::show() {
  look();
  progress_.status(text());
}

void SweepProgress::look() {
  for (auto& [number, run] : running_) {
    std::ifstream file(run.file, std::ios::binary);
    if (!file.seekg(run.read)) continue;
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    run.done += std::count(text.begin(), text.end(), '\n');
    run.read += static_cast<int64_t>(text.size());
  }
}

std::string SweepProgress::text() const {
  double share = 0.0;
  for (const auto& [number, run] : running_) {
    share += std::min(1.0, static_cast<double>(run.done) / static_cast<double>(run.steps));
  }
  return sweep_progress_text(total_, before_, done_, running_.size(), share,
                             between(begin_, Steady::now()));
}

}  // namespace leeway
