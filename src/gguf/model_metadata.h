// A model's architecture as GGUF metadata.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gguf/gguf_file.h"
#include "gguf/gguf_value.h"
#include "model/model_config.h"

namespace leeway {

// The tensor that holds llama3's scaling of RoPE frequencies: a divisor for each pair.
inline constexpr const char* kRopeFactors = "rope_freqs.weight";

// The config of the file's model, without eos_token_id. Names and shapes of all tensors are checked
// against it. Throws Error naming file, key and place for an architecture other than llama, qwen2
// and qwen3, for whatever would be computed differently (experts, other rope scalings, sliding
// windows, ..), and for missing, extra and misshapen tensors. `warnings` gets keys of the
// architecture that are unknown here.
ModelConfig config_of_gguf(const GgufFile& file, std::vector<std::string>& warnings);

// The metadata of the architecture, in the types that llama.cpp asks for.
std::vector<std::pair<std::string, GgufValue>> gguf_metadata_of(const ModelConfig& config);

// llama3's divisors, one per pair of a head's dimensions.
std::vector<float> rope_factors_of(const ModelConfig& config);

}  // namespace leeway
