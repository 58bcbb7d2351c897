#include "run/batch_import.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "base/files.h"
#include "base/json.h"
#include "core/batch_json.h"
#include "leeway/error.h"
#include "run/batch_files.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;
using Json = rapidjson::Value;

// ---------------------------------------------------------------------------------------------
// prime-rl: one JSON object a line, one for each sequence, columns of one value a token

class PrimeReader {
 public:
  explicit PrimeReader(ImportedBatch& out) : out_(out), batch_(out.batch) {}

  void add_file(const std::string& name) {
    const std::string text = read_file(name);
    std::string_view rest = text;
    for (size_t line = 1; !rest.empty(); ++line) {
      const size_t end = std::min(rest.find('\n'), rest.size());
      if (rest.substr(0, end).find_first_not_of(" \t\r") != std::string_view::npos) {
        add(fmt::format("{} line {}", name, line), rest.substr(0, end));
      }
      rest.remove_prefix(std::min(end + 1, rest.size()));
    }
  }

  void finish(const std::string& path) {
    if (batch_.pi.empty()) throw Error(fmt::format("{}: contains no sequence", path));
    out_.notes.push_back(
        "prime-rl records pi (trainer_logprobs) and rollout (inference_logprobs): presets that "
        "read "
        "prox, ref or teacher, groups and versions are not in it");
    if (no_rollout_ > 0) {
      out_.notes.push_back(fmt::format(
          "{} sequences without inference_logprobs on trained tokens were left out", no_rollout_));
    }
    if (other_components_) {
      out_.notes.push_back(
          "ce_weights and ref_kl_weights belong to losses beside this one: left out");
    }
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const {
    throw Error(fmt::format("{}: {}", place_, problem));
  }

  // One number for each token, null as NaN; empty if the column is missing, or null throughout.
  std::vector<double> column(const Json& json, const char* key, bool required) const {
    const auto found = json.FindMember(key);
    if (found == json.MemberEnd() || !found->value.IsArray()) {
      if (required) fail(fmt::format("\"{}\" is missing or not a list", key));
      return {};
    }
    std::vector<double> values;
    bool any = false;
    for (const Json& value : found->value.GetArray()) {
      if (!value.IsNumber() && !value.IsNull() && !value.IsBool()) {
        fail(fmt::format("\"{}\" contains something that is not a number", key));
      }
      any |= !value.IsNull();
      values.push_back(value.IsNull()   ? std::nan("")
                       : value.IsBool() ? static_cast<double>(value.GetBool())
                                        : value.GetDouble());
    }
    return any || required ? values : std::vector<double>();
  }

  void add(const std::string& place, std::string_view line) {
    place_ = place;
    const rapidjson::Document json = parse_json(place, line);
    if (!json.IsObject()) fail("is not an object");
    const auto version = json.FindMember("schema_version");
    if (version == json.MemberEnd() || !version->value.IsNumber() ||
        version->value.GetDouble() != 1.0) {
      fail("is not a token export of schema_version 1");
    }
    const std::vector<double> pi = column(json, "trainer_logprobs", true);
    const std::vector<double> rollout = column(json, "inference_logprobs", true);
    const std::vector<double> mask = column(json, "loss_mask", true);
    const std::vector<double> advantages = column(json, "advantages", true);
    const std::vector<double> weights = column(json, "rl_weights", false);
    other_components_ |= !column(json, "ce_weights", false).empty() ||
                         !column(json, "ref_kl_weights", false).empty();
    const size_t n = pi.size();
    for (const auto* other : {&rollout, &mask, &advantages, &weights}) {
      if (!other->empty() && other->size() != n) fail("its columns have different lengths");
    }
    const auto first = std::find(mask.begin(), mask.end(), 1.0);
    if (first == mask.end()) return;
    for (size_t t = 0; t < n; ++t) {
      if (mask[t] == 1.0 && !std::isfinite(rollout[t])) {
        ++no_rollout_;
        return;
      }
    }
    const size_t prompt = static_cast<size_t>(first - mask.begin());
    for (size_t t = 0; t < n; ++t) {
      batch_.pi.push_back(pi[t]);
      batch_.rollout.push_back(rollout[t]);
      batch_.mask.push_back(mask[t] == 1.0);
      batch_.advantages.push_back(std::isfinite(advantages[t]) ? advantages[t] : 0.0);
      batch_.weights.push_back(t < prompt ? 0.0 : weights.empty() ? 1.0 : weights[t]);
    }
    batch_.offsets.push_back(static_cast<int64_t>(batch_.pi.size()));
  }

  ImportedBatch& out_;
  Batch& batch_;
  std::string place_;
  size_t no_rollout_ = 0;
  bool other_components_ = false;
};

ImportedBatch import_prime_rl(const std::string& path) {
  ImportedBatch out;
  PrimeReader reader(out);
  if (!fs::is_directory(path)) {
    reader.add_file(path);
    reader.finish(path);
    return out;
  }
  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(path)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("rank_") && name.ends_with(".jsonl")) files.push_back(entry.path());
  }
  if (files.empty()) {
    throw Error(fmt::format(
        "{}: has no rank_R.jsonl; name a step's folder, such as token_exports/step_10", path));
  }
  std::sort(files.begin(), files.end());
  for (const std::string& file : files) reader.add_file(file);
  reader.finish(path);
  if (!fs::exists(fs::path(path) / "STABLE")) {
    out.notes.push_back("there is no STABLE beside the files: the step may be incomplete");
  }
  return out;
}

// ---------------------------------------------------------------------------------------------
// slime: a pickle, which torch reads without running what is in it

constexpr const char* kSlimeReader = R"python(
import json, sys

def main(path):
    try:
        import torch
    except ImportError:
        return {"error": "reading this file needs PyTorch: pip install torch"}
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        return {"error": str(error).splitlines()[0]}
    samples = data.get("samples") if isinstance(data, dict) else None
    if not isinstance(samples, list) or not samples:
        return {"error": "has no samples: write it with --save-debug-train-data (format_version 2)"}
    floats = lambda x: [float(v) for v in (x.tolist() if hasattr(x, "tolist") else x)]
    names = {"rollout": "rollout_log_probs", "prox": "log_probs", "ref": "ref_log_probs"}
    found = {k: all(s.get(v) is not None for s in samples) for k, v in names.items()}
    sequences = []
    for index, sample in enumerate(samples):
        for key in ("advantages", "loss_masks", "log_probs"):
            if sample.get(key) is None:
                return {"error": "sample %d has no %s" % (index, key)}
        advantages = sample["advantages"]
        one = {"pi": floats(sample["log_probs"]),
               "mask": [int(m != 0) for m in floats(sample["loss_masks"])],
               "advantages": floats(advantages) if hasattr(advantages, "__len__") else float(advantages)}
        one.update({k: floats(sample[v]) for k, v in names.items() if found[k]})
        if sample.get("rollout_id") is not None:
            one["rollout_id"] = int(sample["rollout_id"])
        sequences.append(one)
    return {"batch": json.dumps({"sequences": sequences}), "missing": [k for k in names if not found[k]]}

json.dump(main(sys.argv[1]), sys.stdout)
)python";

std::string shell_quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string output_of(const std::string& command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  if (!pipe) throw Error("python3 could not be started");
  std::string out;
  std::array<char, 65536> part;
  while (const size_t got = std::fread(part.data(), 1, part.size(), pipe.get())) {
    out.append(part.data(), got);
  }
  return out;
}

ImportedBatch import_slime(const std::string& path) {
  if (!fs::exists(path)) throw Error(fmt::format("{}: there is no such file", path));
  const std::string answer =
      output_of(fmt::format("python3 -c {} {}", shell_quoted(kSlimeReader), shell_quoted(path)));
  if (answer.empty()) {
    throw Error(
        fmt::format("{}: python3 could not read it; it is needed, with torch, for slime's "
                    "files",
                    path));
  }
  const rapidjson::Document json = parse_json(path, answer);
  if (json.HasMember("error")) {
    throw Error(fmt::format("{}: {}", path, json["error"].GetString()));
  }
  LoadedBatch loaded = parse_batch(path, json["batch"].GetString());
  ImportedBatch out{std::move(loaded.batch), std::move(loaded.warnings)};
  out.notes.push_back(
      "slime records the trainer's log-probabilities before the step: they are pi and prox, so "
      "that "
      "pi/prox is 1");
  for (const Json& name : json["missing"].GetArray()) {
    out.notes.push_back(
        fmt::format("it has no {} log-probabilities: presets that read them cannot "
                    "be shown",
                    name.GetString()));
  }
  return out;
}

ImportedBatch import_leeway(const std::string& path) {
  BatchFile file = read_batch_file(path);
  ImportedBatch out{std::move(file.batch), std::move(file.warnings)};
  if (file.rollouts) {
    out.notes.push_back(file.part_of_batch());
    out.notes.push_back(
        "rollouts files have pi and rollout alone; batches/ of a run have the rest");
  }
  return out;
}

}  // namespace

ImportedBatch import_batch(const std::string& kind, const std::string& path) {
  if (kind == "prime-rl") return import_prime_rl(path);
  if (kind == "slime") return import_slime(path);
  if (kind == "leeway") return import_leeway(path);
  throw Error(
      fmt::format("import: there is no kind {}; there are prime-rl, slime and leeway", kind));
}

std::string batch_text(const Batch& batch) {
  JsonWriter json;
  json.begin_object().key("sequences").begin_array();
  for (size_t s = 0; s + 1 < batch.offsets.size(); ++s) {
    const auto begin = static_cast<size_t>(batch.offsets[s]);
    const auto end = static_cast<size_t>(batch.offsets[s + 1]);
    const auto list = [&](const char* key, const auto& values) {
      if (values.empty()) return;
      json.key(key).begin_array();
      for (size_t i = begin; i < end; ++i) json.value(static_cast<double>(values[i]));
      json.end_array();
    };
    json.begin_object();
    if (!batch.groups.empty() && !batch.groups[s].empty()) json.key("group").value(batch.groups[s]);
    if (!batch.rollout_ids.empty()) {
      json.key("rollout_id").value(static_cast<double>(batch.rollout_ids[s]));
    }
    list("pi", batch.pi);
    list("rollout", batch.rollout);
    list("prox", batch.prox);
    list("ref", batch.ref);
    list("teacher", batch.teacher);
    list("advantages", batch.advantages);
    list("mask", batch.mask);
    list("weights", batch.weights);
    list("versions", batch.versions);
    json.end_object();
  }
  return json.end_array().end_object().text() + "\n";
}

}  // namespace leeway
