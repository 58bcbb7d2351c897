// From a folder to a GGUF file.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/checked_files.h"
#include "base/files.h"
#include "base/folders.h"
#include "gguf/convert.h"
#include "gguf/dequantise.h"
#include "gguf/gguf_writer.h"
#include "gguf/model_metadata.h"
#include "gguf/row_pieces.h"
#include "gguf/tensor_names.h"
#include "gguf/tokenizer_to_gguf.h"
#include "leeway/error.h"
#include "model/safetensors.h"
#include "model/stored_model.h"

namespace leeway {
namespace {

GgufType matrix_type(GgufMatrices matrices) {
  switch (matrices) {
    case GgufMatrices::bf16: return GgufType::bf16;
    case GgufMatrices::q8_0: return GgufType::q8_0;
    default: return GgufType::f16;
  }
}

// What llama.cpp calls the type of most matrices.
uint32_t file_type_of(GgufMatrices matrices) {
  switch (matrices) {
    case GgufMatrices::bf16: return 32;
    case GgufMatrices::q8_0: return 7;
    default: return 1;
  }
}

// The largest magnitude that rounds to a finite number.
float most_of(GgufType type) {
  constexpr float kMostHalf = 65504.0f;
  if (type == GgufType::f16) return kMostHalf;
  if (type == GgufType::q8_0) return 127.0f * kMostHalf;
  return std::numeric_limits<float>::max();
}

class FolderReader {
 public:
  FolderReader(const StoredModel& model, const ModelConfig& config, const ConvertOptions& options)
      : model_(model), config_(config), options_(options), table_(parameter_table(config)) {
    for (const ParameterInfo& info : table_) total_ += info.size();
  }

  int64_t parameters() const { return total_; }

  std::vector<GgufTensorPlan> plan(std::vector<std::string>& warnings) const {
    std::vector<GgufTensorPlan> plan;
    if (config_.llama3_rope) {
      plan.push_back({kRopeFactors, {config_.head_dim / 2}, GgufType::f32});
    }
    for (const ParameterInfo& info : table_) {
      GgufType type = info.shape.size() > 1 ? matrix_type(options_.type) : GgufType::f32;
      if (info.shape.back() % static_cast<int64_t>(info_of(type).elements) != 0) {
        warnings.push_back(
            fmt::format("{}: its rows of {} do not divide into blocks of {}; it is "
                        "written as F16",
                        info.name, info.shape.back(), name_of(type)));
        type = GgufType::f16;
      }
      plan.push_back({gguf_name_of(info.name), info.shape, type});
    }
    return plan;
  }

  void write(const GgufPlan& plan, GgufWriter& writer) {
    size_t place = 0;
    if (config_.llama3_rope) {
      const std::vector<float> factors = rope_factors_of(config_);
      writer.write(std::as_bytes(std::span(factors)));
      ++place;
    }
    for (const ParameterInfo& info : table_) copy(info, plan.tensors[place++].type, writer);
  }

 private:
  void copy(const ParameterInfo& info, GgufType type, GgufWriter& writer) {
    const StoredPlace& source = model_.tensors.find(info.name)->second;
    const int64_t row_length = info.shape.back();
    const bool interleaved = has_interleaved_rows(config_.family, info.name);
    const bool vector = info.shape.size() == 1;
    const int64_t together = interleaved && !vector ? config_.head_dim : 1;
    for_each_piece(
        info.size() / row_length, row_length, together, [&](int64_t first, int64_t rows) {
          std::vector<float> values = read(source, first * row_length, rows * row_length);
          check(source, type, first * row_length, values);
          if (interleaved) {
            std::vector<float> ordered(values.size());
            interleave_heads(values, ordered, config_.head_dim, vector ? 1 : row_length);
            values = std::move(ordered);
          }
          const GgufTypeInfo& written = info_of(type);
          std::vector<std::byte> bytes(values.size() / written.elements * written.block_bytes);
          quantise(type, values, bytes);
          writer.write(bytes);
          done_ += static_cast<int64_t>(values.size());
          options_.progress(done_, total_);
        });
  }

  std::vector<float> read(const StoredPlace& source, int64_t first, int64_t count) const {
    StoredTensor part = *source.tensor;
    const uint64_t size = size_of(part.dtype);
    part.shape = {count};
    part.begin += static_cast<uint64_t>(first) * size;
    part.end = part.begin + static_cast<uint64_t>(count) * size;
    std::vector<float> values(static_cast<size_t>(count));
    copy_as_float(part, *source.path, values);
    return values;
  }

  static void check(const StoredPlace& source, GgufType type, int64_t first,
                    std::span<const float> values) {
    const float most = most_of(type);
    const auto bad = std::find_if_not(values.begin(), values.end(),
                                      [&](float v) { return std::fabs(v) <= most; });
    if (bad == values.end()) return;
    const size_t index = static_cast<size_t>(first + (bad - values.begin()));
    throw Error(fmt::format("{}: tensor {} holds {} at {}; {}", *source.path, source.tensor->name,
                            *bad, coordinates(source.tensor->shape, index),
                            std::isfinite(*bad)
                                ? fmt::format("{} ends at {}: use --type bf16", name_of(type), most)
                                : std::string("weights must be finite")));
  }

  const StoredModel& model_;
  const ModelConfig& config_;
  const ConvertOptions& options_;
  std::vector<ParameterInfo> table_;
  int64_t done_ = 0, total_ = 0;
};

// The folder's own name.
std::string name_of_folder(std::string folder) {
  while (folder.size() > 1 && folder.ends_with('/')) folder.pop_back();
  return folder.substr(folder.rfind('/') + 1);
}

void check_stored_head(const StoredModel& model, const ModelConfig& config) {
  if (!config.tie_word_embeddings || !model.tensors.contains("lm_head.weight")) return;
  const StoredPlace& place = model.tensors.find("model.embed_tokens.weight")->second;
  std::vector<float> embedding(static_cast<size_t>(place.tensor->size()));
  copy_as_float(*place.tensor, *place.path, embedding);
  check_tied_head(model, embedding);
}

// A folder with a tokenizer of another form has one that is not understood.
bool has_tokenizer(const std::string& folder) {
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt"}) {
    if (is_present(folder + "/" + name)) return true;
  }
  return false;
}

}  // namespace

Conversion convert_folder_to_gguf(const std::string& folder, const std::string& file,
                                  const ConvertOptions& options) {
  if (path_exists(file) && !options.overwrite) {
    throw Error(fmt::format("{}: exists; name another file, or replace it with --overwrite", file));
  }
  const ModelConfig config = load_model_config(folder);
  const StoredModel model = open_stored_model(folder);
  check_checksums(folder);
  check_layout(model, config);
  check_stored_head(model, config);

  Conversion result;
  FolderReader weights(model, config, options);
  GgufPlan plan;
  plan.metadata = gguf_metadata_of(config);
  plan.metadata.emplace_back("general.name", name_of_folder(folder));
  plan.metadata.emplace_back("general.file_type", file_type_of(options.type));
  if (options.type == GgufMatrices::q8_0) {
    plan.metadata.emplace_back("general.quantization_version", uint32_t{2});
  }
  if (options.tokenizer && !has_tokenizer(folder)) {
    result.warnings.push_back(
        fmt::format("{}: has no tokenizer.json: the weights alone are written, and llama.cpp "
                    "serves no model without a tokenizer",
                    folder));
  } else if (options.tokenizer) {
    for (auto& entry : gguf_tokenizer_of(folder, config)) plan.metadata.push_back(std::move(entry));
  }
  plan.tensors = weights.plan(result.warnings);
  const size_t slash = file.rfind('/');
  refuse_full_disk(slash == std::string::npos ? "." : file.substr(0, slash + 1), plan.file_bytes());
  GgufWriter writer(file, plan);
  weights.write(plan, writer);
  result.bytes = writer.commit().bytes;
  result.architecture = name_of(config.family);
  result.parameters = weights.parameters();
  for (const GgufTensorPlan& tensor : plan.tensors) ++result.types[name_of(tensor.type)];
  return result;
}

}  // namespace leeway
