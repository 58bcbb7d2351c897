// Writing config.json. Only keys of the source that would be read differently are changed.
#include <fmt/format.h>
#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include <cmath>

#include "base/json.h"
#include "leeway/error.h"
#include "model/config_keys.h"
#include "model/model_config.h"

namespace leeway {
namespace {

using Json = rapidjson::Value;

// Writes NaN and infinities as Python does; they may occur in keys that are kept.
class PythonWriter : public rapidjson::PrettyWriter<rapidjson::StringBuffer> {
 public:
  using PrettyWriter::PrettyWriter;
  bool Double(double number) {
    if (std::isfinite(number)) return PrettyWriter::Double(number);
    const std::string_view text = std::isnan(number) ? "NaN"
                                  : number > 0       ? "Infinity"
                                                     : "-Infinity";
    return RawValue(text.data(), text.size(), rapidjson::kNumberType);
  }
};

class Editor {
 public:
  explicit Editor(rapidjson::Document document) : document_(std::move(document)) {
    if (!document_.IsObject()) document_.SetObject();
  }

  // Null counts as absent, as in reading.
  bool has(const char* key) const {
    const auto member = document_.FindMember(key);
    return member != document_.MemberEnd() && !member->value.IsNull();
  }
  // Values are plain C++ numbers and flags, or Json.
  template <class T>
  void set(const char* key, T value) {
    set_in(document_, key, std::move(value));
  }
  void set(const char* key, const char* text) { set(key, Json(rapidjson::StringRef(text))); }
  template <class T>
  void set_in(Json& object, const char* key, T value) {
    const auto member = object.FindMember(key);
    if (member != object.MemberEnd()) {
      member->value = Json(std::move(value));
    } else {
      object.AddMember(rapidjson::StringRef(key), Json(std::move(value)), allocator());
    }
  }
  rapidjson::Document::AllocatorType& allocator() { return document_.GetAllocator(); }

  // Indented by two spaces, as transformers does.
  std::string text() const {
    rapidjson::StringBuffer buffer;
    PythonWriter writer(buffer);
    writer.SetIndent(' ', 2);
    document_.Accept(writer);
    return std::string(buffer.GetString(), buffer.GetSize()) + "\n";
  }

 private:
  rapidjson::Document document_;
};

void set_llama3(Editor& editor, Json& object, const Llama3Rope& rope) {
  editor.set_in(object, "factor", rope.factor);
  editor.set_in(object, "low_freq_factor", rope.low_freq_factor);
  editor.set_in(object, "high_freq_factor", rope.high_freq_factor);
  editor.set_in(object, "original_max_position_embeddings", rope.original_max_position_embeddings);
}

Json rope_object(Editor& editor, const ModelConfig& config) {
  Json object(rapidjson::kObjectType);
  editor.set_in(object, "rope_type",
                Json(rapidjson::StringRef(config.llama3_rope ? "llama3" : "default")));
  if (config.llama3_rope) set_llama3(editor, object, *config.llama3_rope);
  return object;
}

void write_rotary(Editor& editor, const ModelConfig& config, bool old_keys, bool new_keys) {
  if (old_keys) {
    editor.set("rope_theta", config.rope_theta);
    editor.set("rope_scaling", config.llama3_rope ? rope_object(editor, config) : Json());
  }
  if (new_keys) {
    Json object = rope_object(editor, config);
    editor.set_in(object, "rope_theta", config.rope_theta);
    editor.set("rope_parameters", std::move(object));
  }
}

void write_eos(Editor& editor, const ModelConfig& config) {
  Json ids(rapidjson::kArrayType);
  for (const int32_t id : config.eos_token_id) ids.PushBack(id, editor.allocator());
  editor.set("eos_token_id", ids.Size() == 0   ? Json()
                             : ids.Size() == 1 ? Json(config.eos_token_id[0])
                                               : std::move(ids));
}

void write_layer_types(Editor& editor, const ModelConfig& config) {
  Json types(rapidjson::kArrayType);
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    types.PushBack("full_attention", editor.allocator());
  }
  editor.set("layer_types", std::move(types));
}

// Keys that do not follow from a field. Overrides defaults of the config classes that would mean
// something else.
void write_fixed_keys(Editor& editor, const ModelConfig& config) {
  Json architectures(rapidjson::kArrayType);
  architectures.PushBack(rapidjson::StringRef(keys_of(config.family).architecture),
                         editor.allocator());
  editor.set("architectures", std::move(architectures));
  editor.set("model_type", name_of(config.family));
  editor.set("hidden_act", "silu");
  editor.set("attention_dropout", 0.0);
  editor.set("use_cache", true);
  editor.set("bos_token_id", Json());
  editor.set("pad_token_id", Json());
  if (config.family == Family::llama) {
    editor.set("mlp_bias", false);
  } else {
    editor.set("use_sliding_window", false);
    editor.set("sliding_window", Json());
  }
}

}  // namespace

std::string model_config_json(const ModelConfig& config) {
  LEEWAY_CHECK(config.qk_norm == (config.family == Family::qwen3),
               "qk_norm must be set exactly for qwen3");
  LEEWAY_CHECK(config.family == Family::qwen2 ? config.qkv_bias && !config.output_bias
                                              : config.qkv_bias == config.output_bias,
               "config.json cannot express these biases");
  const std::string name = "the model's own config.json";
  std::optional<ModelConfig> original;
  if (!config.source.empty()) {
    original = parse_model_config(name, config.source);
    LEEWAY_CHECK(original->family == config.family, "the family must be the source's");
  }
  Editor editor(original ? parse_json(name, config.source) : rapidjson::Document());
  auto changed = [&](auto field) { return !original || (*original).*field != config.*field; };

  if (!original) write_fixed_keys(editor, config);
  for (const SizeKey& size : kSizes) {
    if (changed(size.field)) editor.set(size.key, config.*size.field);
  }
  if (changed(&ModelConfig::num_hidden_layers) && editor.has("layer_types")) {
    write_layer_types(editor, config);
  }
  if (changed(&ModelConfig::rms_norm_eps)) editor.set("rms_norm_eps", config.rms_norm_eps);
  if (changed(&ModelConfig::initializer_range)) {
    editor.set("initializer_range", config.initializer_range);
  }
  if (changed(&ModelConfig::tie_word_embeddings)) {
    editor.set("tie_word_embeddings", config.tie_word_embeddings);
  }
  if (changed(&ModelConfig::output_bias)) editor.set("attention_bias", config.output_bias);
  if (changed(&ModelConfig::eos_token_id)) write_eos(editor, config);
  if (changed(&ModelConfig::rope_theta) || changed(&ModelConfig::llama3_rope)) {
    const bool old_keys =
        !editor.has("rope_parameters") || editor.has("rope_theta") || editor.has("rope_scaling");
    write_rotary(editor, config, old_keys, !original || editor.has("rope_parameters"));
  }
  const bool no_dtype = !editor.has("dtype") && !editor.has("torch_dtype");
  for (const char* key : {"dtype", "torch_dtype"}) {
    if (no_dtype || editor.has(key)) editor.set(key, "float32");
  }
  return editor.text();
}

}  // namespace leeway
