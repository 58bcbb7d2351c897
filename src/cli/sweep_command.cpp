// `leeway sweep`: its options, tables and JSON.

#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <thread>

#include "base/json.h"
#include "cli/commands.h"
#include "leeway/error.h"
#include "run/output.h"
#include "sweep/sweep.h"

namespace leeway {
namespace {

struct Options {
  std::string file;
  std::vector<std::string> only;
  int jobs = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  bool json = false, markdown = false, dry_run = false;
};

// `--only a b SWEEP.toml`: the option takes every word after it. Names have no dot, files have one.
void reclaim_file(Options& options) {
  for (auto word = options.only.begin(); word != options.only.end(); ++word) {
    if (!options.file.empty() || word->find('.') == std::string::npos) continue;
    options.file = *word;
    options.only.erase(word);
    break;
  }
  if (options.file.empty())
    throw Error("sweep: give the sweep file, as in leeway sweep SWEEP.toml");
}

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

std::string tables_text(const std::vector<RowResult>& rows, bool markdown) {
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

void write_sets(JsonWriter& json, const std::vector<std::string>& sets) {
  json.key("set").begin_array();
  for (const std::string& set : sets) json.value(set);
  json.end_array();
}

std::string sweep_json(const SweepPlan& plan, const SweepResult& result,
                       const std::vector<RowResult>& rows,
                       const std::optional<std::string>& report) {
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

std::string dry_run_text(const SweepPlan& plan, bool as_json) {
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

void run(Program& program, Options options) {
  reclaim_file(options);
  const SweepPlan plan = plan_sweep(program.catalog, options.file, options.only);
  if (options.dry_run) return print(dry_run_text(plan, options.json));
  const SweepResult result = run_sweep(plan, options.jobs);
  if (result.interrupted) {
    say("leeway: stopped; the same command runs what is not finished");
    program.exit_code = 130;
    return;
  }
  const std::vector<RowResult> rows = collect(plan, result);
  const std::optional<std::string> report = write_sweep_report(plan, result);
  std::string failed;
  for (size_t k = 0; k < plan.runs.size(); ++k) {
    if (result.failures[k].empty()) continue;
    failed += fmt::format("\n  {}: {}", plan.runs[k].name, result.failures[k]);
  }
  if (!failed.empty()) {
    say(fmt::format("leeway: runs that failed; {}/TABLE/ROW/seed_N.log has more:{}",
                    plan.config.output_dir, failed));
    program.exit_code = 3;
  }
  if (report && !options.json) say("report   " + *report);
  print(options.json ? sweep_json(plan, result, rows, report)
                     : tables_text(rows, options.markdown));
}

}  // namespace

void add_sweep(CLI::App& app, Program& program) {
  auto* command = app.add_subcommand(
      "sweep",
      "Trains every row of every table of a sweep file with every seed, in processes side by\n"
      "side, and prints the tables. Run again, it goes on with what is not finished.");
  auto options = std::make_shared<Options>();
  command
      ->add_option("sweep", options->file, "A TOML file, such as examples/02_off_policy/sweep.toml")
      ->type_name("SWEEP.toml");
  command
      ->add_option("--jobs", options->jobs,
                   "Runs at a time; default: the number of cores. With more than one, each run\n"
                   "samples and trains on one thread, unless the files say otherwise")
      ->check(CLI::Range(1, 4096));
  command->add_option("--only", options->only, "Tables, rows or TABLE/ROW to run; default: all")
      ->type_name("NAME");
  auto* json =
      command->add_flag("--json", options->json, "Print all numbers, those of each seed too");
  auto* dry_run = command->add_flag("--dry-run", options->dry_run,
                                    "Check every run and list them; write nothing");
  command->add_flag("--markdown", options->markdown, "Print the tables as Markdown")
      ->excludes(json)
      ->excludes(dry_run);
  command->callback([&program, options] { run(program, *options); });
}

}  // namespace leeway
