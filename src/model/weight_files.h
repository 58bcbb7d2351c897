// The files of a policy's weights in a folder, for what reads or writes them a tensor at a time:
// all weights as transformers keeps them, or an adapter as PEFT does (adapter_io.h). Parameters are
// saved and loaded whole by parameters.h.
//
// `lora`: of an adapter; null: all weights.
#pragma once

#include <string>

#include "base/checked_files.h"
#include "model/lora.h"
#include "model/stored_model.h"

namespace leeway {

// STEM.safetensors has them, or parts with an index.
std::string weights_stem(const LoraSettings* lora);
// A parameter's name in these files.
std::string weight_name(const LoraSettings* lora, const std::string& parameter);

// Checks names and shapes, and the folder's checksums.json where there is one. Throws Error naming
// file and tensor.
StoredModel open_weights(const std::string& folder, const ModelConfig& config,
                         const LoraSettings* lora);

// After the files of weights have been written: removes those of an earlier save that are not among
// `written`, and writes config.json or adapter_config.json, the last file of such a folder.
void complete_weights(const std::string& folder, const ModelConfig& config,
                      const LoraSettings* lora, FileSums& written);

}  // namespace leeway
