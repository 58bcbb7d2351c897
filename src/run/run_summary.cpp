#include "run/run_summary.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/files.h"
#include "base/json.h"
#include "run/durations.h"
#include "run/run_files.h"

namespace leeway {

const char* name_of(RunSummary::End end) {
  switch (end) {
    case RunSummary::End::finished: return "finished";
    case RunSummary::End::stopped: return "stopped";
    case RunSummary::End::gave_up: return "gave_up";
  }
  return "";
}

RunSummary finished_summary(const Resumption& resumption) {
  const RunEnd& end = *resumption.end;
  RunSummary summary;
  summary.finished_before = true;
  summary.folder = resumption.folder;
  summary.steps = end.steps;
  summary.max_steps = end.max_steps;
  summary.sft_steps = end.sft_steps;
  summary.sft_seconds = end.sft_seconds;
  if (auto first = first_evaluation(resumption.folder)) summary.before = std::move(first->second);
  if (auto last = last_evaluation(resumption.folder)) summary.after = std::move(last->second);
  summary.totals = end.totals;
  summary.rollouts = end.totals.completed;
  const std::string weights = weights_folder(resumption.folder, end.steps);
  if (is_present(weights)) summary.weights = weights;
  const std::string report = resumption.folder + "/report.html";
  if (is_present(report)) summary.report = report;
  return summary;
}

std::string summary_json(const RunSummary& summary) {
  JsonWriter json;
  json.begin_object().key("end").value(name_of(summary.end));
  if (!summary.reason.empty()) json.key("reason").value(summary.reason);
  json.key("run").value(summary.folder).key("weights").value(summary.weights);
  json.key("report").value(summary.report);
  const auto number = [&](const char* key, auto value) {
    json.key(key).value(static_cast<double>(value));
  };
  number("steps", summary.steps);
  number("sft_steps", summary.sft_steps);
  number("seconds", summary.seconds);
  number("sft_seconds", summary.sft_seconds);
  number("rl_seconds", summary.rl_seconds);
  number("eval_seconds", summary.eval_seconds);
  number("rollouts", summary.rollouts);
  number("sampled_tokens", summary.sampled_tokens);
  number("trained_tokens", summary.trained_tokens);
  number("sampler_busy", summary.sampler_busy);
  number("trainer_busy", summary.trainer_busy);
  const auto metrics = [&](const char* key, const Metrics& list) {
    json.key(key).begin_object();
    for (const auto& [name, value] : list) json.key(name).value(value);
    json.end_object();
  };
  const ScheduleTotals& totals = summary.totals;
  json.key("account").begin_object();
  number("admitted", totals.admitted);
  number("trained", totals.batched - totals.filtered);
  number("filtered", totals.filtered);
  number("stale", totals.stale);
  number("dropped", totals.dropped);
  number("waiting", totals.completed - totals.batched - totals.stale - totals.dropped);
  number("failed", totals.failed);
  number("cancelled", totals.cancelled);
  number("running", summary.running);
  json.end_object();
  metrics("before", summary.before);
  metrics("after", summary.after);
  return json.end_object().text() + "\n";
}

std::string summary_text(const RunSummary& summary) {
  std::string out;
  const auto estimate = [](const Metrics& list) {
    return fmt::format("{:.3f} [{:.3f}, {:.3f}]", metric_of(list, "eval/all/reward/mean"),
                       metric_of(list, "eval/all/reward/low"),
                       metric_of(list, "eval/all/reward/high"));
  };
  const auto measured = [](const Metrics& list) {
    return !std::isnan(metric_of(list, "eval/all/reward/mean"));
  };
  if (measured(summary.before) && measured(summary.after)) {
    out += fmt::format("held-out reward  {} before, {} after", estimate(summary.before),
                       estimate(summary.after));
    const double before = metric_of(summary.before, "eval/all/greedy/mean");
    if (!std::isnan(before)) {
      out += fmt::format("; greedy {:.3f} before, {:.3f} after", before,
                         metric_of(summary.after, "eval/all/greedy/mean"));
    }
    out += "\n";
  }
  const auto add_paths = [&] {
    if (!summary.weights.empty()) out += fmt::format("weights  {}\n", summary.weights);
    if (!summary.report.empty()) out += fmt::format("report   {}\n", summary.report);
  };
  if (summary.finished_before) {
    add_paths();
    return out;
  }
  const double rl = std::max(summary.rl_seconds, 1e-9);
  out += fmt::format("{} of {} steps, {} rollouts", summary.steps, summary.max_steps,
                     summary.rollouts);
  double sft = summary.sft_seconds;
  if (summary.resumed) {
    out += fmt::format("; since the resume {} steps, {} rollouts",
                       summary.steps - summary.resumed->steps,
                       summary.rollouts - summary.resumed->rollouts);
    sft -= summary.resumed->sft_seconds;
  }
  out += fmt::format(" in {}: ", duration_text(summary.seconds));
  if (!summary.resumed || sft > 0.0) out += fmt::format("sft {}, ", duration_text(sft));
  out += fmt::format("rl {}, eval {}\n", duration_text(summary.rl_seconds),
                     duration_text(summary.eval_seconds));
  out += fmt::format(
      "rl: {:.0f} sampled and {:.0f} trained tokens/s; sampler busy {:.0f} %, trainer {:.0f} %\n",
      static_cast<double>(summary.sampled_tokens) / rl,
      static_cast<double>(summary.trained_tokens) / rl, 100 * summary.sampler_busy,
      100 * summary.trainer_busy);
  const ScheduleTotals& totals = summary.totals;
  if (totals.failed + totals.cancelled + totals.stale + totals.dropped > 0) {
    out += fmt::format(
        "rollouts: {} admitted = {} trained + {} filtered + {} stale + {} dropped with their group "
        "+ {} failed + {} cancelled + {} left over\n",
        totals.admitted, totals.batched - totals.filtered, totals.filtered, totals.stale,
        totals.dropped, totals.failed, totals.cancelled,
        totals.completed - totals.batched - totals.stale - totals.dropped + summary.running);
  }
  add_paths();
  return out;
}

}  // namespace leeway
