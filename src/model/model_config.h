// The architecture of a decoder: the part of a Hugging Face config.json that determines its
// computation.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace leeway {

enum class Family { qwen3, qwen2, llama };
const char* name_of(Family family);  // `model_type` of config.json

// Llama 3's scaling of RoPE frequencies (`rope_type` "llama3").
struct Llama3Rope {
  double factor = 8.0;
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int64_t original_max_position_embeddings = 8192;

  bool operator==(const Llama3Rope&) const = default;
};

// Field names are the keys of config.json. All sizes are positive, and head counts divide evenly.
struct ModelConfig {
  Family family = Family::qwen3;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  std::optional<Llama3Rope> llama3_rope;
  bool tie_word_embeddings = false;
  bool qk_norm = false;      // qwen3: a norm on each query and key head
  bool qkv_bias = false;     // qwen2 always; llama and qwen3 with `attention_bias`
  bool output_bias = false;  // llama and qwen3 with `attention_bias`
  double initializer_range = 0.02;
  std::vector<int32_t> eos_token_id;  // none, one or several in the file

  // The file as it was read, so that saving keeps keys that no field here stands for. Empty for
  // models made from scratch.
  std::string source;
};

// Throws Error naming `name`, the key and the value for an impossible size or number. For models
// made from scratch: results of `parse_model_config` are already checked.
void check_model_config(const std::string& name, const ModelConfig& config);

// Parses the text of a config.json, with either spelling of the RoPE settings (`rope_theta` with
// `rope_scaling`, or `rope_parameters`). Throws Error naming `name`, the key and the value for an
// unsupported architecture, rope type, activation or sliding window, and for a missing or
// impossible size.
ModelConfig parse_model_config(const std::string& name, std::string_view text);
// Throws Error unless `folder` is a folder on this disk: nothing is downloaded. `given` is how the
// user named it, such as `model.path = "models/x"`.
void check_model_folder(const std::string& given, const std::string& folder);
// Reads the config.json of a folder.
ModelConfig load_model_config(const std::string& folder);

// A config.json that transformers can load. With a `source`, it is that text with changed fields
// updated, in the source's spelling; without one, RoPE settings and dtype are written in both the
// old and the new spelling. `dtype` is float32, which is what is saved.
std::string model_config_json(const ModelConfig& config);

// One parameter under its Hugging Face name.
struct ParameterInfo {
  enum class Role { embedding, matrix, norm, bias, head };
  std::string name;
  std::vector<int64_t> shape;
  Role role = Role::matrix;
  int64_t size() const;
};

// Every parameter in network order: embedding, layers, final norm, head (absent if tied).
std::vector<ParameterInfo> parameter_table(const ModelConfig& config);

}  // namespace leeway
