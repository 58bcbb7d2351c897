#include "sweep/sweep.h"

#include <fmt/format.h>
#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>
#include <sstream>

#include "base/files.h"
#include "base/json.h"
#include "config/given.h"
#include "leeway/error.h"
#include "report/run_folder.h"
#include "report/run_page.h"
#include "run/durations.h"
#include "run/folder_hold.h"
#include "sweep/sweep_processes.h"
#include "sweep/sweep_progress.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

bool is_there(const std::string& path) {
  std::error_code ignored;  // opening it later reports the error
  return fs::exists(path, ignored);
}

std::string settings_file(const SweepRun& run) { return run.folder + ".settings.json"; }
std::string summary_file(const SweepRun& run) { return run.folder + ".summary.json"; }
std::string unfinished_summary(const SweepRun& run) { return summary_file(run) + ".tmp"; }
std::string log_file(const SweepRun& run) { return run.folder + ".log"; }

// FNV-1a: distinguishes texts, in the same way on every machine.
std::string hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return fmt::format("{:016x}", hash);
}

std::string settings_json(const SweepPlan& plan, const SweepRun& run) {
  JsonWriter json;
  json.begin_object().key("base_hash").value(plan.base_hash).key("set").begin_array();
  for (const std::string& set : run.sets) json.value(set);
  return json.end_array().end_object().text() + "\n";
}

double number_in(const rapidjson::Value& object, const char* key) {
  if (!object.IsObject()) return std::nan("");
  const auto found = object.FindMember(key);
  return found != object.MemberEnd() && found->value.IsNumber() ? found->value.GetDouble()
                                                                : std::nan("");
}

// "finished", "stopped", "gave_up"; empty if there is no readable summary.
std::string end_of(const std::string& summary) {
  if (!is_there(summary)) return "";
  try {
    const rapidjson::Document document = parse_json(summary, read_file(summary));
    if (!document.IsObject() || !document.HasMember("end")) return "";
    return document["end"].IsString() ? document["end"].GetString() : "";
  } catch (const Error&) {
    return "";
  }
}

bool is_finished(const SweepPlan& plan, const SweepRun& run) {
  const std::string settings = settings_file(run);
  return is_there(settings) && read_file(settings) == settings_json(plan, run) &&
         end_of(summary_file(run)) == "finished" && is_there(run.folder + "/metrics.jsonl");
}

bool is_selected(const SweepTable& table, const SweepRow& row,
                 const std::vector<std::string>& only) {
  const auto names_it = [&](const std::string& name) {
    return name == table.name || name == row.name || name == table.name + "/" + row.name;
  };
  return only.empty() || std::any_of(only.begin(), only.end(), names_it);
}

void refuse_unknown_names(const SweepConfig& sweep, const std::string& file,
                          const std::vector<std::string>& only) {
  std::vector<std::string> known;
  for (const SweepTable& table : sweep.tables) {
    known.push_back(table.name);
    for (const SweepRow& row : table.rows) {
      known.push_back(row.name);
      known.push_back(table.name + "/" + row.name);
    }
  }
  for (const std::string& name : only) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::string near = nearest_name(name, known);
    throw Error(fmt::format(
        "--only {}: {} has no such table, row or TABLE/ROW; {}", name, file,
        near.empty() ? "leeway sweep --dry-run lists the runs" : "did you mean " + near + "?"));
  }
}

std::vector<std::string> threads_by_default(const Config& config) {
  std::vector<std::string> sets;
  for (const EffectiveValue& value : config.effective) {
    const bool threads = value.key == "trainer.threads" || value.key == "rollout.threads";
    if (threads && value.origin == "default") sets.push_back(value.key + "=1");
  }
  return sets;
}

// Deletes what an earlier sweep left of a run and writes the settings of this one.
void prepare(const SweepPlan& plan, const SweepRun& run) {
  std::error_code error;
  // The settings go first: without them nothing that is left counts as finished.
  for (const std::string& path : {settings_file(run), summary_file(run), unfinished_summary(run),
                                  log_file(run), run.folder}) {
    fs::remove_all(path, error);
    if (error) throw Error(fmt::format("{}: cannot remove: {}", path, error.message()));
  }
  const std::string parent = fs::path(run.folder).parent_path().string();
  fs::create_directories(parent, error);
  if (error) throw Error(fmt::format("{}: cannot create: {}", parent, error.message()));
  write_file_atomically(settings_file(run), settings_json(plan, run));
}

std::string last_line(const std::string& text) {
  std::istringstream lines(text);
  std::string last;
  for (std::string line; std::getline(lines, line);) {
    if (!line.empty()) last = line;
  }
  return last;
}

// Why the run is not finished; empty if it is, and its summary is in place.
std::string failure_of(const SweepRun& run, int status) {
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
    if (end_of(unfinished_summary(run)) != "finished") return "was stopped before its last step";
    std::error_code error;
    fs::rename(unfinished_summary(run), summary_file(run), error);
    return error ? fmt::format("{}: cannot create: {}", summary_file(run), error.message()) : "";
  }
  const std::string said = last_line(read_file(log_file(run)));
  if (WIFSIGNALED(status)) {
    return fmt::format("ended by signal {}{}", WTERMSIG(status), said.empty() ? "" : ": " + said);
  }
  const std::string prefix = "leeway: ";
  if (said.starts_with(prefix)) return said.substr(prefix.size());
  return said.empty() ? fmt::format("exit code {}", WEXITSTATUS(status)) : said;
}

// What a finished run leaves that no table reads. A failure to remove it costs disk space alone.
void drop_weights(const SweepRun& run, Progress& progress) {
  for (const char* name : {"/weights", "/checkpoints"}) {
    std::error_code error;
    fs::remove_all(run.folder + name, error);
    if (error) {
      progress.note(
          fmt::format("warning: {}{}: cannot remove: {}", run.folder, name, error.message()));
    }
  }
}

std::vector<std::string> train_arguments(const SweepPlan& plan, const SweepRun& run, int jobs) {
  std::vector<std::string> sets = run.sets;
  if (jobs > 1) sets.insert(sets.end(), run.thread_sets.begin(), run.thread_sets.end());
  sets.push_back("output_dir=" + toml_string(run.folder));
  std::vector<std::string> args = {"leeway", "train", plan.base, "--json"};
  for (const std::string& set : sets) args.insert(args.end(), {"--set", set});
  return args;
}

}  // namespace

SweepPlan plan_sweep(const Catalog& catalog, const std::string& file,
                     const std::vector<std::string>& only, Progress& progress) {
  SweepPlan plan;
  plan.config = parse_sweep(file, read_file(file));
  refuse_unknown_names(plan.config, file, only);
  plan.base = (fs::path(file).parent_path() / plan.config.base).string();
  const std::string base_text = read_file(plan.base);
  plan.base_hash = hash_of(base_text);
  SweepProblems problems;
  std::set<std::string> notes;
  for (size_t t = 0; t < plan.config.tables.size(); ++t) {
    const SweepTable& table = plan.config.tables[t];
    for (size_t r = 0; r < table.rows.size(); ++r) {
      const SweepRow& row = table.rows[r];
      for (const int64_t seed : plan.config.seeds) {
        Config config;
        try {
          config = sweep_run_config(catalog, table, row, seed, plan.base, base_text);
        } catch (const ConfigError& error) {
          problems.add(error);
          continue;
        }
        for (const std::string& note : config.notes) {
          if (notes.insert(note).second) progress.note("leeway: note: " + note);
        }
        if (!is_selected(table, row, only)) continue;
        SweepRun run;
        run.table = t;
        run.row = r;
        run.seed = seed;
        run.name = fmt::format("{}/{}/seed_{}", table.name, row.name, seed);
        run.folder = plan.config.output_dir + "/" + run.name;
        run.sets = sweep_sets(table, row, seed);
        run.thread_sets = threads_by_default(config);
        run.steps = config.run.trainer.max_steps;
        run.finished = is_finished(plan, run);
        plan.runs.push_back(std::move(run));
      }
    }
  }
  problems.throw_if_any();
  return plan;
}

SweepResult run_sweep(const SweepPlan& plan, int jobs, const SweepHost& host) {
  LEEWAY_CHECK(jobs >= 1, "a sweep needs at least one job");
  std::error_code error;
  fs::create_directories(plan.config.output_dir, error);
  if (error) {
    throw Error(fmt::format("output_dir = \"{}\": {}", plan.config.output_dir, error.message()));
  }
  // Two sweeps would delete and start each other's runs.
  const FolderHold hold(plan.config.output_dir, "another sweep is at work in this folder");
  SweepResult result;
  result.failures.resize(plan.runs.size());
  std::vector<size_t> waiting;  // the next one last
  for (size_t k = plan.runs.size(); k-- > 0;) {
    // Checked again: another sweep may have finished it before this one had the folder.
    if (!plan.runs[k].finished && !is_finished(plan, plan.runs[k])) waiting.push_back(k);
  }
  const size_t finished = plan.runs.size() - waiting.size();
  if (finished > 0) {
    host.progress.note(fmt::format("{} of {} runs are finished", finished, plan.runs.size()));
  }
  SweepProcesses processes(host.in_child);
  SweepProgress progress(plan.runs.size(), finished, host.progress);
  while (!waiting.empty() || processes.count() > 0) {
    while (!waiting.empty() && processes.count() < static_cast<size_t>(jobs)) {
      const SweepRun& run = plan.runs[waiting.back()];
      prepare(plan, run);
      processes.start(waiting.back(), train_arguments(plan, run, jobs), unfinished_summary(run),
                      log_file(run));
      progress.began(waiting.back(), run.folder, run.steps);
      waiting.pop_back();
    }
    progress.show();
    if (host.wait()) {
      result.interrupted = true;
      return result;
    }
    while (const std::optional<SweepProcesses::Ended> ended = processes.reap()) {
      const SweepRun& run = plan.runs[ended->run];
      std::string& failure = result.failures[ended->run];
      failure = failure_of(run, ended->status);
      if (failure.empty() && !plan.config.keep_weights) drop_weights(run, host.progress);
      progress.ended(ended->run, fmt::format("{}: {} after {}", run.name,
                                             failure.empty() ? "finished" : "failed",
                                             duration_text(ended->seconds)));
    }
  }
  return result;
}

SweepNumbers read_numbers(const SweepRun& run) {
  const std::string summary_name = summary_file(run);
  const rapidjson::Document summary = parse_json(summary_name, read_file(summary_name));
  if (!summary.IsObject() || !summary.HasMember("after")) {
    throw Error(summary_name + ": is not the summary of a run; remove it to run it again");
  }
  SweepNumbers numbers;
  numbers.reward = number_in(summary["after"], "eval/all/reward/mean");
  numbers.seconds = number_in(summary, "seconds");
  numbers.max_mismatch_kl = numbers.max_off_policy_level = std::nan("");
  const std::string metrics_name = run.folder + "/metrics.jsonl";
  std::istringstream lines(read_file(metrics_name));
  double dropped = 0;
  size_t steps = 0, count = 0;
  for (std::string line; std::getline(lines, line);) {
    const rapidjson::Document step =
        parse_json(fmt::format("{} step {}", metrics_name, ++steps), line);
    // fmax ignores NaN.
    numbers.max_mismatch_kl =
        std::fmax(numbers.max_mismatch_kl, number_in(step, "mismatch_kl/all/mean"));
    numbers.max_off_policy_level =
        std::fmax(numbers.max_off_policy_level, number_in(step, "off_policy_level/all/max"));
    const double kept = number_in(step, "kept_share");
    if (std::isnan(kept)) continue;
    dropped += 1 - kept;
    ++count;
  }
  numbers.dropped_share = count > 0 ? dropped / static_cast<double>(count) : std::nan("");
  return numbers;
}

std::optional<std::string> write_sweep_report(const SweepPlan& plan, const SweepResult& result) {
  std::string runs;
  for (size_t k = 0; k < plan.runs.size(); ++k) {
    const SweepRun& run = plan.runs[k];
    if (run.seed != plan.config.seeds.front() || !result.failures[k].empty()) continue;
    // The seed is the same for all and not informative.
    const std::string name = fs::path(run.name).parent_path().string();
    runs += (runs.empty() ? "" : ", ") + run_folder_json(run.folder, name);
  }
  if (runs.empty()) return std::nullopt;
  const std::string page = plan.config.output_dir + "/report.html";
  write_file_atomically(page, run_page("{\"runs\": [" + runs + "]}"));
  return page;
}

}  // namespace leeway
