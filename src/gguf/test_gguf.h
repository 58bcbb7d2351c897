// Shared by the tests of GGUF files: small models with a small tokenizer, as plans and files.
#pragma once

#include <fmt/format.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "base/utf8.h"
#include "gguf/dequantise.h"
#include "gguf/gguf_writer.h"
#include "gguf/model_metadata.h"
#include "gguf/tensor_names.h"
#include "model/test_files.h"
#include "text/byte_level.h"

namespace leeway::testing {

// Rows of every matrix divide into blocks of 32.
inline ModelConfig gguf_config(Family family, bool tied = false) {
  ModelConfig config = small_config(family, tied);
  config.vocab_size = 270;
  config.hidden_size = 32;
  config.intermediate_size = 64;
  config.rms_norm_eps = 1e-5;
  config.rope_theta = 20000;
  return config;
}

inline GgufNumbers int32_array(const std::vector<int32_t>& values) {
  GgufNumbers numbers{.type = 5, .bytes = std::string(values.size() * sizeof(int32_t), '\0')};
  std::memcpy(numbers.bytes.data(), values.data(), numbers.bytes.size());
  return numbers;
}

// The 256 bytes, "th", "the", a control token, one that a user added, and fillers up to
// `vocab_size`.
inline std::vector<std::pair<std::string, GgufValue>> small_gguf_tokenizer(
    int64_t vocab_size, const std::string& pre = "smollm") {
  std::vector<std::string> tokens;
  for (int byte = 0; byte < 256; ++byte) {
    append_utf8(tokens.emplace_back(), byte_level_code_point(static_cast<uint8_t>(byte)));
  }
  tokens.insert(tokens.end(), {"th", "the", "<|end|>", "<think>"});
  std::vector<int32_t> kinds(tokens.size(), 1);
  kinds[258] = 3;
  kinds[259] = 4;
  for (int64_t id = static_cast<int64_t>(tokens.size()); id < vocab_size; ++id) {
    tokens.push_back(fmt::format("[PAD{}]", id));
    kinds.push_back(5);
  }
  return {{"tokenizer.ggml.model", std::string("gpt2")},
          {"tokenizer.ggml.pre", pre},
          {"tokenizer.ggml.tokens", tokens},
          {"tokenizer.ggml.token_type", int32_array(kinds)},
          {"tokenizer.ggml.merges", std::vector<std::string>{"t h", "th e"}},
          {"tokenizer.ggml.eos_token_id", uint32_t{258}},
          {"tokenizer.chat_template", std::string("{{ messages }}")}};
}

// Everything but the values of a model whose matrices have one type.
inline GgufPlan gguf_plan(const ModelConfig& config, GgufType type = GgufType::f32) {
  GgufPlan plan;
  plan.metadata = gguf_metadata_of(config);
  for (auto& entry : small_gguf_tokenizer(config.vocab_size)) {
    plan.metadata.push_back(std::move(entry));
  }
  for (const ParameterInfo& info : parameter_table(config)) {
    plan.tensors.push_back(
        {gguf_name_of(info.name), info.shape, info.shape.size() > 1 ? type : GgufType::f32});
  }
  return plan;
}

inline GgufValue& entry_of(GgufPlan& plan, const std::string& key) {
  for (auto& [name, value] : plan.metadata) {
    if (name == key) return value;
  }
  return plan.metadata.emplace_back(key, uint32_t{0}).second;
}

// Values that every type holds: small multiples of powers of two.
inline void write_gguf(const std::string& path, const GgufPlan& plan) {
  GgufWriter writer(path, plan);
  Rng rng(7);
  for (const GgufTensorPlan& tensor : plan.tensors) {
    const GgufTypeInfo& info = info_of(tensor.type);
    std::vector<float> values(tensor.bytes() / info.block_bytes * info.elements);
    for (float& value : values)
      value = static_cast<float>(static_cast<int>(rng.below(255)) - 127) / 64;
    // Q8_0 has these values where a block's largest is 127 of its steps.
    for (size_t i = 0; i < values.size(); i += 32) values[i] = 127.0f / 64;
    std::vector<std::byte> bytes(tensor.bytes());
    quantise(tensor.type, values, bytes);
    writer.write(bytes);
  }
  writer.commit();
}

}  // namespace leeway::testing
