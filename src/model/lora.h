// Low-rank adapters (LoRA): y = x W^T + scale (x A^T) B^T with W frozen, A [rank, inputs] and B
// [outputs, rank] trained, for some of a layer's linear modules.
//
// What is here: which matrices an adapter has and what they are called. Their values are a
// Parameters with a base; adapter_io.h reads and writes them as PEFT does.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/model_config.h"

namespace leeway {

// The linear modules of a layer, in network order: what an adapter may have.
inline constexpr std::array<std::string_view, 7> kLoraTargets = {
    "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"};

struct LoraSettings {
  int64_t rank = 0;
  double alpha = 0.0;
  std::vector<std::string> targets;  // of kLoraTargets, in that order
  std::string base_path;             // the base's folder, as files of the adapter name it
  std::optional<uint32_t> base_sum;  // checksum of the base's weights, where it is known

  float scale() const { return static_cast<float>(alpha / static_cast<double>(rank)); }
  // Whether the matrices and their use are the same, whatever the base's folder is called.
  bool same_network(const LoraSettings& other) const {
    return rank == other.rank && alpha == other.alpha && targets == other.targets;
  }
};

// In the order of kLoraTargets, each once; what is no target is left out.
std::vector<std::string> ordered_targets(const std::vector<std::string>& targets);

// "model.layers.0.self_attn.q_proj" -> "model.layers.0.self_attn.q_proj.lora_A.weight"
inline std::string lora_a_name(const std::string& module) { return module + ".lora_A.weight"; }
inline std::string lora_b_name(const std::string& module) { return module + ".lora_B.weight"; }
inline bool is_lora_a(std::string_view name) { return name.ends_with(".lora_A.weight"); }

// A and B of every target in every layer, in network order.
std::vector<ParameterInfo> lora_table(const ModelConfig& config, const LoraSettings& lora);

}  // namespace leeway
