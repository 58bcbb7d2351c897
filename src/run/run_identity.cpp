#include "run/run_identity.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <random>

#include "base/checked_files.h"
#include "base/crc32c.h"
#include "base/files.h"
#include "base/json.h"
#include "leeway/error.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

constexpr const char* kName = "identity.json";

bool is_there(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

// Whether the value is a path rather than a special word.
bool is_a_path(const std::string& key, const std::string& value) {
  return !value.empty() && !(key == "model.tokenizer" && value == "byte") &&
         !(key == "trainer.reference" && (value == "initial" || value == "base"));
}

DataSum sum_of(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    const FileSum sum = sum_of_file(path);
    return {path, sum.bytes, sum.crc32c};
  }
  FileSums sums;
  for (const auto& entry : fs::directory_iterator(path, error)) {
    const std::string name = entry.path().filename().string();
    const bool read = name == "config.json" || name == "adapter_config.json" ||
                      name == "tokenizer.json" || name.ends_with(".safetensors");
    if (read) sums[name] = sum_of_file(entry.path().string());
  }
  DataSum all{.path = path};
  std::string text;
  for (const auto& [name, sum] : sums) {
    text += fmt::format("{} {} {}\n", name, sum.bytes, sum.crc32c);
    all.bytes += sum.bytes;
  }
  all.crc32c = crc32c(text);
  return all;
}

std::string new_id() {
  std::random_device random;
  std::string id;
  for (int k = 0; k < 4; ++k) id += fmt::format("{:08x}", random());
  return id;
}

}  // namespace

bool may_change(const std::string& key) {
  for (const char* prefix :
       {"output.", "output_dir", "eval.", "checkpoint.", "trainer.threads", "rollout.threads",
        "rollout.kv_bytes", "inference.", "orchestrator.rollout_timeout", "trainer.max_steps",
        "trainer.sharding", "sft.max_steps"}) {
    if (key.starts_with(prefix)) return true;
  }
  return false;
}

bool may_change_on_resume(const std::string& key) {
  if (may_change(key)) return true;
  for (const char* name : {"orchestrator.max_error_reschedule_attempts",
                           "orchestrator.max_prompt_failures", "orchestrator.zero_progress_batches",
                           "orchestrator.retry_backoff", "orchestrator.advantage_timeout"}) {
    if (key == name) return true;
  }
  if (!key.starts_with("environment.")) return false;
  for (const char* name : {".command", ".processes", ".turn_timeout", ".max_output_bytes",
                           ".max_memory_bytes", ".max_cpu_seconds", ".max_processes"}) {
    if (key.ends_with(name)) return true;
  }
  return false;
}

bool names_data(const std::string& key) {
  if (key == "sft.data" || key == "model.path" || key == "model.lora.path" ||
      key == "model.tokenizer" || key == "trainer.teacher" || key == "trainer.reference") {
    return true;
  }
  return key.starts_with("environment.") && (key.ends_with(".data") || key.ends_with(".eval_data"));
}

uint32_t configuration_hash(const Config& config, bool only_given) {
  std::map<std::string, std::string> values;
  for (const EffectiveValue& value : config.effective) {
    if (may_change(value.key) || (only_given && value.origin == "default")) continue;
    const std::string text = value.value.size() >= 2 && value.value.starts_with('"')
                                 ? value.value.substr(1, value.value.size() - 2)
                                 : value.value;
    const bool path = names_data(value.key) && is_a_path(value.key, text);
    values[value.key] = path ? "a file" : value.value;
    // As it was written when it had two values, so that runs of that time keep their hash.
    if (value.key == "trainer.recompute_activations" && text != "selective") {
      values[value.key] = text == "off" ? "false" : "true";
    }
  }
  std::string all;
  for (const auto& [key, value] : values) all += key + " = " + value + "\n";
  return crc32c(all);
}

uint32_t RunIdentity::data_hash() const {
  std::string all;
  for (const auto& [key, sum] : data) {
    all += fmt::format("{} {} {}\n", key, sum.bytes, sum.crc32c);
  }
  return leeway::crc32c(all);
}

std::map<std::string, DataSum> data_sums(const Config& config) {
  const RunConfig& run = config.run;
  std::map<std::string, DataSum> sums;
  const auto add = [&](const std::string& key, const std::string& path) {
    if (is_a_path(key, path)) sums[key] = sum_of(path);
  };
  add("model.path", run.model.path);
  if (run.model.lora.enabled) add("model.lora.path", run.model.lora.path);
  add("model.tokenizer", run.model.tokenizer);
  if (run.sft.enabled) add("sft.data", run.sft.data);
  add("trainer.reference", run.trainer.reference);
  add("trainer.teacher", run.trainer.teacher);
  for (size_t k = 0; k < run.environments.size(); ++k) {
    add(fmt::format("environment.{}.data", k), run.environments[k].data);
    add(fmt::format("environment.{}.eval_data", k), run.environments[k].eval_data);
  }
  return sums;
}

RunIdentity new_identity(const Config& config, const std::string& job) {
  return {new_id(), job, {configuration_hash(config, false)}, data_sums(config)};
}

void write_identity(const std::string& run_folder, const RunIdentity& identity) {
  JsonWriter json;
  json.begin_object().key("format").value(1.0).key("run_id").value(identity.run_id);
  json.key("job").value(identity.job).key("config_hashes").begin_array();
  for (const uint32_t hash : identity.config_hashes) json.value(static_cast<double>(hash));
  json.end_array().key("data").begin_object();
  for (const auto& [key, sum] : identity.data) {
    json.key(key).begin_object().key("path").value(sum.path);
    json.key("bytes").value(static_cast<double>(sum.bytes));
    json.key("crc32c").value(static_cast<double>(sum.crc32c)).end_object();
  }
  write_file_atomically(run_folder + "/" + kName, json.end_object().end_object().text() + "\n");
}

std::optional<RunIdentity> read_identity(const std::string& run_folder) {
  const std::string name = run_folder + "/" + kName;
  if (!is_there(name)) return std::nullopt;
  const rapidjson::Document json = parse_json(name, read_file(name));
  const auto refuse = [&](const std::string& key) {
    throw Error(
        fmt::format("{}: \"{}\" is missing or invalid; the file is damaged. "
                    "Remove it to continue without its checks",
                    name, key));
  };
  const auto member = [&](const rapidjson::Value& object, const char* key,
                          auto fits) -> const rapidjson::Value& {
    if (!object.IsObject() || !object.HasMember(key) || !fits(object[key])) refuse(key);
    return object[key];
  };
  const auto is_text = [](const rapidjson::Value& v) { return v.IsString(); };
  const auto is_within = [](const rapidjson::Value& v, double most) {
    return v.IsNumber() && v.GetDouble() >= 0.0 && v.GetDouble() <= most;
  };
  const auto is_hash = [&](const rapidjson::Value& v) { return is_within(v, 0xffffffffu); };
  const auto is_count = [&](const rapidjson::Value& v) { return is_within(v, 0x1p53); };
  RunIdentity identity;
  identity.run_id = member(json, "run_id", is_text).GetString();
  identity.job = member(json, "job", is_text).GetString();
  if (identity.job != "train" && identity.job != "sft") refuse("job");
  for (const auto& hash : member(json, "config_hashes", [](const auto& v) {
                            return v.IsArray() && !v.Empty();
                          }).GetArray()) {
    if (!is_hash(hash)) refuse("config_hashes");
    identity.config_hashes.push_back(static_cast<uint32_t>(hash.GetDouble()));
  }
  for (const auto& entry :
       member(json, "data", [](const auto& v) { return v.IsObject(); }).GetObject()) {
    identity.data[entry.name.GetString()] = {
        member(entry.value, "path", is_text).GetString(),
        static_cast<uint64_t>(member(entry.value, "bytes", is_count).GetDouble()),
        static_cast<uint32_t>(member(entry.value, "crc32c", is_hash).GetDouble()),
    };
  }
  return identity;
}

void refuse_other_data(const std::string& run_folder, const RunIdentity& identity,
                       const std::map<std::string, DataSum>& now) {
  for (const auto& [key, sum] : now) {
    const auto before = identity.data.find(key);
    if (before == identity.data.end() ||
        (before->second.bytes == sum.bytes && before->second.crc32c == sum.crc32c)) {
      continue;
    }
    throw Error(fmt::format(
        "--resume {}: {} = \"{}\": its content has changed since the run began ({} bytes then, "
        "{} now); put the file back, or start a new run with other data: leeway train --from {}",
        run_folder, key, sum.path, before->second.bytes, sum.bytes, run_folder));
  }
}

}  // namespace leeway
