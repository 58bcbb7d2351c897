// The keys of config.json that reading and writing share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/model_config.h"

namespace leeway {

struct FamilyKeys {
  Family family;
  const char* model_type;
  const char* architecture;
};
inline constexpr FamilyKeys kFamilies[] = {
    {Family::qwen3, "qwen3", "Qwen3ForCausalLM"},
    {Family::qwen2, "qwen2", "Qwen2ForCausalLM"},
    {Family::llama, "llama", "LlamaForCausalLM"},
};

inline const FamilyKeys& keys_of(Family family) { return kFamilies[static_cast<size_t>(family)]; }
static_assert(kFamilies[0].family == Family{0} && kFamilies[1].family == Family{1} &&
              kFamilies[2].family == Family{2});

// Some code stores positions as int32.
inline constexpr int64_t kMaxPositions = int64_t{1} << 30;

// Upper bounds are far above any model's and keep the parameter count far below 2^63.
struct SizeKey {
  const char* key;
  int64_t ModelConfig::*field;
  int64_t most;
  bool required;
};
inline constexpr SizeKey kSizes[] = {
    {"vocab_size", &ModelConfig::vocab_size, int64_t{1} << 30, true},
    {"hidden_size", &ModelConfig::hidden_size, int64_t{1} << 20, true},
    {"intermediate_size", &ModelConfig::intermediate_size, int64_t{1} << 22, true},
    {"num_hidden_layers", &ModelConfig::num_hidden_layers, int64_t{1} << 12, true},
    {"num_attention_heads", &ModelConfig::num_attention_heads, int64_t{1} << 12, true},
    {"num_key_value_heads", &ModelConfig::num_key_value_heads, int64_t{1} << 12, false},
    {"head_dim", &ModelConfig::head_dim, int64_t{1} << 12, false},
    {"max_position_embeddings", &ModelConfig::max_position_embeddings, kMaxPositions, true},
};

}  // namespace leeway
