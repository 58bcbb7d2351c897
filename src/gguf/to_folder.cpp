// From a GGUF file to a folder.
#include <fcntl.h>
#include <fmt/format.h>
#include <rapidjson/prettywriter.h>
#include <rapidjson/stringbuffer.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <set>

#include "base/checked_files.h"
#include "base/files.h"
#include "base/folders.h"
#include "base/json.h"
#include "gguf/convert.h"
#include "gguf/dequantise.h"
#include "gguf/gguf_file.h"
#include "gguf/model_metadata.h"
#include "gguf/row_pieces.h"
#include "gguf/tensor_names.h"
#include "gguf/tokenizer_from_gguf.h"
#include "leeway/error.h"
#include "model/safetensors.h"
#include "model/stored_model.h"

namespace leeway {
namespace {

constexpr const char* kWeights = "model.safetensors";

// A folder that gets its name when it is complete.
class PendingFolder {
 public:
  PendingFolder(std::string folder, bool overwrite)
      : folder_(without_slashes(std::move(folder))),
        pending_(fmt::format("{}.{}.tmp", folder_, ::getpid())) {
    check_target(overwrite);
    remove_tree(pending_);
    make_folders(pending_);
  }
  ~PendingFolder() {
    try {
      remove_tree(pending_);
    } catch (const Error&) {
      // Nothing that matters is lost, and there is no one to tell.
    }
  }
  PendingFolder(const PendingFolder&) = delete;
  PendingFolder& operator=(const PendingFolder&) = delete;

  std::string at(const std::string& name) const { return pending_ + "/" + name; }

  // What was there before is removed with the pending folder, after the two have changed places.
  void commit() {
    const bool exists = path_exists(folder_);
    if (::renameat2(AT_FDCWD, pending_.c_str(), AT_FDCWD, folder_.c_str(),
                    exists ? RENAME_EXCHANGE : RENAME_NOREPLACE) == 0) {
      return;
    }
    throw Error(
        fmt::format("{}: cannot rename {} to it: {}", folder_, pending_, std::strerror(errno)));
  }

 private:
  static std::string without_slashes(std::string path) {
    while (path.size() > 1 && path.ends_with('/')) path.pop_back();
    return path;
  }

  void check_target(bool overwrite) const {
    if (!path_exists(folder_)) return;
    static const std::set<std::string> kOwn = {"config.json", kWeights, "tokenizer.json",
                                               "tokenizer_config.json", "generation_config.json"};
    for (const std::string& name : folder_names(folder_)) {
      if (!overwrite) {
        throw Error(
            fmt::format("{}: exists and is not an empty folder; name another, or replace "
                        "it with --overwrite",
                        folder_));
      }
      if (!kOwn.contains(name)) {
        throw Error(
            fmt::format("{}: holds {}, which no conversion writes; --overwrite replaces "
                        "only what one wrote",
                        folder_, name));
      }
    }
  }

  std::string folder_, pending_;
};

DType stored_dtype(GgufType type, FolderDType wanted) {
  if (wanted == FolderDType::bf16 || type == GgufType::bf16) return DType::bf16;
  return type == GgufType::f16 ? DType::f16 : DType::f32;
}

GgufType same_type(DType dtype) {
  return dtype == DType::bf16  ? GgufType::bf16
         : dtype == DType::f16 ? GgufType::f16
                               : GgufType::f32;
}

void check_values(const GgufFile& file, const GgufTensor& tensor, int64_t first_row,
                  std::span<const float> values) {
  const auto bad =
      std::find_if_not(values.begin(), values.end(), [](float v) { return std::isfinite(v); });
  if (bad == values.end()) return;
  const size_t index =
      static_cast<size_t>(first_row * tensor.row_length() + (bad - values.begin()));
  file.refuse(tensor, fmt::format("holds {} at {}; weights must be finite", *bad,
                                  coordinates(tensor.shape, index)));
}

// config.json as transformers has it, with what ModelConfig does not hold.
std::string config_json_of(const ModelConfig& config, const FolderTokenizer& tokenizer,
                           FolderDType dtype) {
  rapidjson::Document json = parse_json("config.json", model_config_json(config));
  const auto set = [&](const char* key, rapidjson::Value value) {
    const auto member = json.FindMember(key);
    if (member != json.MemberEnd()) {
      member->value = std::move(value);
    } else {
      json.AddMember(rapidjson::StringRef(key), std::move(value), json.GetAllocator());
    }
  };
  if (tokenizer.bos_token_id) set("bos_token_id", rapidjson::Value(*tokenizer.bos_token_id));
  if (tokenizer.pad_token_id) set("pad_token_id", rapidjson::Value(*tokenizer.pad_token_id));
  if (dtype == FolderDType::bf16) {
    for (const char* key : {"dtype", "torch_dtype"}) {
      set(key, rapidjson::Value(rapidjson::StringRef("bfloat16")));
    }
  }
  rapidjson::StringBuffer buffer;
  rapidjson::PrettyWriter<rapidjson::StringBuffer> writer(buffer);
  writer.SetIndent(' ', 2);
  json.Accept(writer);
  return std::string(buffer.GetString(), buffer.GetSize()) + "\n";
}

class WeightsConverter {
 public:
  WeightsConverter(const GgufFile& file, const ModelConfig& config, const ConvertOptions& options)
      : file_(file), config_(config), options_(options) {
    for (const ParameterInfo& info : parameter_table(config)) total_ += info.size();
  }

  int64_t parameters() const { return total_; }

  std::vector<TensorPlan> plan() const {
    std::vector<TensorPlan> plan;
    for (const ParameterInfo& info : parameter_table(config_)) {
      plan.push_back(
          {info.name, stored_dtype(source_of(info.name).type, options_.dtype), info.shape});
    }
    return plan;
  }

  FileSum write(const std::string& path) {
    SafetensorsWriter writer(path, plan());
    for (const TensorPlan& tensor : writer.tensors()) copy(tensor, writer);
    return writer.commit();
  }

 private:
  const GgufTensor& source_of(const std::string& parameter) const {
    const GgufTensor* tensor = file_.find_tensor(gguf_name_of(parameter));
    LEEWAY_CHECK(tensor != nullptr, "the tensors were checked");
    return *tensor;
  }

  void copy(const TensorPlan& tensor, SafetensorsWriter& writer) {
    const GgufTensor& source = source_of(tensor.name);
    const bool interleaved = has_interleaved_rows(config_.family, tensor.name);
    const int64_t together = interleaved && source.shape.size() > 1 ? config_.head_dim : 1;
    for_each_piece(source.rows(), source.row_length(), together, [&](int64_t first, int64_t rows) {
      std::vector<float> values(static_cast<size_t>(rows * source.row_length()));
      file_.read_rows(source, first, rows, values);
      check_values(file_, source, first, values);
      if (interleaved) {
        std::vector<float> ordered(values.size());
        deinterleave_heads(values, ordered, config_.head_dim,
                           source.shape.size() > 1 ? source.row_length() : 1);
        values = std::move(ordered);
      }
      std::vector<std::byte> bytes(values.size() * size_of(tensor.dtype));
      quantise(same_type(tensor.dtype), values, bytes);
      writer.write(bytes);
      done_ += static_cast<int64_t>(values.size());
      options_.progress(done_, total_);
    });
  }

  const GgufFile& file_;
  const ModelConfig& config_;
  const ConvertOptions& options_;
  int64_t done_ = 0, total_ = 0;
};

}  // namespace

Conversion convert_gguf_to_folder(const std::string& file_path, const std::string& folder,
                                  const ConvertOptions& options) {
  const GgufFile file(file_path);
  Conversion result;
  ModelConfig config = config_of_gguf(file, result.warnings);
  FolderTokenizer tokenizer;
  const bool has_tokenizer = std::ranges::any_of(
      file.metadata(), [](const auto& entry) { return entry.first.starts_with("tokenizer."); });
  if (options.tokenizer && has_tokenizer) tokenizer = tokenizer_of_gguf(file, config);
  if (options.tokenizer && !has_tokenizer) {
    result.warnings.push_back(
        fmt::format("{}: has no tokenizer: {} takes and gives token ids alone", file_path, folder));
  }
  config.eos_token_id = tokenizer.eos_token_id;

  WeightsConverter weights(file, config, options);
  uint64_t bytes = 0;
  for (const TensorPlan& tensor : weights.plan()) bytes += tensor.byte_size();
  PendingFolder pending(folder, options.overwrite);
  refuse_full_disk(folder, bytes + tokenizer.tokenizer_json.size());
  const auto write = [&](const std::string& name, const std::string& text) {
    if (!text.empty()) result.bytes += write_file_atomically(pending.at(name), text).bytes;
  };
  write("tokenizer.json", tokenizer.tokenizer_json);
  write("tokenizer_config.json", tokenizer.tokenizer_config_json);
  write("generation_config.json", tokenizer.generation_config_json);
  result.bytes += weights.write(pending.at(kWeights)).bytes;
  write("config.json", config_json_of(config, tokenizer, options.dtype));
  pending.commit();

  result.architecture = name_of(config.family);
  result.parameters = weights.parameters();
  for (const GgufTensor& tensor : file.tensors()) ++result.types[name_of(tensor.type)];
  return result;
}

}  // namespace leeway
