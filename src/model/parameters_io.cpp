// Loading parameters from Hugging Face folders and saving them.
#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>

#include "base/files.h"
#include "base/folders.h"
#include "base/json.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
#include "model/parameters.h"
#include "model/safetensors.h"
#include "model/weight_files.h"

namespace leeway {
namespace {

void check_finite(const StoredPlace& place, std::span<const float> values) {
  const std::string bad = not_finite_text(place.tensor->name, place.tensor->shape, values);
  if (bad.empty()) return;
  throw Error(fmt::format("{}: tensor {}; weights must be finite in float32", *place.path, bad));
}

struct Shard {
  int64_t bytes = 0;
  std::vector<TensorToSave> tensors;
};

std::vector<Shard> shards_of(const Parameters& parameters, int64_t shard_bytes) {
  std::vector<Shard> shards(1);
  for (size_t i = 0; i < parameters.table().size(); ++i) {
    const ParameterInfo& info = parameters.table()[i];
    const int64_t bytes = info.size() * static_cast<int64_t>(sizeof(float));
    if (!shards.back().tensors.empty() && shards.back().bytes > shard_bytes - bytes) {
      shards.emplace_back();
    }
    shards.back().bytes += bytes;
    shards.back().tensors.push_back({info.name, info.shape, parameters.of(i)});
  }
  return shards;
}

}  // namespace

std::string not_finite_text(const std::string& name, const std::vector<int64_t>& shape,
                            std::span<const float> values) {
  // Counts numbers with all exponent bits set, without a branch: one fast pass.
  constexpr uint32_t kExponent = 0x7f800000u;
  uint32_t found = 0;
  for (const float value : values) {
    found |= (std::bit_cast<uint32_t>(value) & kExponent) == kExponent ? 1u : 0u;
  }
  if (found == 0) return "";
  const auto bad =
      std::find_if_not(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
  return fmt::format("{} holds {} at {}", name, std::isnan(*bad) ? std::abs(*bad) : *bad,
                     coordinates(shape, static_cast<size_t>(bad - values.begin())));
}

std::string not_finite_text(const Parameters& parameters) {
  for (size_t i = 0; i < parameters.table().size(); ++i) {
    const ParameterInfo& info = parameters.table()[i];
    std::string bad = not_finite_text(info.name, info.shape, parameters.of(i));
    if (!bad.empty()) return bad;
  }
  return "";
}

Parameters load_parameters(const std::string& folder) {
  if (is_adapter_folder(folder)) return load_adapter(folder);
  ModelConfig config = load_model_config(folder);
  const StoredModel model = open_weights(folder, config, nullptr);
  Parameters parameters(std::move(config));
  for (size_t i = 0; i < parameters.table().size(); ++i) {
    const StoredPlace& place = model.tensors.find(parameters.table()[i].name)->second;
    copy_as_float(*place.tensor, *place.path, parameters.of(i));
    check_finite(place, parameters.of(i));
  }
  if (parameters.config().tie_word_embeddings) check_tied_head(model, parameters.of(0));
  return parameters;
}

FileSums save_parameters(const Parameters& parameters, const std::string& folder,
                         int64_t shard_bytes) {
  if (parameters.lora() != nullptr) return save_adapter(parameters, folder);
  if (shard_bytes < 1) {
    throw Error(fmt::format("{}: shard_bytes = {}: must be positive", folder, shard_bytes));
  }
  make_folders(folder);
  remove_checksums(folder);
  const std::vector<Shard> shards = shards_of(parameters, shard_bytes);
  FileSums written;
  if (shards.size() == 1) {
    written[kSingleFile + 1] = write_safetensors(folder + kSingleFile, shards[0].tensors);
  } else {
    std::map<std::string, std::string> weight_map;
    int64_t total = 0;
    for (size_t i = 0; i < shards.size(); ++i) {
      const std::string name = stored_part_name("model", i, shards.size());
      written[name] = write_safetensors(folder + "/" + name, shards[i].tensors);
      total += shards[i].bytes;
      for (const TensorToSave& tensor : shards[i].tensors) weight_map[tensor.name] = name;
    }
    written[kIndexFile + 1] =
        write_file_atomically(folder + kIndexFile, stored_index_json(weight_map, total));
  }
  complete_weights(folder, parameters.config(), nullptr, written);
  return written;
}

}  // namespace leeway
