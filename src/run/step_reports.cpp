#include "run/step_reports.h"

#include <fmt/format.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace leeway {
namespace {

// The last reply of a rollout that was cut off shows what has cut it.
CutRollouts cut_rollouts(const StepRecord& record, const RolloutSettings& settings) {
  CutRollouts cut{.max_new_tokens = settings.max_new_tokens,
                  .positions = settings.max_length,
                  .max_turns = settings.max_turns};
  for (const Group& group : record.batch.groups) {
    for (const Rollout& rollout : group.rollouts) {
      if (!rollout.truncated || rollout.steps.empty()) continue;
      const auto prompt = static_cast<int64_t>(rollout.steps.back().prompt.size());
      const auto reply = static_cast<int64_t>(rollout.steps.back().completion.size());
      if (reply >= settings.max_new_tokens) {
        ++cut.by_new_tokens;
      } else {
        ++(prompt + reply >= settings.max_length ? cut.by_positions : cut.by_turns);
      }
    }
  }
  return cut;
}

// "31k", or the number itself where that would be "0k".
std::string thousands(double rate) {
  return rate < 1000.0 ? fmt::format("{:.0f}", rate) : fmt::format("{:.0f}k", rate / 1000.0);
}

}  // namespace

StepReports::StepReports(const RunSetup& setup, RunFiles& files, Progress& progress,
                         RunWarnings& warnings, AdvantageProgram* program)
    : setup_(setup),
      run_(setup.config.run),
      files_(files),
      progress_(progress),
      warnings_(warnings),
      program_(program) {}

void StepReports::note_all(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) progress_.note(line);
}

void StepReports::add(const StepRecord& record) {
  files_.write_step(record);
  files_.write_given_up(record);
  log_environments();
  for (const DroppedGroup& group : record.given_up) {
    progress_.note(fmt::format("group {} of {} was given up, {} of its rollouts {}: {}",
                               group.number, setup_.environment_ids[group.environment],
                               group.survivors, group.trained ? "trained" : "finished",
                               group.message));
  }
  log_failures(record);
  tell_drops(record);
  note_all(warnings_.on_step(record.metrics, cut_rollouts(record, setup_.rollout_settings(0.0f))));
  std::error_code unknown;
  const auto space = std::filesystem::space(files_.folder(), unknown);
  if (!unknown) note_all(warnings_.on_disk(space.available));
  const OutputTable& output = run_.output;
  if (output.rollouts_every > 0 && (record.step % output.rollouts_every == 0 || record.step == 1)) {
    files_.write_rollouts(record, setup_, output.rollouts_groups);
  }
  if (output.batches_every > 0 && (record.step % output.batches_every == 0 || record.step == 1)) {
    files_.write_batch(record);
  }
  tell_numbers(record);
}

void StepReports::tell_numbers(const StepRecord& record) {
  const auto metric = [&](const char* name) { return metric_of(record.metrics, name); };
  const double seconds = metric("time/step");
  sampling_ += metric("perf/sampler_busy") * seconds;
  learning_ += record.learned.busy_seconds;
  trained_tokens_ = static_cast<int64_t>(metric("progress/trained_tokens"));
  const double tokens = metric("batch/tokens") + static_cast<double>(record.batch.sampled_tokens);
  progress_.step(
      record.step, run_.trainer.max_steps,
      fmt::format("reward {:.3f}  mismatch_kl {:.2g}  masked {:.2f}%  lag {:.2g}  {} tokens/s{}",
                  metric("reward/all/mean"), metric("mismatch_kl/all/mean"),
                  100.0 * metric("is_masked"), metric("off_policy_level/all/mean"),
                  thousands(tokens / seconds),
                  failed_ > 0 ? fmt::format("  {} failed", failed_) : ""));
}

void StepReports::log_environments() {
  for (const EnvironmentMix::Member& member : setup_.environments->members()) {
    for (const std::string& line : member.environment->take_log()) {
      files_.log(fmt::format("{} {}", member.id, line));
    }
    for (const std::string& warning : member.environment->take_warnings()) {
      progress_.note(fmt::format("warning: environment {}: {}", member.id, warning));
    }
  }
  if (program_ == nullptr) return;
  for (const std::string& line : program_->take_log()) {
    files_.log(fmt::format("advantage_command {}", line));
  }
}

void StepReports::failed(const RolloutFailure& failure, double now) {
  const std::string& id = setup_.environment_ids[failure.environment];
  if (const auto line = failure_lines_.add(id, failure, now)) progress_.note(*line);
}

void StepReports::end_failures() {
  if (const auto line = failure_lines_.rest()) progress_.note(*line);
}

// Groups that the program of orchestrator.advantage_command has dropped, by reason. The first step
// with such groups is reported to the user, later ones only in the log.
void StepReports::tell_drops(const StepRecord& record) {
  std::map<std::string, int64_t> reasons;
  int64_t groups = 0;
  for (const std::string& reason : record.batch.drop_reasons) {
    if (reason.empty()) continue;
    ++reasons[reason];
    ++groups;
  }
  if (groups == 0) return;
  std::string text;
  for (const auto& [reason, count] : reasons) {
    text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", reason, count);
  }
  const std::string line = fmt::format(
      "step {}: orchestrator.advantage_command left {} of {} groups out of the update: "
      "{}",
      record.step, groups, record.batch.drop_reasons.size(), text);
  if (std::exchange(told_drops_, true)) {
    files_.log(line);
  } else {
    progress_.note(line + " (later steps are in log.txt)");
  }
}

// By kind, with the last message.
void StepReports::log_failures(const StepRecord& record) {
  std::string kinds;
  double failed = 0.0;
  for (const auto& [name, value] : record.metrics) {
    if (!name.starts_with("failures/")) continue;
    kinds += fmt::format("{}{} {:.0f}", kinds.empty() ? "" : ", ", name.substr(9), value);
    failed += value;
  }
  const double unasked = metric_of(record.metrics, "unasked_answers/all");
  if (unasked > 0.0) {
    files_.log(
        fmt::format("step {}: {:.0f} unsolicited answers of environments' programs; the "
                    "lines are above",
                    record.step, unasked));
  }
  if (failed == 0.0) return;
  failed_ += static_cast<int64_t>(failed);
  files_.log(fmt::format("step {}: {:.0f} rollouts failed ({}) and are tried again; the last: {}",
                         record.step, failed, kinds, record.last_failure));
}

}  // namespace leeway
