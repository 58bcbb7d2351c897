// The tensors of a Hugging Face folder as they lie in its files, for what reads weights: all at
// once into Parameters, or one after the other.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/checked_files.h"
#include "model/model_config.h"
#include "model/safetensors.h"

namespace leeway {

// The names of weight files in a folder.
inline constexpr const char* kSingleFile = "/model.safetensors";
inline constexpr const char* kIndexFile = "/model.safetensors.index.json";

struct StoredPlace {
  const std::string* path;  // of the file that contains it
  const StoredTensor* tensor;
};

// The tensors of a folder, from all of its files.
struct StoredModel {
  std::string where;  // the file to name if a tensor is in none
  std::vector<SafetensorsFile> files;
  std::map<std::string, StoredPlace, std::less<>> tensors;
};

// model.safetensors, or the shards of model.safetensors.index.json. Throws Error naming file and
// tensor.
StoredModel open_stored_model(const std::string& folder);

// The same of STEM.safetensors or STEM.safetensors.index.json.
StoredModel open_stored_tensors(const std::string& folder, const std::string& stem);
// Such an index: the file of each tensor, and the bytes of all.
std::string stored_index_json(const std::map<std::string, std::string>& files, int64_t bytes);
// "STEM-00001-of-00007.safetensors", the first of seven.
std::string stored_part_name(const std::string& stem, size_t part, size_t parts);
bool is_stored_part_name(const std::string& stem, std::string_view name);
// Removes files of STEM that are not among `written`, which a reader might mistake for them: those
// of an earlier save.
void remove_other_files(const std::string& folder, const std::string& stem,
                        const FileSums& written);

// Checks names and shapes against the config, before allocating anything for what the file claims.
void check_layout(const StoredModel& model, const ModelConfig& config);

// A head that a tied model stores in addition to its embedding must equal it.
void check_tied_head(const StoredModel& model, std::span<const float> embedding);

// "[50, 24]"
std::string shape_text(const std::vector<int64_t>& shape);
// The coordinates "[3, 7]" of element `index` of a tensor.
std::string coordinates(const std::vector<int64_t>& shape, size_t index);

}  // namespace leeway
