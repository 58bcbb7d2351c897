#include "model/adapter_io.h"

#include <fmt/format.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <set>

#include "base/files.h"
#include "base/folders.h"
#include "base/json.h"
#include "leeway/error.h"
#include "model/name_text.h"
#include "model/safetensors.h"
#include "model/weight_files.h"

namespace leeway {
namespace {

constexpr const char* kConfig = "/adapter_config.json";
constexpr const char* kBase = "/leeway_base.json";
constexpr int64_t kMostRank = int64_t{1} << 16;

std::string value_text(const rapidjson::Value& value) {
  rapidjson::StringBuffer buffer;
  rapidjson::Writer<rapidjson::StringBuffer> writer(buffer);
  value.Accept(writer);
  constexpr size_t kMost = 80;
  std::string text(buffer.GetString(), buffer.GetSize());
  return text.size() <= kMost ? text : text.substr(0, kMost) + "..";
}

[[noreturn]] void refuse(const std::string& file, const std::string& key,
                         const rapidjson::Value& value, const std::string& why) {
  throw Error(fmt::format("{}: {} = {}: {}", file, key, value_text(value), why));
}

bool says_nothing(const rapidjson::Value& value) {
  return value.IsNull() || value.IsFalse() || (value.IsObject() && value.ObjectEmpty()) ||
         (value.IsArray() && value.Empty());
}

// Keys whose value changes nothing of what an adapter computes when it is used.
bool is_remark(std::string_view key) {
  static constexpr std::string_view kRemarks[] = {
      "auto_mapping", "base_model_name_or_path", "revision",          "inference_mode",
      "lora_dropout", "megatron_core",           "qalora_group_size", "peft_version",
      "eva_config",   "runtime_config"};
  return std::find(std::begin(kRemarks), std::end(kRemarks), key) != std::end(kRemarks);
}

// Ways to begin that leave the base as it is. The others (PiSSA, LoftQ, ..) train a changed one.
bool keeps_the_base(const rapidjson::Value& value) {
  if (!value.IsString()) return value.IsBool() || value.IsNull();
  const std::string_view way = value.GetString();
  return way == "gaussian" || way == "eva" || way == "orthogonal";
}

std::vector<std::string> read_targets(const std::string& file, const rapidjson::Value& value) {
  const std::string all = fmt::format("{}", fmt::join(kLoraTargets, ", "));
  if (!value.IsArray() || value.Empty()) {
    refuse(file, "target_modules", value, "must be a list of module names, of " + all);
  }
  std::vector<std::string> targets;
  for (const rapidjson::Value& each : value.GetArray()) {
    // A module alone, or with what is before it: "mlp.up_proj", "model.layers.3.mlp.up_proj". An
    // adapter of some layers alone lacks the matrices of the others.
    const std::string whole = each.IsString() ? each.GetString() : "";
    const size_t dot = whole.rfind('.');
    const std::string block = dot == std::string::npos ? "" : whole.substr(0, dot);
    const std::string name = dot == std::string::npos ? whole : whole.substr(dot + 1);
    const bool in_layer = block.empty() || block.ends_with("self_attn") || block.ends_with("mlp");
    if (!in_layer ||
        std::find(kLoraTargets.begin(), kLoraTargets.end(), name) == kLoraTargets.end()) {
      refuse(file, "target_modules", each,
             "is no module that an adapter may have here; use " + all);
    }
    targets.push_back(name);
  }
  return ordered_targets(targets);
}

// Names and shapes against the base, before anything is allocated for what the file claims.
void check_layout(const StoredModel& stored, const ModelConfig& config, const LoraSettings& lora) {
  const std::string base = fmt::format(
      "the base here is a {} with num_hidden_layers = {}, hidden_size = {}, intermediate_size = "
      "{}{}",
      name_of(config.family), config.num_hidden_layers, config.hidden_size,
      config.intermediate_size,
      lora.base_path.empty() ? "" : "; the adapter was made for " + lora.base_path);
  std::set<std::string, std::less<>> known;
  for (const ParameterInfo& info : lora_table(config, lora)) {
    const std::string name = adapter_tensor_name(info.name);
    known.insert(name);
    const auto found = stored.tensors.find(name);
    if (found == stored.tensors.end()) {
      throw Error(fmt::format("{}: tensor {} is missing; {}", stored.where, name, base));
    }
    const auto& [path, tensor] = found->second;
    if (tensor->shape != info.shape) {
      throw Error(
          fmt::format("{}: tensor {} is {}, not {}: the adapter belongs to another base; {}", *path,
                      name, shape_text(tensor->shape), shape_text(info.shape), base));
    }
  }
  for (const auto& [name, place] : stored.tensors) {
    if (known.contains(name)) continue;
    throw Error(fmt::format("{}: tensor {} is no matrix of this adapter; {}", *place.path,
                            name_text(name), base));
  }
}

// The sum in leeway_base.json; nothing for adapters of other programs.
std::optional<uint32_t> read_base_sum(const std::string& folder) {
  const std::string file = folder + kBase;
  if (!path_exists(file)) return std::nullopt;
  const rapidjson::Document json = parse_json(file, read_file(file));
  const auto found = json.IsObject() ? json.FindMember("checksum") : json.MemberEnd();
  if (json.IsObject() && found != json.MemberEnd() && found->value.IsString()) {
    const std::string_view text(found->value.GetString(), found->value.GetStringLength());
    uint32_t sum = 0;
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), sum, 16);
    if (text.size() == 8 && problem == std::errc() && end == text.data() + text.size()) return sum;
  }
  throw Error(file + ": checksum must be 8 hexadecimal digits; the file is damaged");
}

}  // namespace

bool is_adapter_folder(const std::string& folder) {
  return path_exists(folder + kConfig) && !path_exists(folder + "/config.json");
}

bool is_complete_folder(const std::string& folder) {
  return is_present(folder + "/config.json") || is_present(folder + kConfig);
}

LoraSettings load_lora_settings(const std::string& folder) {
  const std::string file = folder + kConfig;
  const rapidjson::Document json = parse_json(file, read_file(file));
  if (!json.IsObject()) throw Error(file + ": must be an object");
  const auto find = [&](const char* key) -> const rapidjson::Value* {
    const auto member = json.FindMember(key);
    return member == json.MemberEnd() ? nullptr : &member->value;
  };
  const auto need = [&](const char* key) -> const rapidjson::Value& {
    const rapidjson::Value* value = find(key);
    if (value == nullptr) throw Error(fmt::format("{}: {} is missing", file, key));
    return *value;
  };
  LoraSettings lora;
  const rapidjson::Value& type = need("peft_type");
  if (!type.IsString() || std::string_view(type.GetString()) != "LORA") {
    refuse(file, "peft_type", type, "must be \"LORA\"");
  }
  const rapidjson::Value& rank = need("r");
  if (!rank.IsInt64() || rank.GetInt64() < 1 || rank.GetInt64() > kMostRank) {
    refuse(file, "r", rank, fmt::format("must be an integer, 1 to {}", kMostRank));
  }
  lora.rank = rank.GetInt64();
  const rapidjson::Value& alpha = need("lora_alpha");
  if (!alpha.IsNumber() || !(alpha.GetDouble() > 0.0) || !std::isfinite(alpha.GetDouble())) {
    refuse(file, "lora_alpha", alpha, "must be a number above 0");
  }
  lora.alpha = alpha.GetDouble();
  lora.targets = read_targets(file, need("target_modules"));
  for (const auto& member : json.GetObject()) {
    const std::string_view key = member.name.GetString();
    const rapidjson::Value& value = member.value;
    if (key == "peft_type" || key == "r" || key == "lora_alpha" || key == "target_modules" ||
        is_remark(key)) {
      continue;
    }
    if (key == "bias") {
      if (value.IsString() && std::string_view(value.GetString()) == "none") continue;
      refuse(file, "bias", value, "trained biases are not supported; it must be \"none\"");
    }
    if (key == "task_type") {
      if (value.IsNull() ||
          (value.IsString() && std::string_view(value.GetString()) == "CAUSAL_LM")) {
        continue;
      }
      refuse(file, "task_type", value, "must be \"CAUSAL_LM\"");
    }
    if (key == "init_lora_weights") {
      if (keeps_the_base(value)) continue;
      refuse(file, "init_lora_weights", value,
             "this adapter belongs to a base that was changed when it began; merge it with PEFT");
    }
    if (says_nothing(value)) continue;
    refuse(file, std::string(key), value, "is not supported; merge the adapter with PEFT");
  }
  const rapidjson::Value* base = find("base_model_name_or_path");
  if (base != nullptr && base->IsString()) lora.base_path = base->GetString();
  lora.base_sum = read_base_sum(folder);
  return lora;
}

void check_base_sum(const std::string& folder, const LoraSettings& lora, uint32_t sum,
                    const std::string& base_name) {
  if (lora.base_sum.value_or(sum) == sum) return;
  throw Error(fmt::format(
      "{}: the adapter was trained over other weights than {}: checksum {:08x} in {}, {:08x} of "
      "the base; name the model it was trained over{}",
      folder, base_name, *lora.base_sum, kBase + 1, sum,
      lora.base_path.empty() ? "" : ", which was " + name_text(lora.base_path)));
}

std::string other_base_warning(const std::string& adapter, const std::string& base) {
  if (adapter.empty() || base.empty()) return "";
  const LoraSettings lora = load_lora_settings(adapter);
  if (lora.base_sum || lora.base_path.empty() || !path_exists(lora.base_path + "/config.json") ||
      same_path(lora.base_path, base)) {
    return "";
  }
  return fmt::format(
      "{}{}: base_model_name_or_path = {}: the adapter was made for that folder, and is "
      "used over {}",
      adapter, kConfig, name_text(lora.base_path), base);
}

std::string adapter_tensor_name(const std::string& parameter) {
  return "base_model.model." + parameter;
}

StoredModel open_adapter(const std::string& folder, const ModelConfig& config,
                         const LoraSettings& lora) {
  const std::string single = fmt::format("{}/{}.safetensors", folder, kAdapterStem);
  if (!path_exists(single) && !path_exists(single + ".index.json")) {
    throw Error(fmt::format("{}: no adapter_model.safetensors{}", folder,
                            path_exists(folder + "/adapter_model.bin")
                                ? "; adapter_model.bin is not read, convert it to safetensors"
                                : ""));
  }
  check_checksums(folder);
  StoredModel stored = open_stored_tensors(folder, kAdapterStem);
  check_layout(stored, config, lora);
  return stored;
}

namespace {

// Reads the matrices into what `make` makes of the settings, once these and the file fit `config`.
template <class Make>
Parameters read_matrices(const std::string& folder, const ModelConfig& config, const Make& make) {
  LoraSettings lora = load_lora_settings(folder);
  const StoredModel stored = open_adapter(folder, config, lora);
  Parameters adapter = make(std::move(lora));
  for (size_t i = 0; i < adapter.table().size(); ++i) {
    const auto& [path, tensor] =
        stored.tensors.find(adapter_tensor_name(adapter.table()[i].name))->second;
    copy_as_float(*tensor, *path, adapter.of(i));
    const std::string bad = not_finite_text(tensor->name, tensor->shape, adapter.of(i));
    if (!bad.empty()) {
      throw Error(fmt::format("{}: tensor {}; weights must be finite in float32", *path, bad));
    }
  }
  return adapter;
}

}  // namespace

Parameters load_adapter(const std::string& folder, std::shared_ptr<const Parameters> base,
                        const std::string& base_name) {
  return read_matrices(folder, base->config(), [&](LoraSettings lora) {
    check_base_sum(folder, lora, base->frozen_checksum(), base_name);
    return Parameters(base, std::move(lora));
  });
}

Parameters load_adapter_matrices(const std::string& folder, const ModelConfig& config) {
  return read_matrices(folder, config,
                       [&](LoraSettings lora) { return Parameters(config, std::move(lora)); });
}

std::string model_folder_of(const std::string& folder) {
  if (!is_adapter_folder(folder)) return folder;
  const std::string base = load_lora_settings(folder).base_path;
  if (base.empty() || !path_exists(base + "/config.json")) {
    throw Error(
        fmt::format("{}{}: base_model_name_or_path = {}: there is no such folder of a model "
                    "here; name the base, and this folder as its --adapter",
                    folder, kConfig, name_text(base)));
  }
  return base;
}

Parameters load_adapter(const std::string& folder) {
  const std::string base = model_folder_of(folder);
  return load_adapter(folder, std::make_shared<const Parameters>(load_parameters(base)), base);
}

Parameters load_policy(const std::string& folder, const std::string& adapter) {
  Parameters model = load_parameters(folder);
  if (adapter.empty()) return model;
  if (model.lora() != nullptr) {
    throw Error(fmt::format("{}: is an adapter itself; name its base, and one --adapter", folder));
  }
  return load_adapter(adapter, std::make_shared<const Parameters>(std::move(model)), folder);
}

Parameters load_like(const Parameters& like, const std::string& folder) {
  return like.lora() != nullptr ? load_adapter(folder, like.base()) : load_parameters(folder);
}

FileSums save_adapter(const Parameters& adapter, const std::string& folder) {
  make_folders(folder);
  remove_checksums(folder);
  std::vector<TensorToSave> tensors;
  for (size_t i = 0; i < adapter.table().size(); ++i) {
    const ParameterInfo& info = adapter.table()[i];
    tensors.push_back({adapter_tensor_name(info.name), info.shape, adapter.of(i)});
  }
  const std::string file = fmt::format("{}.safetensors", kAdapterStem);
  FileSums written;
  written[file] = write_safetensors(folder + "/" + file, tensors);
  complete_weights(folder, adapter.config(), adapter.lora(), written);
  return written;
}

void write_adapter_config(const std::string& folder, const LoraSettings& lora, FileSums& written) {
  if (lora.base_sum) {
    JsonWriter base;
    base.begin_object().key("base").value(lora.base_path).key("checksum");
    base.value(fmt::format("{:08x}", *lora.base_sum)).end_object();
    written[kBase + 1] = write_file_atomically(folder + kBase, base.text() + "\n");
  }
  JsonWriter json;
  json.begin_object().key("peft_type").value("LORA").key("task_type").value("CAUSAL_LM");
  json.key("base_model_name_or_path").value(lora.base_path).key("revision").null();
  json.key("r").value(static_cast<double>(lora.rank)).key("lora_alpha").value(lora.alpha);
  json.key("lora_dropout").value(0.0).key("target_modules").begin_array();
  for (const std::string& target : lora.targets) json.value(target);
  json.end_array().key("bias").value("none").key("fan_in_fan_out").value(false);
  json.key("use_dora").value(false).key("use_rslora").value(false);
  json.key("modules_to_save").null().key("layers_to_transform").null();
  json.key("rank_pattern").begin_object().end_object();
  json.key("alpha_pattern").begin_object().end_object();
  json.key("init_lora_weights").value(true).key("inference_mode").value(true).end_object();
  written[kConfig + 1] = write_file_atomically(folder + kConfig, json.text() + "\n");
}

}  // namespace leeway
