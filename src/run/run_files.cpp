#include "run/run_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/checked_files.h"
#include "base/files.h"
#include "base/folders.h"
#include "base/json.h"
#include "base/printable.h"
#include "leeway/error.h"
#include "report/run_folder.h"
#include "report/run_page.h"
#include "run/batch_files.h"
#include "run/policy_card.h"
#include "run/run_end.h"
#include "run/superseded.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

double wall_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

// The step of a JSONL line, or nothing if the line is damaged, for example by a power failure.
std::optional<int64_t> step_of(const std::string& line) {
  try {
    const rapidjson::Document row = parse_json("", line);
    const bool there = row.IsObject() && row.HasMember("step") && row["step"].IsNumber();
    if (!there || !(row["step"].GetDouble() >= 0 && row["step"].GetDouble() <= 0x1p53)) {
      return std::nullopt;
    }
    return static_cast<int64_t>(row["step"].GetDouble());
  } catch (const Error&) {
    return std::nullopt;
  }
}

template <class List, class Each>
void write_list(JsonWriter& json, const char* key, const List& values, Each&& each) {
  json.key(key).begin_array();
  for (const auto& value : values) each(value);
  json.end_array();
}

// What the environment said beside the reward: numbers of its own, and what single turns are worth.
void write_said(JsonWriter& json, const Rollout& rollout) {
  if (!rollout.metrics.empty()) {
    json.key("env_metrics").begin_object();
    for (const auto& [name, value] : rollout.metrics) json.key(name).value(value);
    json.end_object();
  }
  const auto has_reward = [](const StepCredit& step) { return step.reward.has_value(); };
  if (std::any_of(rollout.credit.begin(), rollout.credit.end(), has_reward)) {
    write_list(json, "turn_rewards", rollout.credit, [&](const StepCredit& step) {
      step.reward ? json.value(*step.reward) : json.null();
    });
  }
}

void write_sample(JsonWriter& json, const Sample& sample, const std::vector<float>& pi,
                  const std::vector<uint8_t>& kept, const Tokenizer& tokenizer) {
  json.begin_object();
  write_list(json, "tokens", sample.ids,
             [&](int32_t id) { json.value(tokenizer.decode(std::span(&id, 1))); });
  const auto number = [&](auto value) { json.value(static_cast<double>(value)); };
  write_list(json, "ids", sample.ids, number);
  write_list(json, "loss_mask", sample.loss_mask, number);
  write_list(json, "rollout", sample.rollout, [&](float value) { json.value(value); });
  write_list(json, "pi", pi, [&](float value) { json.value(value); });
  write_list(json, "kept", kept, number);
  write_list(json, "versions", sample.versions, number);
  // Where the environment gives credit by turn.
  if (sample.advantages.size() > 1) write_list(json, "advantages", sample.advantages, number);
  json.end_object();
}

}  // namespace

RunFiles::RunFiles(ClaimedFolder claimed)
    : folder_(std::move(claimed.name)), hold_(std::move(claimed.hold)) {}

void RunFiles::begin(const Config& config, const std::string& objective, const std::string& job) {
  identity_ = new_identity(config, job);
  open(config, objective);
}

RunFiles::RunFiles(const Config& config, const std::string& objective, Resumption resumption)
    : folder_(resumption.folder), hold_(std::move(resumption.hold)) {
  LEEWAY_CHECK(resumption.from.has_value(), "a resumed run needs a checkpoint");
  if (resumption.identity) {
    identity_ = *resumption.identity;
    const uint32_t now = configuration_hash(config, false);
    if (identity_.config_hashes.back() != now) identity_.config_hashes.push_back(now);
  } else {
    identity_ = new_identity(config, "train");
    adopt_identity(*resumption.from, identity_);
  }
  remove_run_end(folder_);
  remove_temporary_files();
  set_aside_after(*resumption.from);
  open(config, objective);
}

void RunFiles::set_aside_after(const Checkpoint& from) {
  Superseded superseded(folder_);
  const bool supervised = from.phase == Phase::sft;
  for (const Checkpoint& each : CheckpointStore(folder_, {}, {}).all()) {
    if (!from.before(each)) continue;
    superseded.move("checkpoints/" + fs::path(each.folder).filename().string());
  }
  // If the supervised training is being resumed, RL has not begun.
  const int64_t last = supervised ? -1 : from.step;
  for (const char* name : {"metrics.jsonl", "eval.jsonl", "given_up.jsonl"}) {
    set_aside_lines(name, last, superseded);
  }
  if (supervised) set_aside_lines("sft.jsonl", from.step, superseded);
  for (const std::string parent : {"rollouts", "batches", "weights"}) {
    // Weights of `leeway sft` are numbered by its own steps.
    const int64_t kept = parent == "weights" && identity_.job == "sft" ? from.step : last;
    std::vector<std::string> later;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(path(parent), error)) {
      const std::string name = entry.path().filename().string();  // step_N, step_N.jsonl
      if (name.starts_with("step_") && std::atoll(name.c_str() + 5) > kept) later.push_back(name);
    }
    for (const std::string& name : later) superseded.move(parent + "/" + name);
  }
  if (!superseded.empty()) {
    superseded.move("report.html");
    moved_ = fmt::format("what came after {} was moved to {}", from.name(), superseded.folder());
  }
  for (const std::string& name : superseded.left()) {
    moved_ += fmt::format("{}{} is behind a symbolic link and stays", moved_.empty() ? "" : "; ",
                          path(name));
  }
}

void RunFiles::open(const Config& config, const std::string& objective) {
  for (const EnvironmentTable& table : config.run.environments)
    environment_ids_.push_back(table.id);
  // If all values come from this folder's file, it is kept, with the origins it was written with.
  const auto from_here = [&](const EffectiveValue& value) {
    return value.origin.starts_with(path("config.toml"));
  };
  write_identity(folder_, identity_);  // before config.toml: it covers both configurations
  if (!std::all_of(config.effective.begin(), config.effective.end(), from_here)) {
    write_file_atomically(path("config.toml"), config_toml(config));
  }
  write_file_atomically(path("objective.txt"), objective);
  rollouts_keep_ = config.run.output.rollouts_keep;
  log_ = LogFile(folder_, config.run.output.log_bytes);
  metrics_ = AppendFile(path("metrics.jsonl"));  // a folder with this file counts as a run
  if (config.run.output.tensorboard) {
    tensorboard_ = std::make_unique<TensorBoardWriter>(path("tensorboard"), wall_time());
  }
}

void RunFiles::remove_temporary_files() {
  std::error_code ignored;
  std::vector<fs::path> found;
  for (fs::recursive_directory_iterator at(folder_, ignored), end; !ignored && at != end;
       at.increment(ignored)) {
    // NAME.PROCESS.tmp, as everything here is written
    const std::string process = at->path().stem().extension().string();
    const bool number =
        process.size() > 1 && process.find_first_not_of("0123456789", 1) == std::string::npos;
    if (at->path().extension() == ".tmp" && number) found.push_back(at->path());
  }
  for (const fs::path& each : found) fs::remove(each, ignored);
}

void RunFiles::set_aside_lines(const std::string& name, int64_t step, Superseded& superseded) {
  if (!is_present(path(name))) return;
  const std::string text = read_file(path(name));
  std::string kept, later;
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find('\n', start), text.size());
    const std::string line = text.substr(start, end - start);
    const bool whole = end < text.size();  // otherwise truncated when the run was killed
    start = end + 1;
    const auto row_step = whole ? step_of(line) : std::nullopt;
    (row_step && *row_step <= step ? kept : later) += line + "\n";
  }
  if (later.empty()) return;
  superseded.keep(name, later);
  write_file_atomically(path(name), kept);
}

void RunFiles::append(AppendFile& file, const std::string& name, const std::string& text) {
  // metrics.jsonl is open during the whole run: if it is gone, so is the folder.
  for (const AppendFile* each : {&metrics_, &file}) {
    if (!each->is_open() || !each->is_gone()) continue;
    throw Error(fmt::format("{}: was deleted, moved or replaced during the run",
                            path(each == &file ? name : "metrics.jsonl")));
  }
  if (!file.is_open()) file = AppendFile(path(name));
  file.append(text);
}

void RunFiles::append_metrics(AppendFile& file, const std::string& name, int64_t step,
                              const Metrics& metrics) {
  JsonWriter json;
  json.begin_object().key("step").value(static_cast<double>(step));
  for (const auto& [key, value] : metrics) json.key(key).value(value);
  json.end_object();
  append(file, name, json.text());
  if (tensorboard_) tensorboard_->add(step, metrics, wall_time());
}

void RunFiles::log(const std::string& line) { log_.append(printable(line)); }

void RunFiles::write_step(const StepRecord& record) {
  append_metrics(metrics_, "metrics.jsonl", record.step, record.metrics);
}

void RunFiles::write_given_up(const StepRecord& record) {
  for (const DroppedGroup& group : record.given_up) {
    JsonWriter json;
    json.begin_object().key("step").value(static_cast<double>(record.step));
    json.key("group").value(static_cast<double>(group.number));
    json.key("environment").value(environment_ids_[group.environment]);
    json.key("example").value(static_cast<double>(group.example));
    json.key("survivors").value(static_cast<double>(group.survivors));
    json.key("trained").value(group.trained).key("message").value(group.message);
    append(given_up_, "given_up.jsonl", json.end_object().text());
  }
}

void RunFiles::write_server_event(const std::string& server, const std::string& state,
                                  const std::string& text) {
  JsonWriter json;
  json.begin_object().key("time").value(wall_time()).key("server").value(server);
  json.key("state").value(state).key("text").value(text);
  append(servers_, "servers.jsonl", json.end_object().text());
}

void RunFiles::write_sft(int64_t step, const Metrics& metrics) {
  Metrics named = metrics;
  // TensorBoard has one name space for all files.
  if (tensorboard_) {
    for (auto& [key, value] : named) key = "sft/" + key;
    tensorboard_->add(step, named, wall_time());
  }
  JsonWriter json;
  json.begin_object().key("step").value(static_cast<double>(step));
  for (const auto& [key, value] : metrics) json.key(key).value(value);
  append(sft_, "sft.jsonl", json.end_object().text());
}

void RunFiles::write_eval(int64_t step, const Metrics& metrics) {
  append_metrics(eval_, "eval.jsonl", step, metrics);
}

void RunFiles::sync() const {
  for (const char* name : {"metrics.jsonl", "sft.jsonl", "eval.jsonl", "given_up.jsonl"}) {
    const int file = ::open(path(name).c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    ::fsync(file);
    ::close(file);
  }
}

void RunFiles::write_rollouts(const StepRecord& record, const RunSetup& setup, int64_t groups) {
  const PreparedBatch& batch = record.batch;
  const size_t count = batch.groups.size();
  const size_t wanted = groups <= 0 ? count : std::min(count, static_cast<size_t>(groups));
  std::string text;
  size_t rollout = 0;
  for (size_t g = 0; g < count; ++g) {
    const Group& group = batch.groups[g];
    // Selects `wanted` of `count` groups, evenly spread.
    const bool shown = (g * wanted) / count != ((g + 1) * wanted) / count;
    for (size_t r = 0; r < group.rollouts.size(); ++r, ++rollout) {
      if (!shown) continue;
      const Rollout& finished = group.rollouts[r];
      JsonWriter json;
      json.begin_object().key("step").value(static_cast<double>(record.step));
      json.key("group").value(static_cast<double>(group.number));
      json.key("rollout").value(static_cast<double>(r));
      json.key("environment").value(setup.environment_ids[group.environment]);
      json.key("example").value(static_cast<double>(group.example.index));
      json.key("reward").value(finished.reward).key("rewards").begin_object();
      for (const RewardPart& part : finished.rewards) json.key(part.name).value(part.value);
      json.end_object();
      write_said(json, finished);
      json.key("advantage").value(batch.advantages[g][r]);
      if (!batch.drop_reasons[g].empty()) json.key("dropped").value(batch.drop_reasons[g]);
      json.key("finish").value(finished.truncated ? "length" : "stop");
      json.key("turns").value(static_cast<double>(finished.steps.size()));
      json.key("batch_rollouts").value(static_cast<double>(batch.first_sample.size() - 1));
      json.key("samples").begin_array();
      for (size_t s = batch.first_sample[rollout]; s < batch.first_sample[rollout + 1]; ++s) {
        write_sample(json, batch.learner.samples[s], record.learned.logprobs[s],
                     record.learned.kept[s], *setup.tokenizer);
      }
      text += json.end_array().end_object().text() + "\n";
    }
  }
  std::error_code error;
  fs::create_directories(path("rollouts"), error);
  write_file_atomically(path(fmt::format("rollouts/step_{}.jsonl", record.step)), text);
  keep_step_files(path("rollouts"), rollouts_keep_);
}

void RunFiles::write_batch(const StepRecord& record) {
  std::error_code error;
  fs::create_directories(path("batches"), error);
  write_file_atomically(path(fmt::format("batches/step_{}.json", record.step)), batch_json(record));
}

std::string weights_folder(const std::string& run_folder, int64_t step) {
  return fmt::format("{}/weights/step_{}", run_folder, step);
}

std::string RunFiles::save_weights(const Parameters& weights, int64_t step, const RunSetup& setup,
                                   bool rounded) const {
  const std::string to = weights_folder(folder_, step);
  if (const std::string bad = not_finite_text(weights); !bad.empty()) {
    throw Error(fmt::format("{}: not saved: {}", to, bad));
  }
  refuse_full_disk(to, sizeof(float) * static_cast<uint64_t>(weights.count()));
  PolicyCard card = setup.card;
  card.rounded = rounded;
  make_folders(to);
  remove_checksums(to);
  // Whenever a kill comes, what is rounded says so: also where rounded weights are replaced by full
  // ones, or the other way round.
  FileSum card_sum;
  if (rounded) card_sum = write_policy_card(to, card);
  FileSums sums = save_parameters(weights, to);
  if (!rounded) card_sum = write_policy_card(to, card);
  sums["leeway.json"] = card_sum;
  if (!setup.tokenizer_file.empty()) {
    sums["tokenizer.json"] =
        write_file_atomically(to + "/tokenizer.json", read_file(setup.tokenizer_file));
  }
  const std::string& model_path = setup.config.run.model.path;
  for (const char* name : {"tokenizer_config.json", "generation_config.json",
                           "special_tokens_map.json", "vocab.json", "merges.txt"}) {
    const fs::path from = fs::path(model_path) / name;
    std::error_code error;
    if (model_path.empty() || !fs::exists(from, error)) continue;
    sums[name] = write_file_atomically(to + "/" + name, read_file(from.string()));
  }
  write_checksums(to, sums);
  return to;
}

void RunFiles::write_report() const {
  const std::string folders[] = {folder_};
  write_file_atomically(path("report.html"), run_page(run_folders_json(folders)));
}

namespace {

// A line of eval.jsonl or metrics.jsonl; nothing where it has no step.
std::optional<Evaluation> row_of(const std::string& name, const std::string& line) {
  const auto step = step_of(line);
  if (!step) return std::nullopt;
  Metrics metrics;
  const auto row = parse_json(name, line);
  for (const auto& member : row.GetObject()) {
    if (std::string_view(member.name.GetString()) == "step") continue;
    metrics.emplace_back(member.name.GetString(),
                         member.value.IsNumber() ? member.value.GetDouble() : std::nan(""));
  }
  return Evaluation(*step, std::move(metrics));
}

// Without the newline at its end. Nothing if the last line is truncated, or there is none.
std::optional<std::string> evaluations_text(const std::string& name) {
  if (!is_present(name)) return std::nullopt;
  std::string text = read_file(name);
  if (!text.ends_with('\n')) return std::nullopt;
  text.pop_back();
  return text;
}

}  // namespace

std::optional<Evaluation> last_evaluation(const std::string& folder) {
  const std::string name = folder + "/eval.jsonl";
  const auto text = evaluations_text(name);
  if (!text) return std::nullopt;
  return row_of(name, text->substr(text->rfind('\n') + 1));  // npos + 1 is 0
}

std::optional<Evaluation> first_evaluation(const std::string& folder) {
  const std::string name = folder + "/eval.jsonl";
  const auto text = evaluations_text(name);
  if (!text) return std::nullopt;
  return row_of(name, text->substr(0, text->find('\n')));
}

std::optional<Metrics> metrics_of_first_step(const std::string& folder) {
  const std::string name = folder + "/metrics.jsonl";
  std::string line;
  if (std::ifstream file(name); !std::getline(file, line)) return std::nullopt;
  auto row = row_of(name, line);
  if (!row) return std::nullopt;
  return std::move(row->second);
}

}  // namespace leeway
