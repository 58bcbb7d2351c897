#include "run/run_progress.h"

#include <fmt/format.h>

#include <algorithm>

#include "run/durations.h"
#include "run/output.h"

namespace leeway {

RunProgress::~RunProgress() { clear(); }

void RunProgress::clear() {
  if (drawn_ && draws()) redraw("");
  drawn_ = false;
}

void RunProgress::note(const std::string& line) {
  clear();
  say(line);
  if (files_ != nullptr) files_->log(line);
}

void RunProgress::begin(int64_t steps_before) {
  steps_before_ = steps_before;
  begin_ = std::chrono::steady_clock::now();
  last_ = {};
}

void RunProgress::step(int64_t step, int64_t total, const std::string& text) {
  const auto now = std::chrono::steady_clock::now();
  const bool terminal = draws();
  const double since = std::chrono::duration<double>(now - last_).count();
  if (step < total && since < (terminal ? 0.1 : 2.0)) return;
  last_ = now;
  const double elapsed = std::chrono::duration<double>(now - begin_).count();
  const double left = elapsed / static_cast<double>(std::max<int64_t>(1, step - steps_before_)) *
                      static_cast<double>(total - step);
  const std::string line =
      fmt::format("step {:>{}}/{}  {}  {}", step, fmt::formatted_size("{}", total), total, text,
                  time_left_text(left));
  if (files_ != nullptr) files_->log(line);
  if (!terminal || step == total) {
    clear();
    return say(line);
  }
  drawn_ = true;
  redraw(line);
}

}  // namespace leeway
