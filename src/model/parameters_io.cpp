// Loading parameters from Hugging Face folders and saving them.
#include <fmt/format.h>
#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "base/files.h"
#include "base/folders.h"
#include "base/json.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
#include "model/name_text.h"
#include "model/parameters.h"
#include "model/safetensors.h"

namespace leeway {
namespace {

constexpr const char* kSingle = "/model.safetensors";
constexpr const char* kIndex = "/model.safetensors.index.json";
constexpr std::string_view kHead = "lm_head.weight";
constexpr std::string_view kEmbedding = "model.embed_tokens.weight";

// "a, b, c and 7 more"
std::string first_few(const std::vector<std::string>& names) {
  constexpr size_t kFew = 5;
  const size_t shown = std::min(names.size(), kFew);
  std::string text = fmt::format("{}", fmt::join(names.begin(), names.begin() + shown, ", "));
  if (shown < names.size()) text += fmt::format(" and {} more", names.size() - shown);
  return text;
}

std::string counted(size_t count, const char* noun) {
  return fmt::format("{} {}{}", count, noun, count == 1 ? "" : "s");
}

struct Place {
  const std::string* path;  // of the file that contains it
  const StoredTensor* tensor;
};

// The tensors of a folder, from all of its files.
struct StoredModel {
  std::string where;  // the file to name if a tensor is in none
  std::vector<SafetensorsFile> files;
  std::map<std::string, Place, std::less<>> tensors;
};

StoredModel open_single(const std::string& path) {
  StoredModel model{path, {}, {}};
  const SafetensorsFile& file = model.files.emplace_back(path);
  for (const StoredTensor& tensor : file.tensors()) {
    model.tensors[tensor.name] = {&file.path(), &tensor};
  }
  return model;
}

// Maps tensors to shards, as the index does.
std::map<std::string, std::string, std::less<>> read_index(const std::string& path) {
  const rapidjson::Document document = parse_json(path, read_file(path));
  const rapidjson::Value* map = nullptr;
  if (document.IsObject()) {
    const auto member = document.FindMember("weight_map");
    if (member != document.MemberEnd()) map = &member->value;
  }
  if (map == nullptr || !map->IsObject() || map->ObjectEmpty()) {
    throw Error(
        fmt::format("{}: weight_map must be an object that maps each tensor to its file", path));
  }
  std::map<std::string, std::string, std::less<>> shards;
  for (const auto& member : map->GetObject()) {
    const std::string name(member.name.GetString(), member.name.GetStringLength());
    if (!member.value.IsString()) {
      throw Error(fmt::format("{}: weight_map: {} must name a file", path, name_text(name)));
    }
    const std::string shard(member.value.GetString(), member.value.GetStringLength());
    const bool plain = !shard.empty() && shard != "." && shard != ".." &&
                       shard.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
    if (!plain) {
      throw Error(
          fmt::format("{}: weight_map: {} is in {}: must be the name of a file in "
                      "the same folder",
                      path, name_text(name), name_text(shard)));
    }
    if (!shards.emplace(name, shard).second) {
      throw Error(fmt::format("{}: weight_map: {} is given twice", path, name_text(name)));
    }
  }
  return shards;
}

StoredModel open_sharded(const std::string& folder, const std::string& index) {
  const auto shards = read_index(index);
  std::set<std::string> names;
  for (const auto& [tensor, shard] : shards) names.insert(shard);
  StoredModel model{index, {}, {}};
  for (const std::string& name : names) {
    const std::string path = folder + "/" + name;
    if (!path_exists(path))
      throw Error(fmt::format("{}: refers to {}, which is missing", index, name_text(name)));
    const SafetensorsFile& file = model.files.emplace_back(path);
    for (const StoredTensor& tensor : file.tensors()) {
      const auto place = shards.find(tensor.name);
      if (place == shards.end() || place->second != name) {
        throw Error(fmt::format("{}: tensor {}: {} {}", path, name_text(tensor.name), index,
                                place == shards.end() ? "does not list it"
                                                      : "lists it in " + name_text(place->second)));
      }
      model.tensors[tensor.name] = {&file.path(), &tensor};
    }
  }
  for (const auto& [tensor, shard] : shards) {
    if (!model.tensors.contains(tensor)) {
      throw Error(
          fmt::format("{}: tensor {} is not in {}", index, name_text(tensor), name_text(shard)));
    }
  }
  return model;
}

StoredModel open_model(const std::string& folder) {
  if (path_exists(folder + kSingle)) return open_single(folder + kSingle);
  if (path_exists(folder + kIndex)) return open_sharded(folder, folder + kIndex);
  throw Error(
      fmt::format("{}: no weights: neither model.safetensors nor "
                  "model.safetensors.index.json is there{}",
                  folder,
                  path_exists(folder + "/pytorch_model.bin")
                      ? "; pytorch_model.bin is not read, convert it to safetensors"
                      : ""));
}

// A buffer that old versions of transformers saved; it is determined by the config.
bool is_ignored(std::string_view name) { return name.ends_with("rotary_emb.inv_freq"); }

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

// Checks names and shapes against the config, before allocating anything for what the file claims.
void check_layout(const StoredModel& model, const ModelConfig& config) {
  std::vector<std::string> missing, extra, misshapen;
  std::set<std::string, std::less<>> known;
  for (const ParameterInfo& info : parameter_table(config)) {
    known.insert(info.name);
    const auto place = model.tensors.find(info.name);
    if (place == model.tensors.end()) {
      missing.push_back(info.name);
    } else if (place->second.tensor->shape != info.shape) {
      misshapen.push_back(fmt::format("{} is {}, not {}", info.name,
                                      shape_text(place->second.tensor->shape),
                                      shape_text(info.shape)));
    }
  }
  for (const auto& [name, place] : model.tensors) {
    const bool tied_head = config.tie_word_embeddings && name == kHead;
    if (!known.contains(name) && !tied_head && !is_ignored(name)) extra.push_back(name_text(name));
  }
  std::vector<std::string> problems;
  if (!missing.empty()) {
    problems.push_back(
        fmt::format("{} missing: {}", counted(missing.size(), "tensor"), first_few(missing)));
  }
  if (!extra.empty()) {
    problems.push_back(
        fmt::format("{} not of this model: {}", counted(extra.size(), "tensor"), first_few(extra)));
  }
  if (!misshapen.empty()) {
    problems.push_back(fmt::format("{} of another shape: {}", counted(misshapen.size(), "tensor"),
                                   first_few(misshapen)));
  }
  if (problems.empty()) return;
  const bool only_head = missing == std::vector<std::string>{std::string(kHead)};
  throw Error(fmt::format(
      "{}: {}; config.json asks for a {} with num_hidden_layers = {}, hidden_size = {}, "
      "vocab_size = {}{}",
      model.where, fmt::join(problems, "; "), name_of(config.family), config.num_hidden_layers,
      config.hidden_size, config.vocab_size,
      only_head ? "; if the head is the embedding, set tie_word_embeddings to true" : ""));
}

// The coordinates "[3, 7]" of element `index` of a tensor.
std::string coordinates(const std::vector<int64_t>& shape, size_t index) {
  std::vector<int64_t> place(shape.size());
  int64_t rest = static_cast<int64_t>(index);
  for (size_t d = shape.size(); d-- > 0; rest /= shape[d]) place[d] = rest % shape[d];
  return shape_text(place);
}

void check_finite(const Place& place, std::span<const float> values) {
  const std::string bad = not_finite_text(place.tensor->name, place.tensor->shape, values);
  if (bad.empty()) return;
  throw Error(fmt::format("{}: tensor {}; weights must be finite in float32", *place.path, bad));
}

// A head that a tied model stores in addition to its embedding.
void check_tied_head(const StoredModel& model, std::span<const float> embedding) {
  const auto head = model.tensors.find(kHead);
  if (head == model.tensors.end()) return;
  const auto& [path, tensor] = head->second;
  const std::vector<int64_t>& shape = model.tensors.find(kEmbedding)->second.tensor->shape;
  if (tensor->shape != shape) {
    throw Error(fmt::format("{}: tensor {} is {}, not {}", *path, kHead, shape_text(tensor->shape),
                            shape_text(shape)));
  }
  std::vector<float> values(embedding.size());
  copy_as_float(*tensor, *path, values);
  const auto differs = std::mismatch(values.begin(), values.end(), embedding.begin()).first;
  if (differs == values.end()) return;
  throw Error(fmt::format(
      "{}: tensor {} differs from {} at {}; config.json ties them: set tie_word_embeddings to "
      "false",
      *path, kHead, kEmbedding, coordinates(shape, static_cast<size_t>(differs - values.begin()))));
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
    const bool weights = is_shard_name(name) || "/" + name == kSingle || "/" + name == kIndex;
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
  const StoredModel model = open_model(folder);
  check_checksums(folder);
  check_layout(model, config);
  Parameters parameters(std::move(config));
  for (size_t i = 0; i < parameters.table().size(); ++i) {
    const Place& place = model.tensors.find(parameters.table()[i].name)->second;
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
    written[kSingle + 1] = write_safetensors(folder + kSingle, shards[0].tensors);
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
    written[kIndex + 1] = write_file_atomically(folder + kIndex, index_json(weight_map, total));
  }
  remove_stale(folder, written);
  written["config.json"] =
      write_file_atomically(folder + "/config.json", model_config_json(parameters.config()));
  return written;
}

}  // namespace leeway
