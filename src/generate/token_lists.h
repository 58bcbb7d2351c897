// Token ids in: {"tokens": [[1, 2, ..], ..]}.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/model_config.h"

namespace leeway {

// Reads a file ("-": standard input). Throws Error naming the file, the sequence, the position and
// the value for malformed JSON, an empty sequence, an id that is not an integer or outside the
// model's vocabulary, and a sequence longer than the model allows.
std::vector<std::vector<int32_t>> read_token_lists(const std::string& path,
                                                   const ModelConfig& config);

}  // namespace leeway
