#include "trainer/state_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <tuple>

#include "base/files.h"
#include "base/json.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
#include "model/safetensors.h"

namespace leeway {
namespace {

constexpr const char* kMoments[] = {"m.", "v."};
constexpr double kLargestCount = 0x1p53;  // whole numbers up to here are doubles

// `squares`: the moment must not contain negative numbers.
void read_moment(const SafetensorsFile& file, const std::string& prefix, bool squares,
                 Parameters& into) {
  for (size_t i = 0; i < into.table().size(); ++i) {
    const ParameterInfo& info = into.table()[i];
    const std::string name = prefix + info.name;
    const StoredTensor* tensor = file.find(name);
    if (tensor == nullptr) throw Error(fmt::format("{}: has no tensor {}", file.path(), name));
    if (tensor->shape != info.shape) {
      throw Error(fmt::format("{}: {} does not have the policy's shape", file.path(), name));
    }
    copy_as_float(*tensor, file.path(), into.of(i));
    for (float value : into.of(i)) {
      if (!std::isfinite(value)) {
        throw Error(fmt::format("{}: {} contains a number that is not finite", file.path(), name));
      }
      if (squares && value < 0.0f) {
        throw Error(fmt::format("{}: {} contains a negative number", file.path(), name));
      }
    }
  }
}

// Whether both have the same parameters in the same roles.
bool same_model(const Parameters& a, const Parameters& b) {
  const auto same = [](const ParameterInfo& x, const ParameterInfo& y) {
    return x.name == y.name && x.shape == y.shape;
  };
  const auto use = [](const ModelConfig& config) {
    return std::tuple(config.family, config.num_attention_heads, config.num_key_value_heads,
                      config.head_dim, config.rms_norm_eps, config.rope_theta, config.llama3_rope);
  };
  const bool adapted = a.lora() != nullptr && b.lora() != nullptr;
  return std::equal(a.table().begin(), a.table().end(), b.table().begin(), b.table().end(), same) &&
         use(a.config()) == use(b.config()) && (!adapted || a.lora()->alpha == b.lora()->alpha);
}

}  // namespace

uint64_t bytes_of(const TrainingState& state) {
  return 3 * sizeof(float) * static_cast<uint64_t>(state.policy.count());
}

std::string not_finite_text(const TrainingState& state) {
  std::string text = not_finite_text(state.policy);
  if (!text.empty()) return text;
  text = not_finite_text(state.optimizer.first_moment());
  if (!text.empty()) return "the first moment of " + text;
  text = not_finite_text(state.optimizer.second_moment());
  return text.empty() ? "" : "the second moment of " + text;
}

FileSums save_state(const std::string& folder, const Parameters& policy, const AdamW& optimizer) {
  FileSums sums = save_parameters(policy, folder);
  std::vector<TensorToSave> tensors;
  const Parameters* moments[] = {&optimizer.first_moment(), &optimizer.second_moment()};
  for (size_t k = 0; k < 2; ++k) {
    for (size_t i = 0; i < policy.table().size(); ++i) {
      const ParameterInfo& info = policy.table()[i];
      tensors.push_back({kMoments[k] + info.name, info.shape, moments[k]->of(i)});
    }
  }
  sums["optimizer.safetensors"] = write_safetensors(folder + "/optimizer.safetensors", tensors);
  JsonWriter json;
  json.begin_object().key("format").value(1.0);
  json.key("optimizer_steps").value(static_cast<double>(optimizer.steps())).end_object();
  sums["trainer.json"] = write_file_atomically(folder + "/trainer.json", json.text() + "\n");
  return sums;
}

namespace {

int64_t read_steps(const std::string& folder) {
  const std::string name = folder + "/trainer.json";
  const auto document = parse_json(name, read_file(name));
  if (!document.IsObject() || !document.HasMember("format") || !document["format"].IsNumber() ||
      document["format"].GetDouble() != 1.0) {
    throw Error(name + ": is not a trainer state in format 1");
  }
  const double steps =
      document.HasMember("optimizer_steps") && document["optimizer_steps"].IsNumber()
          ? document["optimizer_steps"].GetDouble()
          : -1.0;
  if (!(steps >= 0.0 && steps <= kLargestCount) || steps != std::floor(steps)) {
    throw Error(name + ": optimizer_steps is missing or not a count");
  }
  return static_cast<int64_t>(steps);
}

// `wanted`: the model that the state must belong to; null: any. `base`: of an adapter, where the
// caller has it.
TrainingState read_state(const std::string& folder, const Parameters* wanted,
                         const std::shared_ptr<const Parameters>& base = nullptr) {
  const int64_t steps = read_steps(folder);
  Parameters policy = base ? load_adapter(folder, base) : load_parameters(folder);
  if (wanted != nullptr && !same_model(policy, *wanted)) {
    throw Error(fmt::format("{}: contains a different model than the one being trained", folder));
  }
  const SafetensorsFile file(folder + "/optimizer.safetensors");
  AdamW optimizer(policy);
  read_moment(file, kMoments[0], false, optimizer.first_moment());
  read_moment(file, kMoments[1], true, optimizer.second_moment());
  optimizer.set_steps(steps);
  return {std::move(policy), std::move(optimizer)};
}

}  // namespace

void load_state(const std::string& folder, Parameters& policy, AdamW& optimizer) {
  TrainingState state = read_state(folder, &policy, policy.base());
  policy = std::move(state.policy);
  optimizer = std::move(state.optimizer);
}

TrainingState load_state(const std::string& folder) { return read_state(folder, nullptr); }

TrainingState load_state_like(const Parameters& like, const std::string& folder) {
  return read_state(folder, nullptr, like.base());
}

}  // namespace leeway
