#include "config/findings.h"

#include <fmt/format.h>

#include <algorithm>

namespace leeway {
namespace {

constexpr size_t kMostShown = 20;

std::string joined(const std::vector<std::string>& problems, size_t total) {
  if (total == 1) return problems.front();
  std::string text = fmt::format("the configuration has {} problems:", total);
  for (const std::string& problem : problems) text += "\n  " + problem;
  if (total > problems.size()) text += fmt::format("\n  and {} more", total - problems.size());
  return text;
}

}  // namespace

ConfigError::ConfigError(std::vector<std::string> shown, size_t count)
    : Error(joined(shown, count)), problems(std::move(shown)), total(count) {}

void Problems::add(uint64_t order, std::string text) {
  problems_.push_back({order, std::move(text)});
}

void Problems::add(const Given& given, const std::string& problem) {
  add(given.order,
      fmt::format("{}{} = {}: {}", given.where(), given.key, scalar_text(given.value), problem));
  blamed_.insert(given.name());
}

void Problems::add(const Problems& others) {
  problems_.insert(problems_.end(), others.problems_.begin(), others.problems_.end());
  blamed_.insert(others.blamed_.begin(), others.blamed_.end());
}

bool Problems::full() const { return problems_.size() > kMostShown; }

void Problems::throw_if_any() const {
  if (problems_.empty()) return;
  std::vector<Problem> sorted = problems_;
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const Problem& a, const Problem& b) { return a.order < b.order; });
  std::vector<std::string> shown;
  for (const Problem& problem : sorted) {
    if (shown.size() == kMostShown) break;
    shown.push_back(problem.text);
  }
  throw ConfigError(std::move(shown), sorted.size());
}

void Findings::inert(const Document& document, const Given& given,
                     const std::vector<std::string>& causes, const std::string& problem) {
  if (problems.blames(given.name())) return;
  for (const std::string& cause : causes) {
    if (problems.blames(cause)) return;
  }
  for (const std::string& cause : causes) {
    const std::string said = document.command_line(cause);
    if (said.empty() || !given.in_file()) continue;
    taken_along.push_back({given.name(), said});
    return;
  }
  problems.add(given, problem);
}

}  // namespace leeway
