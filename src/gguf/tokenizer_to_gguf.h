// The tokenizer of a Hugging Face folder as GGUF metadata.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "gguf/gguf_value.h"
#include "model/model_config.h"

namespace leeway {

// tokenizer.json (byte-level BPE whose rule for words has a name in GGUF files), special tokens
// from tokenizer_config.json, generation_config.json and config.json, and the chat template. Ids
// without a token, up to the model's vocabulary, become fillers. Throws Error naming the file and
// what is not supported, and for ids beyond the vocabulary, with both numbers.
std::vector<std::pair<std::string, GgufValue>> gguf_tokenizer_of(const std::string& folder,
                                                                 const ModelConfig& config);

}  // namespace leeway
