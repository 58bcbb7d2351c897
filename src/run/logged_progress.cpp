#include "run/logged_progress.h"

#include "run/policy_evaluation.h"

namespace leeway {

void LoggedProgress::note(const std::string& line) {
  next_.note(line);
  files_.log(line);
}

void LoggedProgress::begin_steps(int64_t done) {
  next_.begin_steps(done);
  line_.begin(done);
  last_ = {};
}

void LoggedProgress::step(int64_t step, int64_t total, const std::string& text) {
  next_.step(step, total, text);
  const auto now = std::chrono::steady_clock::now();
  if (step < total && now - last_ < std::chrono::seconds(2)) return;
  last_ = now;
  files_.log(line_.text(step, total, text));
}

void LoggedProgress::count(const std::string& what, const std::string& unit, size_t done,
                           size_t total) {
  next_.count(what, unit, done, total);
}

void LoggedProgress::evaluated(int64_t step, const EvaluationResult& result) {
  next_.evaluated(step, result);
  files_.log(evaluation_line(step, result));
}

void LoggedProgress::status(const std::string& line) { next_.status(line); }

}  // namespace leeway
