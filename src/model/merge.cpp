#include "model/merge.h"

#include <fmt/format.h>

#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <set>

#include "base/crc32c.h"
#include "base/files.h"
#include "base/folders.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
#include "model/name_text.h"
#include "model/safetensors.h"
#include "model/stored_model.h"

namespace leeway {
namespace {

// Rounds to the nearest, ties to even; numbers beyond the range become infinite.
uint16_t to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

uint16_t to_f16(float value) {
  const auto sign = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16 & 0x8000u);
  const float size = std::abs(value);
  if (!(size < 65520.0f)) return static_cast<uint16_t>(sign | 0x7c00u);
  if (size < 0x1p-14f) {  // subnormal: a multiple of 2^-24
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(size * 0x1p24f)));
  }
  const auto bits = std::bit_cast<uint32_t>(size);
  // The exponent's bias goes from 127 to 15, the mantissa from 23 bits to 10.
  const uint32_t rounded = bits + 0xfffu + ((bits >> 13) & 1u) - (112u << 23);
  return static_cast<uint16_t>(sign | static_cast<uint16_t>(rounded >> 13));
}

template <class T, class Convert>
std::string converted(const std::vector<float>& values, const Convert& convert) {
  std::string bytes(values.size() * sizeof(T), '\0');
  for (size_t i = 0; i < values.size(); ++i) {
    const T value = convert(values[i]);
    std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
  }
  return bytes;
}

std::string as_dtype(const std::vector<float>& values, DType dtype) {
  switch (dtype) {
    case DType::bf16: return converted<uint16_t>(values, to_bf16);
    case DType::f16: return converted<uint16_t>(values, to_f16);
    case DType::f64: return converted<double>(values, [](float v) { return double{v}; });
    default: return converted<float>(values, [](float v) { return v; });
  }
}

// W + scale B A of one matrix, in the base's dtype.
std::string merged_bytes(const StoredTensor& tensor, const std::string& path,
                         const Parameters& adapter, const std::string& module) {
  const float* a = adapter.find(lora_a_name(module));
  const float* b = adapter.find(lora_b_name(module));
  const int64_t outputs = tensor.shape[0], inputs = tensor.shape[1], rank = adapter.lora()->rank;
  const float scale = adapter.lora()->scale();
  std::vector<float> weights(static_cast<size_t>(tensor.size()));
  copy_as_float(tensor, path, weights);
  std::vector<float> update(static_cast<size_t>(inputs));
  for (int64_t o = 0; o < outputs; ++o) {
    std::fill(update.begin(), update.end(), 0.0f);
    for (int64_t r = 0; r < rank; ++r) {
      const float factor = b[o * rank + r];
      const float* from = a + r * inputs;
      for (int64_t j = 0; j < inputs; ++j) update[static_cast<size_t>(j)] += factor * from[j];
    }
    float* row = weights.data() + o * inputs;
    for (int64_t j = 0; j < inputs; ++j) row[j] += scale * update[static_cast<size_t>(j)];
  }
  if (tensor.dtype == DType::f16) {
    for (float& value : weights) {
      if (!(std::abs(value) < 65520.0f)) value = std::numeric_limits<float>::infinity();
    }
  }
  const std::string bad = not_finite_text(tensor.name, tensor.shape, weights);
  if (!bad.empty()) {
    throw Error(
        fmt::format("{}: with the adapter, tensor {} in {}", path, bad, name_of(tensor.dtype)));
  }
  return as_dtype(weights, tensor.dtype);
}

// Files beside the weights that belong to a model; other kinds of weights do not, since the adapter
// is not in them.
bool is_copied(const std::string& name) {
  static const std::set<std::string> not_these = {"checksums.json", "checksum.json",
                                                  "adapter_config.json"};
  if (not_these.contains(name)) return false;
  for (const char* kind : {".json", ".jinja", ".txt", ".model", ".tiktoken"}) {
    if (name.ends_with(kind)) return true;
  }
  return name == "LICENSE";
}

class Merge {
 public:
  Merge(const std::string& base, const std::string& adapter,
        const std::function<void(size_t, size_t)>& progress)
      : base_(base),
        adapter_folder_(adapter),
        progress_(progress),
        config_(checked_config(base)),
        adapter_(load_adapter_matrices(adapter, config_)) {
    check_checksums(base);
    for (const std::string& name : folder_names(base)) {
      if (name.ends_with(".safetensors") && !name.starts_with("adapter_")) {
        files_.emplace_back(base + "/" + name);
      } else if (is_copied(name)) {
        copies_.push_back(name);
      }
    }
    check_matrices();
    check_base();
  }

  uint64_t bytes() const {
    uint64_t sum = 0;
    for (const SafetensorsFile& file : files_) {
      for (const StoredTensor& tensor : file.tensors()) sum += tensor.byte_size();
    }
    return sum;
  }

  MergeResult write(const std::string& folder) {
    FileSums sums;
    for (const SafetensorsFile& file : files_) {
      const std::string name = file.path().substr(base_.size() + 1);
      std::vector<TensorToMake> tensors;
      for (const StoredTensor& tensor : file.tensors()) {
        tensors.push_back({tensor.name, tensor.dtype, tensor.shape,
                           [this, &file, &tensor] { return bytes_of(file, tensor); }});
      }
      sums[name] = write_made_safetensors(folder + "/" + name, tensors);
    }
    for (const std::string& name : copies_) {
      sums[name] = write_file_atomically(folder + "/" + name, read_file(base_ + "/" + name));
    }
    write_checksums(folder, sums);
    result_.bytes = bytes();
    return result_;
  }

 private:
  static ModelConfig checked_config(const std::string& base) {
    if (is_adapter_folder(base)) {
      throw Error(base + ": is an adapter; name its base, the folder of a whole model");
    }
    return load_model_config(base);
  }

  // "model.layers.0.self_attn.q_proj" of a matrix that the adapter has; empty of any other tensor.
  std::string module_of(const StoredTensor& tensor) const {
    constexpr std::string_view kWeight = ".weight";
    if (!tensor.name.ends_with(kWeight)) return "";
    std::string module = tensor.name.substr(0, tensor.name.size() - kWeight.size());
    return adapter_.find(lora_a_name(module)) != nullptr ? module : "";
  }

  // Every matrix of the adapter has one of the base, of the shape that config.json gives it.
  void check_matrices() {
    std::set<std::string> found;
    std::map<std::string, std::vector<int64_t>> shapes;
    for (const ParameterInfo& info : parameter_table(config_)) shapes[info.name] = info.shape;
    for (const SafetensorsFile& file : files_) {
      total_ += file.tensors().size();
      for (const StoredTensor& tensor : file.tensors()) {
        const std::string module = module_of(tensor);
        if (module.empty()) continue;
        if (tensor.shape != shapes[tensor.name]) {
          throw Error(fmt::format("{}: tensor {} is not of the shape that config.json asks for",
                                  file.path(), name_text(tensor.name)));
        }
        found.insert(module);
      }
    }
    for (const ParameterInfo& info : adapter_.table()) {
      const std::string module = info.name.substr(0, info.name.rfind(".lora_"));
      if (!found.contains(module)) {
        throw Error(fmt::format("{}: no weights of {}, which the adapter changes", base_, module));
      }
    }
  }

  // The sum is that of the numbers, as load_adapter takes it: one more pass over the base's files,
  // for adapters that say what they belong to.
  void check_base() const {
    if (!adapter_.lora()->base_sum) return;
    const StoredModel model = open_stored_model(base_);
    check_layout(model, config_);
    std::vector<uint32_t> crcs;
    std::vector<float> values;
    for (const ParameterInfo& info : parameter_table(config_)) {
      const StoredPlace& place = model.tensors.find(info.name)->second;
      values.resize(static_cast<size_t>(info.size()));
      copy_as_float(*place.tensor, *place.path, values);
      crcs.push_back(
          crc32c({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)}));
    }
    check_base_sum(adapter_folder_, *adapter_.lora(), checksum(crcs), base_);
  }

  std::string bytes_of(const SafetensorsFile& file, const StoredTensor& tensor) {
    if (progress_) progress_(static_cast<size_t>(result_.tensors), total_);
    ++result_.tensors;
    const std::string module = module_of(tensor);
    if (module.empty()) return tensor.bytes();
    ++result_.merged;
    return merged_bytes(tensor, file.path(), adapter_, module);
  }

  std::string base_, adapter_folder_;
  const std::function<void(size_t, size_t)>& progress_;
  ModelConfig config_;
  const Parameters adapter_;
  std::vector<SafetensorsFile> files_;
  std::vector<std::string> copies_;
  size_t total_ = 0;
  MergeResult result_;
};

}  // namespace

MergeResult merge_adapter(const std::string& base, const std::string& adapter,
                          const std::string& folder,
                          const std::function<void(size_t done, size_t total)>& progress) {
  std::string out = folder;
  while (out.size() > 1 && out.ends_with('/')) out.pop_back();
  if (path_exists(out) && !(is_folder(out) && folder_names(out).empty())) {
    throw Error(out + ": exists; nothing is overwritten, name another folder");
  }
  Merge merge(base, adapter, progress);
  const std::string temporary = out + ".partial";
  remove_tree(temporary);
  make_folders(temporary);
  try {
    refuse_full_disk(temporary, merge.bytes());
    const MergeResult result = merge.write(temporary);
    if (::rename(temporary.c_str(), out.c_str()) != 0) {
      throw Error(fmt::format("{}: cannot be made: {}", out, std::strerror(errno)));
    }
    return result;
  } catch (const Error&) {
    remove_tree(temporary);
    throw;
  }
}

}  // namespace leeway
