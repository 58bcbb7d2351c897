#include "run/batch_files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <string_view>

#include "base/files.h"
#include "base/json.h"
#include "core/batch_json.h"
#include "leeway/error.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

template <class List>
void write_list(JsonWriter& json, const char* key, const List& values) {
  json.key(key).begin_array();
  for (const auto value : values) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, float>) {
      json.value(value);
    } else {
      json.value(static_cast<double>(value));
    }
  }
  json.end_array();
}

// Positions before the first trained token.
size_t prompt_length(const std::vector<uint8_t>& mask) {
  return static_cast<size_t>(std::find(mask.begin(), mask.end(), uint8_t{1}) - mask.begin());
}

// Adds the rollouts of a file to a batch, a line at a time.
class RolloutReader {
 public:
  explicit RolloutReader(BatchFile& file) : file_(file), batch_(file.batch) {}

  void add(const std::string& place, std::string_view line) {
    place_ = place;
    const rapidjson::Document rollout = parse_json(place, line);
    if (!rollout.IsObject()) fail("is not an object");
    const double advantage = number(rollout, "advantage");
    const auto samples = rollout.FindMember("samples");
    if (samples == rollout.MemberEnd() || !samples->value.IsArray()) {
      fail("\"samples\" is missing or not a list");
    }
    const auto group = rollout.FindMember("group");
    const std::string label = group != rollout.MemberEnd() && group->value.IsNumber()
                                  ? fmt::format("{}", group->value.GetDouble())
                                  : "";
    for (const auto& sample : samples->value.GetArray()) {
      if (!sample.IsObject()) fail("a sample is not an object");
      add_sample(sample, advantage);
      batch_.groups.push_back(label);
      batch_.rollout_ids.push_back(static_cast<int32_t>(*file_.rollouts));
    }
    if (rollout.HasMember("batch_rollouts")) {
      constexpr double kMost = 1e9;
      const double all = number(rollout, "batch_rollouts");
      if (!(all >= 0.0 && all <= kMost)) fail("\"batch_rollouts\" is not a count of rollouts");
      file_.batch_rollouts = static_cast<size_t>(all);
    }
    ++*file_.rollouts;
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const {
    throw Error(fmt::format("{}: {}", place_, problem));
  }

  double number(const rapidjson::Value& from, const char* key) const {
    const auto found = from.FindMember(key);
    if (found == from.MemberEnd() || !found->value.IsNumber()) {
      fail(fmt::format("\"{}\" is missing or not a number", key));
    }
    return found->value.GetDouble();
  }

  // One number per token; null is NaN.
  std::vector<double> list(const rapidjson::Value& sample, const char* key, size_t count) const {
    const auto found = sample.FindMember(key);
    if (found == sample.MemberEnd() || !found->value.IsArray()) {
      fail(fmt::format("\"{}\" of a sample is missing or not a list", key));
    }
    std::vector<double> values;
    for (const auto& value : found->value.GetArray()) {
      if (!value.IsNumber() && !value.IsNull()) {
        fail(fmt::format("\"{}\" of a sample contains something that is not a number", key));
      }
      values.push_back(value.IsNull() ? std::nan("") : value.GetDouble());
    }
    if (count != 0 && values.size() != count) {
      fail(fmt::format("\"{}\" of a sample has {} entries, \"pi\" has {}", key, values.size(),
                       count));
    }
    return values;
  }

  void add_sample(const rapidjson::Value& sample, double advantage) {
    const std::vector<double> pi = list(sample, "pi", 0);
    if (pi.empty()) fail("a sample has no tokens");
    const size_t n = pi.size();
    const std::vector<double> rollout = list(sample, "rollout", n);
    std::vector<uint8_t> mask;
    for (const double value : list(sample, "loss_mask", n)) {
      if (value != 0.0 && value != 1.0) fail("\"loss_mask\" contains something other than 0 and 1");
      mask.push_back(value == 1.0);
    }
    for (const double value : list(sample, "versions", n)) {
      if (!(std::abs(value) <= 2147483647.0) || value != std::floor(value)) {
        fail("\"versions\" contains something that is not an integer");
      }
      batch_.versions.push_back(static_cast<int32_t>(value));
    }
    const size_t prompt = prompt_length(mask);
    for (size_t t = 0; t < n; ++t) batch_.weights.push_back(t < prompt ? 0.0 : 1.0);
    batch_.pi.insert(batch_.pi.end(), pi.begin(), pi.end());
    batch_.rollout.insert(batch_.rollout.end(), rollout.begin(), rollout.end());
    batch_.mask.insert(batch_.mask.end(), mask.begin(), mask.end());
    const std::vector<double> advantages = sample.HasMember("advantages")
                                               ? list(sample, "advantages", n)
                                               : std::vector<double>(n, advantage);
    batch_.advantages.insert(batch_.advantages.end(), advantages.begin(), advantages.end());
    batch_.offsets.push_back(static_cast<int64_t>(batch_.pi.size()));
  }

  BatchFile& file_;
  Batch& batch_;
  std::string place_;
};

BatchFile read_rollouts(const std::string& name, std::string_view text) {
  BatchFile file;
  file.rollouts = 0;
  RolloutReader reader(file);
  size_t line = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    ++line;
    if (text.substr(0, end).find_first_not_of(" \t\r") != std::string_view::npos) {
      reader.add(fmt::format("{} line {}", name, line), text.substr(0, end));
    }
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  if (file.batch.pi.empty()) throw Error(fmt::format("{}: contains no trained rollout", name));
  return file;
}

// Steps N of a folder's files step_N.EXTENSION, in ascending order.
std::vector<int64_t> steps_in(const std::string& folder, std::string_view extension) {
  std::vector<int64_t> steps;
  std::error_code missing;
  for (const auto& entry : fs::directory_iterator(folder, missing)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("step_") || !name.ends_with(extension)) continue;
    const char* end = name.data() + name.size() - extension.size();
    int64_t step = 0;
    const auto read = std::from_chars(name.data() + 5, end, step);
    if (read.ec == std::errc() && read.ptr == end) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

// "1, 10, 20 .. 300": shortened if there are many.
std::string steps_text(const std::vector<int64_t>& steps) {
  constexpr size_t kMost = 12;
  if (steps.empty()) return "none";
  if (steps.size() <= kMost) return fmt::format("{}", fmt::join(steps, ", "));
  return fmt::format("{} .. {}", fmt::join(steps.begin(), steps.begin() + kMost - 1, ", "),
                     steps.back());
}

}  // namespace

std::string batch_json(const StepRecord& record) {
  const LearnerResult& learned = record.learned;
  JsonWriter json;
  json.begin_object().key("sequences").begin_array();
  size_t rollout = 0;
  for (size_t g = 0; g < record.batch.groups.size(); ++g) {
    const Group& group = record.batch.groups[g];
    for (size_t r = 0; r < group.rollouts.size(); ++r, ++rollout) {
      for (size_t s = record.batch.first_sample[rollout];
           s < record.batch.first_sample[rollout + 1]; ++s) {
        const Sample& sample = record.batch.learner.samples[s];
        json.begin_object().key("group").value(static_cast<double>(group.number));
        json.key("rollout_id").value(static_cast<double>(sample.rollout_id));
        json.key("prompt_len").value(static_cast<double>(prompt_length(sample.loss_mask)));
        if (sample.advantages.size() > 1) {
          write_list(json, "advantages", sample.advantages);
        } else {
          json.key("advantages").value(record.batch.advantages[g][r]);
        }
        write_list(json, "mask", sample.loss_mask);
        write_list(json, "versions", sample.versions);
        write_list(json, "rollout", sample.rollout);
        write_list(json, "pi", learned.logprobs[s]);
        if (!learned.prox.empty()) write_list(json, "prox", learned.prox[s]);
        if (!learned.ref.empty()) write_list(json, "ref", learned.ref[s]);
        if (!learned.teacher.empty()) write_list(json, "teacher", learned.teacher[s]);
        json.end_object();
      }
    }
  }
  return json.end_array().end_object().text() + "\n";
}

std::string BatchFile::part_of_batch() const {
  if (!rollouts) return "";
  if (!batch_rollouts) return fmt::format("{} rollouts of the batch", *rollouts);
  return *rollouts == *batch_rollouts
             ? fmt::format("all {} rollouts of the batch", *rollouts)
             : fmt::format("{} of the batch's {} rollouts", *rollouts, *batch_rollouts);
}

BatchFile read_batch_file(const std::string& name) {
  const std::string text = read_file(name);
  if (name.ends_with(".jsonl")) return read_rollouts(name, text);
  LoadedBatch loaded = parse_batch(name, text);
  return {std::move(loaded.batch), std::move(loaded.warnings), {}, {}};
}

std::string batch_file_of_run(const std::string& run, std::optional<int64_t> step) {
  if (step) {
    for (const char* form : {"{}/batches/step_{}.json", "{}/rollouts/step_{}.jsonl"}) {
      const std::string name = fmt::format(fmt::runtime(form), run, *step);
      std::error_code missing;
      if (fs::exists(name, missing)) return name;
    }
  }
  if (!fs::is_directory(run)) throw Error(fmt::format("--run {}: is not a folder", run));
  throw Error(
      fmt::format("--run {}: {}; whole batches are there of steps: {}; rollouts of steps: {} "
                  "(output.batches_every and output.rollouts_every say which are kept)",
                  run, step ? fmt::format("nothing was kept of step {}", *step) : "give --step",
                  steps_text(steps_in(run + "/batches", ".json")),
                  steps_text(steps_in(run + "/rollouts", ".jsonl"))));
}

std::string missing_stream(const BatchFile& file, const LossSpec& spec) {
  if (!file.rollouts) return "";
  for (const Stream stream : {Stream::prox, Stream::ref, Stream::teacher}) {
    if (!spec.reads(stream)) continue;
    return fmt::format(
        "needs the stream {}, which files of rollouts do not keep; output.batches_every keeps "
        "whole batches with every stream that the run's loss reads",
        name_of(stream));
  }
  return "";
}

}  // namespace leeway
