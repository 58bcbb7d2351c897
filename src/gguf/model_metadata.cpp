#include "gguf/model_metadata.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numbers>
#include <string_view>

#include "gguf/tensor_names.h"
#include "leeway/error.h"
#include "model/config_keys.h"
#include "model/name_text.h"
#include "model/stored_model.h"

namespace leeway {
namespace {

// Keys after "llama." that are read, or that repeat what others say.
constexpr std::array<std::string_view, 19> kKnownKeys = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "rope.freq_base",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scale_linear",
    "vocab_size",
    "expert_count",
    "expert_used_count",
};
// Keys that change what is computed, whatever their value.
constexpr std::array<std::string_view, 7> kRefusedKeys = {
    "logit_scale",         "residual_scale",           "embedding_scale",       "attention.scale",
    "attention.clamp_kqv", "attention.max_alibi_bias", "use_parallel_residual",
};

class ArchitectureReader {
 public:
  ArchitectureReader(const GgufFile& file, Family family)
      : file_(file), family_(family), prefix_(std::string(name_of(family)) + ".") {}

  ModelConfig read(std::vector<std::string>& warnings) const {
    refuse_what_differs(warnings);
    ModelConfig config;
    config.family = family_;
    config.hidden_size = required("embedding_length");
    config.intermediate_size = required("feed_forward_length");
    config.num_hidden_layers = required("block_count");
    config.num_attention_heads = required("attention.head_count");
    config.num_key_value_heads =
        size("attention.head_count_kv").value_or(config.num_attention_heads);
    config.max_position_embeddings = required("context_length");
    config.vocab_size = read_vocab_size();
    config.head_dim = read_head_dim(config);
    config.rms_norm_eps = required_real("attention.layer_norm_rms_epsilon");
    config.rope_theta = file_.real(key("rope.freq_base")).value_or(10000.0);
    config.tie_word_embeddings = file_.find_tensor("output.weight") == nullptr;
    config.qk_norm = family_ == Family::qwen3;
    const bool bias = file_.find_tensor("blk.0.attn_output.bias") != nullptr;
    config.qkv_bias = family_ == Family::qwen2 || bias;
    config.output_bias = family_ != Family::qwen2 && bias;
    check_model_config(file_.path(), config);
    config.llama3_rope = read_llama3_rope(config);
    return config;
  }

 private:
  std::string key(std::string_view name) const { return prefix_ + std::string(name); }

  std::optional<int64_t> size(std::string_view name) const {
    const std::optional<int64_t> value = file_.integer(key(name));
    if (value && (*value < 1 || *value > int64_t{1} << 30)) {
      file_.refuse_key(key(name), "must be positive, and is larger than any model's if it is");
    }
    return value;
  }
  int64_t required(std::string_view name) const {
    const std::optional<int64_t> value = size(name);
    if (!value) throw Error(fmt::format("{}: the metadata has no {}", file_.path(), key(name)));
    return *value;
  }
  double required_real(std::string_view name) const {
    const std::optional<double> value = file_.real(key(name));
    if (!value) throw Error(fmt::format("{}: the metadata has no {}", file_.path(), key(name)));
    return *value;
  }

  // The embedding's rows are the vocabulary; the key is often absent.
  int64_t read_vocab_size() const {
    const GgufTensor* embedding = file_.find_tensor("token_embd.weight");
    if (embedding == nullptr) {
      throw Error(fmt::format("{}: there is no tensor token_embd.weight", file_.path()));
    }
    const std::optional<int64_t> claimed = size("vocab_size");
    if (claimed && *claimed != embedding->rows()) {
      file_.refuse_key(key("vocab_size"),
                       fmt::format("token_embd.weight has {} rows", embedding->rows()));
    }
    return embedding->rows();
  }

  int64_t read_head_dim(const ModelConfig& config) const {
    const std::optional<int64_t> given = size("attention.key_length");
    if (!given && config.hidden_size % config.num_attention_heads != 0) {
      file_.refuse_key(
          key("attention.head_count"),
          fmt::format("does not divide {} = {}, and there is no {}", key("embedding_length"),
                      config.hidden_size, key("attention.key_length")));
    }
    const int64_t head_dim = given.value_or(config.hidden_size / config.num_attention_heads);
    for (const char* name : {"attention.value_length", "rope.dimension_count"}) {
      const std::optional<int64_t> same = size(name);
      if (same && *same != head_dim) {
        file_.refuse_key(key(name), fmt::format("must be the {} of a head's keys", head_dim));
      }
    }
    return head_dim;
  }

  void refuse_what_differs(std::vector<std::string>& warnings) const {
    if (const auto experts = file_.integer(key("expert_count")); experts && *experts > 0) {
      file_.refuse_key(key("expert_count"), "mixtures of experts are not supported");
    }
    const auto window = file_.integer(key("attention.sliding_window"));
    if (window && *window > 0 && *window < required("context_length")) {
      file_.refuse_key(key("attention.sliding_window"), "sliding windows are not supported");
    }
    if (const std::string* type = file_.text(key("rope.scaling.type")); type && *type != "none") {
      file_.refuse_key(
          key("rope.scaling.type"),
          fmt::format("this rope scaling is not supported; llama3's, by {}, is", kRopeFactors));
    }
    if (file_.real(key("rope.scale_linear")).value_or(1.0) != 1.0) {
      file_.refuse_key(key("rope.scale_linear"), "linear rope scaling is not supported");
    }
    for (const std::string_view name : kRefusedKeys) {
      if (file_.metadata().contains(key(name))) file_.refuse_key(key(name), "is not supported");
    }
    for (const auto& [name, entry] : file_.metadata()) {
      if (!name.starts_with(prefix_)) continue;
      const std::string_view rest = std::string_view(name).substr(prefix_.size());
      if (std::find(kKnownKeys.begin(), kKnownKeys.end(), rest) != kKnownKeys.end()) continue;
      warnings.push_back(fmt::format("{}: {} = {} is not known here and was left out", file_.path(),
                                     name, gguf_value_text(entry.value)));
    }
  }

  // The tensor has results, not settings: the settings are llama 3's, and the factor is the largest
  // divisor. Anything else is refused, since config.json could not say it.
  std::optional<Llama3Rope> read_llama3_rope(ModelConfig config) const {
    const GgufTensor* tensor = file_.find_tensor(kRopeFactors);
    if (tensor == nullptr) return std::nullopt;
    std::vector<float> divisors(static_cast<size_t>(config.head_dim / 2));
    if (tensor->shape != std::vector<int64_t>{config.head_dim / 2}) {
      file_.refuse(*tensor, fmt::format("its shape is {}, not [{}]", shape_text(tensor->shape),
                                        config.head_dim / 2));
    }
    file_.read_rows(*tensor, 0, 1, divisors);
    Llama3Rope rope;
    rope.factor = *std::max_element(divisors.begin(), divisors.end());
    rope.original_max_position_embeddings =
        size("rope.scaling.original_context_length").value_or(8192);
    if (rope.factor == 1.0) return std::nullopt;
    config.llama3_rope = rope;
    const std::vector<float> expected = rope_factors_of(config);
    for (size_t i = 0; i < divisors.size(); ++i) {
      // Converters compute them in float32 or in double.
      if (std::fabs(divisors[i] - expected[i]) <= 1e-4f * expected[i]) continue;
      file_.refuse(*tensor, fmt::format("holds {} at [{}]; llama3's scaling by {} has {}: another "
                                        "scaling is not supported",
                                        divisors[i], i, rope.factor, expected[i]));
    }
    return rope;
  }

  const GgufFile& file_;
  Family family_;
  std::string prefix_;
};

Family read_architecture(const GgufFile& file) {
  std::vector<std::string> known;
  for (const FamilyKeys& family : kFamilies) known.emplace_back(family.model_type);
  const std::string* name = file.text("general.architecture");
  if (name == nullptr) {
    throw Error(fmt::format("{}: the metadata has no general.architecture", file.path()));
  }
  for (const FamilyKeys& family : kFamilies) {
    if (*name == family.model_type) return family.family;
  }
  file.refuse_key(
      "general.architecture",
      fmt::format("this architecture is not supported; these are: {}", fmt::join(known, ", ")));
}

void refuse_parts(const GgufFile& file) {
  if (const auto parts = file.integer("split.count"); parts && *parts > 1) {
    file.refuse_key("split.count",
                    "the model is split over several files; join them with llama.cpp's "
                    "`llama-gguf-split --merge`");
  }
  if (const std::string* type = file.text("general.type"); type && *type != "model") {
    file.refuse_key("general.type", "must be \"model\"");
  }
}

// Names and shapes of all tensors, before anything is allocated for them.
void check_tensors(const GgufFile& file, const ModelConfig& config) {
  std::map<std::string, const ParameterInfo*, std::less<>> expected;
  const std::vector<ParameterInfo> table = parameter_table(config);
  std::vector<std::string> missing;
  for (const ParameterInfo& info : table) {
    const std::string name = gguf_name_of(info.name);
    expected.emplace(name, &info);
    if (file.find_tensor(name) == nullptr) missing.push_back(name);
  }
  if (!missing.empty()) {
    const size_t shown = std::min<size_t>(missing.size(), 5);
    throw Error(fmt::format("{}: {} of {} tensors are missing: {}{}", file.path(), missing.size(),
                            table.size(), fmt::join(missing.begin(), missing.begin() + shown, ", "),
                            shown < missing.size() ? ", .." : ""));
  }
  for (const GgufTensor& tensor : file.tensors()) {
    if (tensor.name == kRopeFactors && config.family == Family::llama) continue;
    const auto known = expected.find(tensor.name);
    if (known == expected.end()) {
      file.refuse(tensor, fmt::format("is none of a {} with {} blocks", name_of(config.family),
                                      config.num_hidden_layers));
    }
    if (tensor.shape != known->second->shape) {
      file.refuse(tensor, fmt::format("its shape is {}, not {}", shape_text(tensor.shape),
                                      shape_text(known->second->shape)));
    }
  }
}

}  // namespace

ModelConfig config_of_gguf(const GgufFile& file, std::vector<std::string>& warnings) {
  refuse_parts(file);
  ModelConfig config = ArchitectureReader(file, read_architecture(file)).read(warnings);
  check_tensors(file, config);
  return config;
}

std::vector<float> rope_factors_of(const ModelConfig& config) {
  LEEWAY_CHECK(config.llama3_rope.has_value(), "only llama3's rope has factors");
  const Llama3Rope& rope = *config.llama3_rope;
  const double original = static_cast<double>(rope.original_max_position_embeddings);
  std::vector<float> factors;
  for (int64_t i = 0; i < config.head_dim / 2; ++i) {
    const double exponent = static_cast<double>(2 * i) / static_cast<double>(config.head_dim);
    const double wavelength = 2.0 * std::numbers::pi * std::pow(config.rope_theta, exponent);
    const double turns = original / wavelength;  // within the original context
    if (turns > rope.high_freq_factor) {
      factors.push_back(1.0f);
    } else if (turns < rope.low_freq_factor) {
      factors.push_back(static_cast<float>(rope.factor));
    } else {
      const double smooth =
          (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
      factors.push_back(static_cast<float>(1.0 / ((1.0 - smooth) / rope.factor + smooth)));
    }
  }
  return factors;
}

std::vector<std::pair<std::string, GgufValue>> gguf_metadata_of(const ModelConfig& config) {
  std::vector<std::pair<std::string, GgufValue>> metadata;
  const std::string prefix = std::string(name_of(config.family)) + ".";
  metadata.emplace_back("general.architecture", std::string(name_of(config.family)));
  metadata.emplace_back("general.type", std::string("model"));
  const auto size = [&](const char* name, int64_t value) {
    metadata.emplace_back(prefix + name, static_cast<uint32_t>(value));
  };
  const auto real = [&](const char* name, double value) {
    metadata.emplace_back(prefix + name, static_cast<float>(value));
  };
  size("context_length", config.max_position_embeddings);
  size("embedding_length", config.hidden_size);
  size("block_count", config.num_hidden_layers);
  size("feed_forward_length", config.intermediate_size);
  size("attention.head_count", config.num_attention_heads);
  size("attention.head_count_kv", config.num_key_value_heads);
  size("attention.key_length", config.head_dim);
  size("attention.value_length", config.head_dim);
  real("attention.layer_norm_rms_epsilon", config.rms_norm_eps);
  real("rope.freq_base", config.rope_theta);
  size("rope.dimension_count", config.head_dim);
  size("vocab_size", config.vocab_size);
  if (config.llama3_rope) {
    size("rope.scaling.original_context_length",
         config.llama3_rope->original_max_position_embeddings);
  }
  return metadata;
}

}  // namespace leeway
