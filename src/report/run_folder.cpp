#include "report/run_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <map>

#include "base/files.h"
#include "base/json.h"
#include "leeway/error.h"
#include "report/step_files.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

bool is_file(const fs::path& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored);
}

std::string_view text_of(const rapidjson::Value& value) {
  return {value.GetString(), value.GetStringLength()};
}

void write_numbers(JsonWriter& json, const std::vector<double>& values) {
  json.begin_array();
  for (const double value : values) json.value(value);
  json.end_array();
}

void write_table(JsonWriter& json, const JsonlTable& table) {
  json.begin_object().key("step");
  write_numbers(json, table.step);
  json.key("columns").begin_object();
  for (const auto& [name, values] : table.columns) {
    json.key(name);
    write_numbers(json, values);
  }
  json.end_object().end_object();
}

// Rewrites a parsed value so that NaN, which Python writes and browsers reject, becomes null.
void write_value(JsonWriter& json, const rapidjson::Value& value) {
  if (value.IsObject()) {
    json.begin_object();
    for (const auto& member : value.GetObject()) {
      json.key(text_of(member.name));
      write_value(json, member.value);
    }
    json.end_object();
  } else if (value.IsArray()) {
    json.begin_array();
    for (const auto& item : value.GetArray()) write_value(json, item);
    json.end_array();
  } else if (value.IsString()) {
    json.value(text_of(value));
  } else if (value.IsBool()) {
    json.value(value.GetBool());
  } else if (value.IsNumber()) {
    json.value(value.GetDouble());
  } else {
    json.null();
  }
}

// The number of tokens of a rollout; throws Error unless its lists have one entry per token.
size_t checked_tokens(const std::string& place, const rapidjson::Value& rollout) {
  const auto samples = rollout.FindMember("samples");
  if (samples == rollout.MemberEnd() || !samples->value.IsArray()) {
    throw Error(fmt::format("{}: \"samples\" is missing or not a list", place));
  }
  size_t total = 0;
  for (const auto& sample : samples->value.GetArray()) {
    const auto has_list = [&](const char* key) {
      return sample.HasMember(key) && sample[key].IsArray();
    };
    if (!sample.IsObject() || !has_list("tokens")) {
      throw Error(fmt::format("{}: \"tokens\" of a sample is missing or not a list", place));
    }
    const size_t tokens = sample["tokens"].Size();
    for (const char* key : {"ids", "loss_mask", "rollout", "pi", "kept", "versions"}) {
      if (!sample.HasMember(key)) continue;
      if (!has_list(key) || sample[key].Size() != tokens) {
        throw Error(
            fmt::format("{}: \"{}\" of a sample must be a list of {} entries, one per token", place,
                        key, tokens));
      }
    }
    total += tokens;
  }
  return total;
}

// At most `count` files: the first, the last and others evenly spaced between them.
std::vector<StepFile> spread(const std::vector<StepFile>& files, size_t count) {
  if (files.size() <= count) return files;
  if (count <= 1) return {files.back()};
  std::vector<StepFile> chosen;
  for (size_t k = 0; k < count; ++k) chosen.push_back(files[k * (files.size() - 1) / (count - 1)]);
  return chosen;
}

// The last file, which most readers want, may take half of the limit; the others share the rest.
// Rollouts appear in the order of the run.
void write_rollouts(JsonWriter& json, const std::vector<StepFile>& files,
                    const RolloutLimits& limits, ReportNotes& notes) {
  const std::vector<StepFile> chosen = spread(files, limits.files);
  json.begin_array();
  size_t tokens_taken = 0;
  for (size_t k = 0; k < chosen.size(); ++k) {
    const size_t last = chosen.size() - 1;
    const size_t share = last == 0 ? 1 : 2 * (k == last ? 1 : last);
    const size_t most = std::max<size_t>(1, limits.rollouts / share);
    const size_t most_tokens = tokens_taken + limits.tokens / share;
    size_t taken = 0;
    const auto take = [&](const std::string& place, rapidjson::Document& rollout) {
      step_of(place, rollout);
      const size_t tokens = checked_tokens(place, rollout);
      if (taken > 0 && tokens_taken + tokens > most_tokens) return true;
      write_value(json, rollout);
      tokens_taken += tokens;
      return ++taken < most;
    };
    for_each_object(chosen[k].path, take, notes);
  }
  json.end_array();
}

std::string text_or_nothing(const fs::path& path) {
  return is_file(path) ? read_file(path.string()) : "";
}

std::string_view trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(" \t\r");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t\r") - first + 1);
}

// Where the comment of a line starts, or the end of the line; a # inside quotes is part of a value.
size_t comment_start(std::string_view line) {
  char quote = 0;
  for (size_t i = 0; i < line.size(); ++i) {
    const char c = line[i];
    if (quote != 0) {
      if (c == '\\' && quote == '"') ++i;
      if (c == quote) quote = 0;
    } else if (c == '"' || c == '\'') {
      quote = c;
    } else if (c == '#') {
      return i;
    }
  }
  return line.size();
}

}  // namespace

std::vector<ConfigEntry> config_entries(std::string_view toml) {
  std::vector<ConfigEntry> entries;
  std::map<std::string, size_t> tables_of;  // how often each [[name]] has occurred
  std::string prefix;
  while (!toml.empty()) {
    const size_t end = std::min(toml.find('\n'), toml.size());
    const std::string_view whole = toml.substr(0, end);
    toml.remove_prefix(std::min(end + 1, toml.size()));
    const size_t comment = comment_start(whole);
    const std::string_view line = trimmed(whole.substr(0, comment));
    if (line.starts_with("[[") && line.ends_with("]]")) {
      const std::string name(trimmed(line.substr(2, line.size() - 4)));
      prefix = fmt::format("{}[{}].", name, tables_of[name]++);
      continue;
    }
    if (line.starts_with("[") && line.ends_with("]")) {
      prefix = fmt::format("{}.", trimmed(line.substr(1, line.size() - 2)));
      continue;
    }
    const size_t equals = line.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string_view origin =
        comment < whole.size() ? trimmed(whole.substr(comment + 1)) : std::string_view();
    entries.push_back({prefix + std::string(trimmed(line.substr(0, equals))),
                       std::string(trimmed(line.substr(equals + 1))), std::string(origin)});
  }
  return entries;
}

namespace {

// The lives of the servers that sampled: [{"server", "events": [{"time", "state", "text"}]}], with
// seconds since the first event of all.
void write_servers(JsonWriter& json, const fs::path& path, ReportNotes& notes) {
  constexpr size_t kMost = 1000;  // events of each
  struct Event {
    double time;
    std::string state, text;
  };
  std::map<std::string, std::vector<Event>> lives;
  double begin = -1.0;
  const auto take = [&](const std::string&, rapidjson::Document& row) {
    const auto text = [&](const char* key) {
      return row.HasMember(key) && row[key].IsString() ? std::string(text_of(row[key])) : "";
    };
    const double time =
        row.HasMember("time") && row["time"].IsNumber() ? row["time"].GetDouble() : 0.0;
    if (begin < 0.0) begin = time;
    std::vector<Event>& life = lives[text("server")];
    if (life.size() < kMost) life.push_back({time - begin, text("state"), text("text")});
    return true;
  };
  if (is_file(path)) for_each_object(path.string(), take, notes);
  json.key("servers").begin_array();
  for (const auto& [server, life] : lives) {
    json.begin_object().key("server").value(server).key("events").begin_array();
    for (const Event& event : life) {
      json.begin_object().key("time").value(event.time).key("state").value(event.state);
      json.key("text").value(event.text).end_object();
    }
    json.end_array().end_object();
  }
  json.end_array();
}

// The last groups that were given up, and their total number.
void write_given_up(JsonWriter& json, const fs::path& path, ReportNotes& notes) {
  constexpr size_t kMost = 200;
  size_t count = 0, seen = 0;
  const auto each = [&](auto&& use, ReportNotes& notes_of) {
    if (is_file(path)) for_each_object(path.string(), use, notes_of);
  };
  each([&](const std::string&, rapidjson::Document&) { return ++count > 0; }, notes);
  json.key("given_up_count").value(static_cast<double>(count)).key("given_up").begin_array();
  ReportNotes said_already;
  each(
      [&](const std::string&, rapidjson::Document& row) {
        if (++seen + kMost > count) write_value(json, row);
        return true;
      },
      said_already);
  json.end_array();
}

}  // namespace

namespace {

// Copies end.json; null if the run is still going, was killed, or the file is invalid.
void write_end(JsonWriter& json, const fs::path& path) {
  json.key("end");
  rapidjson::Document end;
  try {
    if (is_file(path)) end = parse_json(path.string(), read_file(path.string()));
  } catch (const Error&) {
  }
  const auto member = [&](const char* key) -> const rapidjson::Value* {
    if (!end.IsObject()) return nullptr;
    const auto found = end.FindMember(key);
    return found == end.MemberEnd() ? nullptr : &found->value;
  };
  const auto *how = member("end"), *reason = member("reason"), *steps = member("steps");
  if (how == nullptr || !how->IsString() || reason == nullptr || !reason->IsString() ||
      steps == nullptr || !steps->IsNumber()) {
    json.value(std::nan(""));
    return;
  }
  json.begin_object().key("end").value(how->GetString());
  json.key("reason").value(reason->GetString()).key("steps").value(steps->GetDouble());
  json.end_object();
}

}  // namespace

std::string run_folder_json(const std::string& folder, const std::string& name,
                            const RolloutLimits& limits, ReportNotes* said) {
  const fs::path path(folder);
  if (!is_present(folder)) throw Error(fmt::format("{}: there is no such folder", folder));
  if (!is_file(path / "metrics.jsonl") && !is_file(path / "sft.jsonl") &&
      !is_file(path / "eval.jsonl")) {
    throw Error(fmt::format("{}: has no metrics.jsonl; is it a run folder?", folder));
  }
  const std::string config = text_or_nothing(path / "config.toml");
  const std::vector<StepFile> files = step_files((path / "rollouts").string());
  ReportNotes notes;
  JsonWriter json;
  json.begin_object().key("name").value(name).key("path").value(folder);
  for (const char* table : {"metrics", "eval", "sft"}) {
    json.key(table);
    write_table(json, read_table((path / (std::string(table) + ".jsonl")).string(), notes));
  }
  write_end(json, path / "end.json");
  json.key("objective").value(text_or_nothing(path / "objective.txt"));
  json.key("config").value(config).key("config_entries").begin_array();
  for (const ConfigEntry& entry : config_entries(config)) {
    json.begin_object().key("key").value(entry.key).key("value").value(entry.value);
    json.key("origin").value(entry.origin).end_object();
  }
  json.end_array();
  write_given_up(json, path / "given_up.jsonl", notes);
  write_servers(json, path / "servers.jsonl", notes);
  json.key("rollouts");
  write_rollouts(json, files, limits, notes);
  json.key("rollout_steps").begin_array();
  for (const StepFile& file : files) json.value(static_cast<double>(file.step));
  json.end_array().key("notes").begin_array();
  for (const std::string& note : notes) json.value(note);
  json.end_array().end_object();
  if (said != nullptr) said->insert(said->end(), notes.begin(), notes.end());
  return json.text();
}

std::vector<std::string> run_names(std::span<const std::string> folders) {
  std::vector<std::string> names;
  for (const std::string& folder : folders) {
    std::error_code failed;
    fs::path path = fs::weakly_canonical(folder, failed);
    if (failed) path = fs::path(folder);
    if (!path.has_filename()) path = path.parent_path();
    names.push_back(path.has_filename() ? path.filename().string() : folder);
  }
  const std::vector<std::string> last_parts = names;
  for (size_t k = 0; k < names.size(); ++k) {
    if (std::count(last_parts.begin(), last_parts.end(), last_parts[k]) > 1) names[k] = folders[k];
  }
  return names;
}

std::string run_folders_json(std::span<const std::string> folders, const RolloutLimits& limits,
                             ReportNotes* said) {
  const std::vector<std::string> names = run_names(folders);
  std::string json = "{\"runs\": [";
  for (size_t k = 0; k < folders.size(); ++k) {
    if (k > 0) json += ", ";
    json += run_folder_json(folders[k], names[k], limits, said);
  }
  return json + "]}";
}

}  // namespace leeway
