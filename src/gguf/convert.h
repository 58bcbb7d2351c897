// Models between GGUF files and Hugging Face folders. One piece of a tensor is in memory at a time,
// so a model may be larger than memory.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/enum_names.h"
#include "gguf/tensor_type.h"
#include "model/model_config.h"

namespace leeway {

// How a folder stores weights. `exact`: 16-bit tensors stay as they are, all others become float32,
// which holds every value of a quantised tensor as it is defined. `bf16`: all are rounded to
// bfloat16, for half the bytes.
enum class FolderDType { exact, bf16 };
template <>
inline constexpr std::array kNames<FolderDType>{"exact", "bf16"};

// How a GGUF file stores matrices; vectors are always float32, as llama.cpp asks for.
enum class GgufMatrices { f16, bf16, q8_0 };
template <>
inline constexpr std::array kNames<GgufMatrices>{"f16", "bf16", "q8_0"};

struct ConvertOptions {
  FolderDType dtype = FolderDType::exact;
  GgufMatrices type = GgufMatrices::f16;
  bool tokenizer = true;   // false: weights and config alone
  bool overwrite = false;  // replace what an earlier conversion wrote
  // Called with weights converted so far and in all. What it throws stops the conversion.
  std::function<void(int64_t done, int64_t total)> progress = [](int64_t, int64_t) {};
};

struct Conversion {
  std::string architecture;
  int64_t parameters = 0;
  std::map<std::string, size_t> types;  // tensors by their type in the GGUF file
  uint64_t bytes = 0;                   // of all files that were written
  std::vector<std::string> warnings;
};

// Both write the weights alone, with a warning, where there is no tokenizer at all; one that is not
// understood is refused.

// Writes config.json, model.safetensors, tokenizer.json, tokenizer_config.json and
// generation_config.json. The folder appears whole or not at all. It must not exist, or be empty;
// with `overwrite` it may hold such files and nothing else. Throws Error naming file and place.
Conversion convert_gguf_to_folder(const std::string& file, const std::string& folder,
                                  const ConvertOptions& options);

// Writes one GGUF file, which appears whole or not at all. It must not exist unless `overwrite`. A
// matrix whose rows are no multiple of Q8_0's block becomes F16, with a warning. Throws Error
// naming file and tensor, also for a value that the type cannot hold.
Conversion convert_folder_to_gguf(const std::string& folder, const std::string& file,
                                  const ConvertOptions& options);

}  // namespace leeway
