#include "model/stored_model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>

#include <algorithm>
#include <set>

#include "base/files.h"
#include "base/folders.h"
#include "base/json.h"
#include "leeway/error.h"
#include "model/name_text.h"

namespace leeway {
namespace {

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

// A buffer that old versions of transformers saved; it is determined by the config.
bool is_ignored(std::string_view name) { return name.ends_with("rotary_emb.inv_freq"); }

}  // namespace

std::string shape_text(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

std::string coordinates(const std::vector<int64_t>& shape, size_t index) {
  std::vector<int64_t> place(shape.size());
  int64_t rest = static_cast<int64_t>(index);
  for (size_t d = shape.size(); d-- > 0; rest /= shape[d]) place[d] = rest % shape[d];
  return shape_text(place);
}

StoredModel open_stored_tensors(const std::string& folder, const std::string& stem) {
  const std::string single = fmt::format("{}/{}.safetensors", folder, stem);
  const std::string index = single + ".index.json";
  if (path_exists(single)) return open_single(single);
  if (path_exists(index)) return open_sharded(folder, index);
  throw Error(
      fmt::format("{}: no {}: neither {}.safetensors nor {}.safetensors.index.json is there{}",
                  folder, stem == "model" ? "weights" : stem, stem, stem,
                  stem == "model" && path_exists(folder + "/pytorch_model.bin")
                      ? "; pytorch_model.bin is not read, convert it to safetensors"
                      : ""));
}

StoredModel open_stored_model(const std::string& folder) {
  return open_stored_tensors(folder, "model");
}

std::string stored_index_json(const std::map<std::string, std::string>& files, int64_t bytes) {
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
  for (const auto& [tensor, file] : files) {
    writer.Key(tensor.c_str());
    writer.String(file.c_str());
  }
  writer.EndObject();
  writer.EndObject();
  return std::string(buffer.GetString(), buffer.GetSize()) + "\n";
}

std::string stored_part_name(const std::string& stem, size_t part, size_t parts) {
  return fmt::format("{}-{:05}-of-{:05}.safetensors", stem, part + 1, parts);
}

bool is_stored_part_name(const std::string& stem, std::string_view name) {
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
  return take(stem + "-") && take_number() && take("-of-") && take_number() &&
         name == ".safetensors";
}

void remove_other_files(const std::string& folder, const std::string& stem,
                        const FileSums& written) {
  const std::string single = stem + ".safetensors";
  std::vector<std::string> stale;
  for (const std::string& name : folder_names(folder)) {
    const bool is_of_stem =
        is_stored_part_name(stem, name) || name == single || name == single + ".index.json";
    if (is_of_stem && !written.contains(name)) stale.push_back(name);
  }
  // The index first: without it no part is read.
  std::stable_partition(stale.begin(), stale.end(),
                        [](const std::string& name) { return name.ends_with(".json"); });
  for (const std::string& name : stale) remove_tree(folder + "/" + name);
}

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

}  // namespace leeway
