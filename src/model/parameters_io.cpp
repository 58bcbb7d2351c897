// Loading parameters from Hugging Face folders and saving them.
#include <fmt/format.h>
#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

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
#include "model/stored_model.h"

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

std::string index_json(const std::map<std::string, std::string>& weight_map, int64_t bytes) {
  rapidjson::StringBuffer buffer;
  rapidjson::PrettyWriter<rapidjson::StringBuffer> writer(buffer);
  writer.SetIndent(' ', 2);
  writer.StartObject();
  writer.Key("metadata");
  writer.StartObject();
  writer.Key("total_size");
  writer.Int64(bytes);
  writer.EndObject();
  writer.Key("weight_map");
  writer.StartObject();
  for (const auto& [tensor, shard] : weight_map) {
    writer.Key(tensor.c_str());
    writer.String(shard.c_str());
  }
  writer.EndObject();
  writer.EndObject();
  return std::string(buffer.GetString(), buffer.GetSize()) + "\n";
}

// "model-00001-of-00007.safetensors"
bool is_shard_name(std::string_view name) {
  auto take = [&](std::string_view text) {
    const bool there = name.starts_with(text);
    if (there) name.remove_prefix(text.size());
    return there;
  };
  auto take_number = [&] {
    const size_t digits = std::min(name.find_first_not_of("0123456789"), name.size());
    name.remove_prefix(digits);
    return digits >= 5;
  };
  return take("model-") && take_number() && take("-of-") && take_number() && name == ".safetensors";
}

// Removes weight files of an earlier save, which a reader might mistake for this one's.
void remove_stale(const std::string& folder, const FileSums& written) {
  std::vector<std::string> stale;
  for (const std::string& name : folder_names(folder)) {
    const bool weights =
        is_shard_name(name) || "/" + name == kSingleFile || "/" + name == kIndexFile;
    if (weights && !written.contains(name)) stale.push_back(name);
  }
  // The index first: without it no shard is read.
  std::stable_partition(stale.begin(), stale.end(),
                        [](const std::string& name) { return name.ends_with(".json"); });
  for (const std::string& name : stale) remove_tree(folder + "/" + name);
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
  const StoredModel model = open_stored_model(folder);
  check_checksums(folder);
  check_layout(model, config);
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
      const std::string name =
          fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
      written[name] = write_safetensors(folder + "/" + name, shards[i].tensors);
      total += shards[i].bytes;
      for (const TensorToSave& tensor : shards[i].tensors) weight_map[tensor.name] = name;
    }
    written[kIndexFile + 1] =
        write_file_atomically(folder + kIndexFile, index_json(weight_map, total));
  }
  remove_stale(folder, written);
  written["config.json"] =
      write_file_atomically(folder + "/config.json", model_config_json(parameters.config()));
  return written;
}

}  // namespace leeway
