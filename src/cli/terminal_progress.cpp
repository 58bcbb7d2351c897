#include "cli/terminal_progress.h"

#include <fmt/format.h>

#include <algorithm>

#include "cli/output.h"
#include "run/durations.h"
#include "run/policy_evaluation.h"

namespace leeway {
namespace {

using Steady = std::chrono::steady_clock;

double between(Steady::time_point from, Steady::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

// Seconds between two lines of steps or counts.
double interval() { return draws() ? 0.1 : 2.0; }

}  // namespace

TerminalProgress::~TerminalProgress() { clear(); }

void TerminalProgress::clear() {
  if (drawn_) redraw("");
  drawn_ = false;
}

void TerminalProgress::draw(const std::string& line) {
  if (!draws()) return say(line);
  drawn_ = true;
  redraw(line);
}

void TerminalProgress::note(const std::string& line) {
  clear();
  say(line);
}

void TerminalProgress::begin_steps(int64_t done) {
  step_line_.begin(done);
  last_step_ = {};
}

void TerminalProgress::step(int64_t step, int64_t total, const std::string& text) {
  const auto now = Steady::now();
  if (step < total && between(last_step_, now) < interval()) return;
  last_step_ = now;
  const std::string line = step_line_.text(step, total, text);
  // The last one stays.
  step == total ? note(line) : draw(line);
}

void TerminalProgress::count(const std::string& what, const std::string& unit, size_t done,
                             size_t total) {
  const auto now = Steady::now();
  if (what != count_.what || done < count_.done) {
    count_ = {.what = what, .begin = now, .last = now};
    clear();
  }
  count_.done = done;
  const double elapsed = between(count_.begin, now);
  if (elapsed < 2.0 || done == 0) return;
  if (count_.shown && between(count_.last, now) < interval()) return;
  count_.last = now;
  count_.shown = true;
  const double rate = static_cast<double>(done) / elapsed;
  draw(fmt::format("{}: {}/{} {}, {:.1f}/s, {}", what, done, total, unit, rate,
                   time_left_text(static_cast<double>(total - done) / rate)));
}

void TerminalProgress::evaluated(int64_t step, const EvaluationResult& result) {
  note(evaluation_line(step, result));
}

void TerminalProgress::status(const std::string& line) {
  const auto now = Steady::now();
  const double wanted = draws() ? 0.4 : std::clamp(between(begin_, now) / 10, 2.0, 60.0);
  if (between(last_status_, now) < wanted) return;
  last_status_ = now;
  draw(line);
}

}  // namespace leeway
