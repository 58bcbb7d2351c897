#include "sweep/sweep_tables.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/text_table.h"

namespace leeway {
namespace {

// One row of a table: its runs, and what the finished ones say together.
struct RowResult {
  const SweepTable* table;
  const SweepRow* row;
  std::vector<size_t> runs;           // of the plan
  std::vector<SweepNumbers> numbers;  // of those; NaN where a run failed
  size_t finished = 0;

  // Over the finished runs that have the number. NaN: none has.
  double mean(double SweepNumbers::*number) const {
    double sum = 0;
    size_t count = 0;
    for (const SweepNumbers& run : numbers) {
      if (std::isnan(run.*number)) continue;
      sum += run.*number;
      ++count;
    }
    return count > 0 ? sum / static_cast<double>(count) : std::nan("");
  }
  // Of the sample. NaN: fewer than two runs.
  double deviation(double SweepNumbers::*number) const {
    const double centre = mean(number);
    double squares = 0;
    size_t count = 0;
    for (const SweepNumbers& run : numbers) {
      if (std::isnan(run.*number)) continue;
      squares += (run.*number - centre) * (run.*number - centre);
      ++count;
    }
    return count > 1 ? std::sqrt(squares / static_cast<double>(count - 1)) : std::nan("");
  }
  double largest(double SweepNumbers::*number) const {
    double most = std::nan("");
    for (const SweepNumbers& run : numbers) most = std::fmax(most, run.*number);
    return most;
  }
};

std::vector<RowResult> collect(const SweepPlan& plan, const SweepResult& result) {
  constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
  std::vector<RowResult> rows;
  for (size_t k = 0; k < plan.runs.size(); ++k) {
    const SweepRun& run = plan.runs[k];
    const SweepTable& table = plan.config.tables[run.table];
    const SweepRow& row = table.rows[run.row];
    if (rows.empty() || rows.back().row != &row) rows.push_back({&table, &row, {}, {}});
    const bool finished = result.failures[k].empty();
    rows.back().runs.push_back(k);
    rows.back().numbers.push_back(finished ? read_numbers(run)
                                           : SweepNumbers{kNone, kNone, kNone, kNone, kNone});
    rows.back().finished += finished ? 1 : 0;
  }
  return rows;
}

std::string cell(double value, std::string_view format) {
  return std::isnan(value) ? "-" : fmt::format(fmt::runtime(format), value);
}

std::vector<std::string> cells(const RowResult& row) {
  std::string reward = cell(row.mean(&SweepNumbers::reward), "{:.3f}");
  const double deviation = row.deviation(&SweepNumbers::reward);
  if (!std::isnan(deviation)) reward += fmt::format(" +- {:.3f}", deviation);
  // A mean over the survivors must not pass for one over all seeds.
  if (row.finished < row.runs.size()) {
    reward += fmt::format(" ({} of {} seeds)", row.finished, row.runs.size());
  }
  return {row.row->title,
          reward,
          cell(row.mean(&SweepNumbers::max_mismatch_kl), "{:.3g}"),
          cell(100 * row.mean(&SweepNumbers::dropped_share), "{:.1f} %"),
          cell(row.largest(&SweepNumbers::max_off_policy_level), "{:.0f}"),
          cell(row.mean(&SweepNumbers::seconds), "{:.1f}")};
}

const std::vector<std::string>& header() {
  static const std::vector<std::string> names = {
      "run", "held-out reward", "max mismatch KL", "dropped or clipped", "max lag", "seconds"};
  return names;
}

std::string markdown_line(const std::vector<std::string>& cells) {
  std::string line = "|";
  for (const std::string& text : cells) {
    line += ' ';
    for (const char c : text) line += c == '|' ? std::string("\\|") : std::string(1, c);
    line += " |";
  }
  return line + "\n";
}

void write_sets(JsonWriter& json, const std::vector<std::string>& sets) {
  json.key("set").begin_array();
  for (const std::string& set : sets) json.value(set);
  json.end_array();
}

}  // namespace

std::string sweep_tables(const SweepPlan& plan, const SweepResult& result, bool markdown) {
  const std::vector<RowResult> rows = collect(plan, result);
  std::string out;
  for (size_t k = 0; k < rows.size();) {
    const SweepTable* table = rows[k].table;
    std::vector<std::vector<std::string>> lines;
    for (; k < rows.size() && rows[k].table == table; ++k) lines.push_back(cells(rows[k]));
    if (!out.empty()) out += "\n";
    out += table->title + "\n\n";
    if (!markdown) {
      out += format_table(header(), lines);
      continue;
    }
    out += markdown_line(header()) + "|---|---|---|---|---|---|\n";
    for (const auto& line : lines) out += markdown_line(line);
  }
  return out;
}

std::string sweep_json(const SweepPlan& plan, const SweepResult& result,
                       const std::optional<std::string>& report) {
  const std::vector<RowResult> rows = collect(plan, result);
  JsonWriter json;
  json.begin_object().key("output_dir").value(plan.config.output_dir).key("report");
  if (report) {
    json.value(*report);
  } else {
    json.null();
  }
  json.key("tables").begin_array();
  for (size_t k = 0; k < rows.size();) {
    const SweepTable* table = rows[k].table;
    json.begin_object().key("name").value(table->name).key("title").value(table->title);
    json.key("rows").begin_array();
    for (; k < rows.size() && rows[k].table == table; ++k) {
      const RowResult& row = rows[k];
      json.begin_object().key("name").value(row.row->name).key("title").value(row.row->title);
      json.key("finished").value(static_cast<double>(row.finished));
      json.key("reward_mean").value(row.mean(&SweepNumbers::reward));
      json.key("reward_deviation").value(row.deviation(&SweepNumbers::reward));
      json.key("max_mismatch_kl").value(row.mean(&SweepNumbers::max_mismatch_kl));
      json.key("dropped_share").value(row.mean(&SweepNumbers::dropped_share));
      json.key("max_off_policy_level").value(row.largest(&SweepNumbers::max_off_policy_level));
      json.key("seconds").value(row.mean(&SweepNumbers::seconds));
      json.key("runs").begin_array();
      for (size_t i = 0; i < row.runs.size(); ++i) {
        const SweepRun& run = plan.runs[row.runs[i]];
        const SweepNumbers& numbers = row.numbers[i];
        const std::string& failure = result.failures[row.runs[i]];
        json.begin_object().key("seed").value(static_cast<double>(run.seed));
        json.key("folder").value(run.folder);
        write_sets(json, run.sets);
        json.key("finished").value(failure.empty());
        if (!failure.empty()) json.key("failure").value(failure);
        json.key("reward").value(numbers.reward);
        json.key("max_mismatch_kl").value(numbers.max_mismatch_kl);
        json.key("dropped_share").value(numbers.dropped_share);
        json.key("max_off_policy_level").value(numbers.max_off_policy_level);
        json.key("seconds").value(numbers.seconds).end_object();
      }
      json.end_array().end_object();
    }
    json.end_array().end_object();
  }
  return json.end_array().end_object().text() + "\n";
}

std::string sweep_plan_text(const SweepPlan& plan, bool as_json) {
  JsonWriter json;
  std::vector<std::vector<std::string>> rows;
  json.begin_object().key("base").value(plan.base).key("runs").begin_array();
  for (const SweepRun& run : plan.runs) {
    json.begin_object().key("folder").value(run.folder).key("finished").value(run.finished);
    write_sets(json, run.sets);
    json.end_object();
    rows.push_back({run.name, run.finished ? "finished" : "to run",
                    fmt::format("{}", fmt::join(run.sets, " "))});
  }
  json.end_array().end_object();
  return as_json ? json.text() + "\n" : format_table({"run", "state", "settings"}, rows);
}

}  // namespace leeway
