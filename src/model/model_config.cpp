#include "model/model_config.h"

#include <fmt/format.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <set>

#include "base/files.h"
#include "base/folders.h"
#include "base/json.h"
#include "kernels/rows.h"
#include "leeway/error.h"
#include "model/config_keys.h"
#include "model/name_text.h"

namespace leeway {
namespace {

using Json = rapidjson::Value;

// A short form of a value, for messages.
std::string value_text(const Json& value) {
  if (value.IsArray()) return value.Empty() ? "[]" : "[..]";
  if (value.IsObject()) return value.ObjectEmpty() ? "{}" : "{..}";
  rapidjson::StringBuffer buffer;
  rapidjson::Writer<rapidjson::StringBuffer, rapidjson::UTF8<>, rapidjson::UTF8<>,
                    rapidjson::CrtAllocator, rapidjson::kWriteNanAndInfFlag>
      writer(buffer);
  value.Accept(writer);
  constexpr size_t kMost = 80;
  const std::string text(buffer.GetString(), buffer.GetSize());
  return text.size() <= kMost ? text : text.substr(0, kMost) + "..";
}

// The keys of one object. A null value counts as absent.
class Keys {
 public:
  // `prefix` precedes keys in messages, e.g. "rope_scaling.".
  Keys(const std::string& name, std::string prefix, const Json& object)
      : name_(name), prefix_(std::move(prefix)), object_(object) {
    std::set<std::string_view> seen;
    for (const auto& member : object.GetObject()) {
      const std::string_view key(member.name.GetString(), member.name.GetStringLength());
      if (!seen.insert(key).second) {
        throw Error(fmt::format("{}: {} is given twice", name_,
                                name_text(prefix_ + member.name.GetString())));
      }
    }
  }

  const Json* find(const char* key) const {
    const auto member = object_.FindMember(key);
    return member == object_.MemberEnd() || member->value.IsNull() ? nullptr : &member->value;
  }
  const Json& object() const { return object_; }

  [[noreturn]] void refuse(const char* key, const std::string& problem) const {
    refuse(key, *find(key), problem);
  }
  [[noreturn]] void refuse(std::string_view key, const Json& value,
                           const std::string& problem) const {
    throw Error(fmt::format("{}: {}{} = {}: {}", name_, prefix_, key, value_text(value), problem));
  }
  [[noreturn]] void refuse_absence(const char* key) const {
    throw Error(fmt::format("{}: {}{} is missing", name_, prefix_, key));
  }

  std::optional<int64_t> integer(const char* key, int64_t most) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->IsInt64() || value->GetInt64() < 1 || value->GetInt64() > most) {
      refuse(key, fmt::format("must be a whole number from 1 to {}", most));
    }
    return value->GetInt64();
  }
  std::optional<double> number(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->IsNumber()) refuse(key, "must be a number");
    return value->GetDouble();
  }
  bool flag(const char* key) const {
    const Json* value = find(key);
    if (value != nullptr && !value->IsBool()) refuse(key, "must be true or false");
    return value != nullptr && value->GetBool();
  }
  std::optional<std::string> text(const char* key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->IsString()) refuse(key, "must be text");
    return std::string(value->GetString(), value->GetStringLength());
  }
  // Empty if absent.
  std::vector<std::string> texts(const char* key) const {
    std::vector<std::string> list;
    const Json* value = find(key);
    if (value == nullptr) return list;
    if (!value->IsArray()) refuse(key, "must be a list of texts");
    for (const Json& item : value->GetArray()) {
      if (!item.IsString()) refuse(key, "must be a list of texts");
      list.emplace_back(item.GetString(), item.GetStringLength());
    }
    return list;
  }

 private:
  const std::string& name_;
  std::string prefix_;
  const Json& object_;
};

Family read_family(const std::string& name, const Keys& keys) {
  std::string supported;
  for (const FamilyKeys& known : kFamilies) {
    supported += fmt::format("{}{}", supported.empty() ? "" : ", ", known.architecture);
  }
  const std::optional<std::string> type = keys.text("model_type");
  const FamilyKeys* found = nullptr;
  for (const std::string& architecture : keys.texts("architectures")) {
    const auto* match =
        std::find_if(std::begin(kFamilies), std::end(kFamilies),
                     [&](const FamilyKeys& known) { return architecture == known.architecture; });
    if (match == std::end(kFamilies) || (found != nullptr && found != match)) {
      throw Error(fmt::format("{}: architectures = [{}]: not supported; supported: {}", name,
                              name_text(architecture), supported));
    }
    found = match;
  }
  if (found != nullptr) {
    if (type && *type != found->model_type) {
      keys.refuse("model_type",
                  fmt::format("does not match architectures = [\"{}\"]", found->architecture));
    }
    return found->family;
  }
  if (!type) {
    throw Error(fmt::format("{}: architectures and model_type are missing; supported: {}", name,
                            supported));
  }
  for (const FamilyKeys& known : kFamilies) {
    if (*type == known.model_type) return known.family;
  }
  keys.refuse("model_type", fmt::format("not supported; supported: {}", supported));
}

void refuse_partial_rotary(const Keys& keys) {
  if (keys.number("partial_rotary_factor").value_or(1.0) != 1.0) {
    keys.refuse("partial_rotary_factor", "not supported; it must be 1");
  }
}

struct Rope {
  std::optional<double> theta;
  std::optional<Llama3Rope> llama3;
};

// `rope_scaling` or `rope_parameters`.
Rope read_rope(const Keys& keys) {
  for (const auto& member : keys.object().GetObject()) {
    // Settings per layer type, as in models with two kinds of attention.
    if (member.value.IsObject()) {
      keys.refuse(member.name.GetString(), member.value,
                  "settings per layer type are not supported");
    }
  }
  Rope rope;
  rope.theta = keys.number("rope_theta");
  refuse_partial_rotary(keys);
  const std::optional<std::string> modern = keys.text("rope_type"), old = keys.text("type");
  if (modern && old && *modern != *old) {
    keys.refuse("type", fmt::format("contradicts rope_type = {}", name_text(*modern)));
  }
  const std::string type = modern ? *modern : old.value_or("default");
  if (type == "default") return rope;
  if (type != "llama3") {
    keys.refuse(modern ? "rope_type" : "type", "not supported; supported: default, llama3");
  }
  auto needed = [&](const char* key) {
    const std::optional<double> value = keys.number(key);
    if (!value) keys.refuse_absence(key);
    return *value;
  };
  Llama3Rope llama3;
  llama3.factor = needed("factor");
  llama3.low_freq_factor = needed("low_freq_factor");
  llama3.high_freq_factor = needed("high_freq_factor");
  const auto original = keys.integer("original_max_position_embeddings", kMaxPositions);
  if (!original) keys.refuse_absence("original_max_position_embeddings");
  llama3.original_max_position_embeddings = *original;
  rope.llama3 = llama3;
  return rope;
}

void read_rotary(const std::string& name, const Keys& keys, ModelConfig& config) {
  refuse_partial_rotary(keys);
  std::optional<double> theta = keys.number("rope_theta");
  std::optional<Rope> rope;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const Json* object = keys.find(key);
    if (object == nullptr) continue;
    if (!object->IsObject()) keys.refuse(key, "must be an object");
    const Rope one = read_rope(Keys(name, fmt::format("{}.", key), *object));
    if (rope && rope->llama3 != one.llama3) {
      keys.refuse(key, "contradicts rope_scaling; remove one of them");
    }
    if (theta && one.theta && *theta != *one.theta) {
      throw Error(fmt::format("{}: {}.rope_theta = {}: contradicts rope_theta = {}", name, key,
                              *one.theta, *theta));
    }
    if (one.theta) theta = one.theta;
    rope = one;
  }
  if (rope) config.llama3_rope = rope->llama3;
  config.rope_theta = theta.value_or(config.rope_theta);
}

std::vector<int32_t> read_eos(const Keys& keys) {
  std::vector<int32_t> ids;
  const Json* value = keys.find("eos_token_id");
  if (value == nullptr) return ids;
  auto add = [&](const Json& id) {
    if (!id.IsInt() || id.GetInt() < 0) {
      keys.refuse("eos_token_id", "must be a token id, a list of them, or null");
    }
    ids.push_back(id.GetInt());
  };
  if (value->IsArray()) {
    for (const Json& id : value->GetArray()) add(id);
  } else {
    add(*value);
  }
  return ids;
}

// Refuses settings that would change the computation and have no field here.
void refuse_unsupported(const Keys& keys, int64_t layers) {
  if (keys.text("hidden_act").value_or("silu") != "silu") {
    keys.refuse("hidden_act", "not supported; it must be \"silu\"");
  }
  if (keys.flag("mlp_bias")) keys.refuse("mlp_bias", "not supported; it must be false");
  if (keys.flag("use_sliding_window")) {
    keys.refuse("use_sliding_window", "sliding-window attention is not supported");
  }
  if (keys.find("quantization_config") != nullptr) {
    keys.refuse("quantization_config",
                "quantized weights are not supported; use the unquantized model");
  }
  if (keys.find("layer_types") == nullptr) return;
  const std::vector<std::string> types = keys.texts("layer_types");
  for (size_t i = 0; i < types.size(); ++i) {
    if (types[i] == "full_attention") continue;
    keys.refuse("layer_types", fmt::format("layer {} is {}; only full_attention is supported", i,
                                           name_text(types[i])));
  }
  if (static_cast<int64_t>(types.size()) != layers) {
    keys.refuse("layer_types",
                fmt::format("names {} layers, num_hidden_layers = {}", types.size(), layers));
  }
}

void read_sizes(const std::string& name, const Keys& keys, ModelConfig& config) {
  for (const SizeKey& size : kSizes) {
    const std::optional<int64_t> value = keys.integer(size.key, size.most);
    if (!value && size.required) keys.refuse_absence(size.key);
    config.*size.field = value.value_or(0);
  }
  if (config.num_key_value_heads == 0) config.num_key_value_heads = config.num_attention_heads;
  if (config.head_dim != 0) return;
  if (config.family == Family::qwen3) {
    config.head_dim = 128;
    return;
  }
  if (config.hidden_size % config.num_attention_heads != 0) {
    throw Error(
        fmt::format("{}: num_attention_heads = {}: does not divide hidden_size = {}, and "
                    "head_dim is missing",
                    name, config.num_attention_heads, config.hidden_size));
  }
  config.head_dim = config.hidden_size / config.num_attention_heads;
}

}  // namespace

const char* name_of(Family family) { return keys_of(family).model_type; }

void check_model_config(const std::string& name, const ModelConfig& config) {
  auto refuse = [&](const char* key, auto value, const std::string& problem) {
    throw Error(fmt::format("{}: {} = {}: {}", name, key, value, problem));
  };
  auto positive = [&](const char* key, double value) {
    if (!(value > 0.0) || !std::isfinite(value)) refuse(key, value, "must be positive and finite");
  };
  for (const SizeKey& size : kSizes) {
    const int64_t value = config.*size.field;
    if (value < 1 || value > size.most) {
      refuse(size.key, value, fmt::format("must be a whole number from 1 to {}", size.most));
    }
  }
  if (config.num_attention_heads % config.num_key_value_heads != 0) {
    refuse("num_key_value_heads", config.num_key_value_heads,
           fmt::format("does not divide num_attention_heads = {}", config.num_attention_heads));
  }
  // transformers refuses such a model even if head_dim is given.
  if (config.family == Family::llama && config.hidden_size % config.num_attention_heads != 0) {
    refuse("num_attention_heads", config.num_attention_heads,
           fmt::format("does not divide hidden_size = {}", config.hidden_size));
  }
  if (config.head_dim > kMostHeadDim) {
    refuse("head_dim", config.head_dim, fmt::format("at most {} is supported", kMostHeadDim));
  }
  if (config.head_dim % 2 != 0) {
    refuse("head_dim", config.head_dim, "must be even: RoPE rotates pairs of dimensions");
  }
  positive("rms_norm_eps", config.rms_norm_eps);
  positive("rope_theta", config.rope_theta);
  if (!(config.initializer_range >= 0.0 && config.initializer_range <= 1.0)) {
    refuse("initializer_range", config.initializer_range, "must be from 0 to 1");
  }
  for (const int32_t id : config.eos_token_id) {
    if (id < 0) refuse("eos_token_id", id, "must not be negative");
  }
  if (!config.llama3_rope) return;
  const Llama3Rope& rope = *config.llama3_rope;
  positive("llama3 rope's low_freq_factor", rope.low_freq_factor);
  positive("llama3 rope's high_freq_factor", rope.high_freq_factor);
  if (!(rope.factor >= 1.0) || !std::isfinite(rope.factor)) {
    refuse("llama3 rope's factor", rope.factor, "must be at least 1 and finite");
  }
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    refuse("llama3 rope's high_freq_factor", rope.high_freq_factor,
           fmt::format("must be greater than low_freq_factor = {}", rope.low_freq_factor));
  }
  const int64_t original = rope.original_max_position_embeddings;
  if (original < 1 || original > kMaxPositions) {
    refuse("llama3 rope's original_max_position_embeddings", original,
           fmt::format("must be a whole number from 1 to {}", kMaxPositions));
  }
}

ModelConfig parse_model_config(const std::string& name, std::string_view text) {
  const rapidjson::Document document = parse_json(name, text);
  if (!document.IsObject()) throw Error(fmt::format("{}: must be an object", name));
  const Keys keys(name, "", document);
  ModelConfig config;
  config.family = read_family(name, keys);
  read_sizes(name, keys, config);
  refuse_unsupported(keys, config.num_hidden_layers);
  read_rotary(name, keys, config);
  config.rms_norm_eps = keys.number("rms_norm_eps").value_or(config.rms_norm_eps);
  config.initializer_range = keys.number("initializer_range").value_or(config.initializer_range);
  config.tie_word_embeddings = keys.flag("tie_word_embeddings");
  config.qk_norm = config.family == Family::qwen3;
  // Qwen2 always has biases, whatever the key says.
  const bool bias = keys.flag("attention_bias");
  config.qkv_bias = config.family == Family::qwen2 || bias;
  config.output_bias = config.family != Family::qwen2 && bias;
  config.eos_token_id = read_eos(keys);
  config.source = text;
  check_model_config(name, config);
  return config;
}

void check_model_folder(const std::string& given, const std::string& folder) {
  const bool is_run = is_folder(folder + "/weights") && !path_exists(folder + "/config.json");
  if (is_run) {
    throw Error(
        fmt::format("{}: is the folder of a run; its models are in {}/weights", given, folder));
  }
  if (is_folder(folder)) return;
  const bool present = is_present(folder), gguf = folder.ends_with(".gguf");
  if (gguf && !present) throw Error(given + ": there is no such file");
  if (gguf) {
    throw Error(fmt::format("{}: is a GGUF file; `leeway convert {} FOLDER` makes a folder of it",
                            given, folder));
  }
  throw Error(fmt::format(
      "{}: {}; give a Hugging Face folder on this disk, as `hf download NAME --local-dir FOLDER` "
      "or `leeway convert FILE.gguf FOLDER` makes one",
      given,
      present ? "is a file, and a model is a folder"
              : "there is no such folder; Leeway downloads nothing"));
}

ModelConfig load_model_config(const std::string& folder) {
  check_model_folder(folder, folder);
  const std::string path = folder + "/config.json";
  return parse_model_config(path, read_file(path));
}

}  // namespace leeway
