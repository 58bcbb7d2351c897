// The tokenizer of a GGUF file as the files of a Hugging Face folder.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gguf/gguf_file.h"
#include "model/model_config.h"

namespace leeway {

struct FolderTokenizer {
  std::string tokenizer_json, tokenizer_config_json, generation_config_json;
  std::vector<int32_t> eos_token_id;
  std::optional<int32_t> bos_token_id, pad_token_id;
};

// Byte-level BPE (tokenizer.ggml.model = "gpt2") whose rule for words is known. Control tokens
// become special added tokens, user-defined ones added tokens that are not special; the file does
// not say more about them. Fillers of the vocabulary ("[PAD123]") are left out. The result has been
// read by Leeway's own tokenizer.
//
// Throws Error naming file and key for other tokenizers, for a file without one, and for one that
// has more tokens than the embedding has rows.
FolderTokenizer tokenizer_of_gguf(const GgufFile& file, const ModelConfig& config);

}  // namespace leeway
