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
#include "model/stored_model.h"
#include "trainer/saved_state.h"

namespace leeway {
namespace {

constexpr double kLargestCount = 0x1p53;  // whole numbers up to here are doubles

// Whether both have the same parameters in the same roles.
bool same_model(const StateModel& a, const StateModel& b) {
  const auto same = [](const ParameterInfo& x, const ParameterInfo& y) {
    return x.name == y.name && x.shape == y.shape;
  };
  const auto use = [](const ModelConfig& config) {
    return std::tuple(config.family, config.num_attention_heads, config.num_key_value_heads,
                      config.head_dim, config.rms_norm_eps, config.rope_theta, config.llama3_rope);
  };
  const bool adapted = a.lora != nullptr && b.lora != nullptr;
  return std::equal(a.table.begin(), a.table.end(), b.table.begin(), b.table.end(), same) &&
         use(a.config) == use(b.config) && (!adapted || a.lora->alpha == b.lora->alpha);
}

void require_same(const std::string& folder, const StateModel& found, const StateModel& wanted) {
  if (same_model(found, wanted)) return;
  throw Error(fmt::format("{}: contains a different model than the one being trained", folder));
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

FileSum write_steps(const std::string& folder, int64_t steps) {
  JsonWriter json;
  json.begin_object().key("format").value(1.0);
  json.key("optimizer_steps").value(static_cast<double>(steps)).end_object();
  return write_file_atomically(folder + "/trainer.json", json.text() + "\n");
}

FileSums save_state(const std::string& folder, const Parameters& policy, const AdamW& optimizer) {
  FileSums sums = save_parameters(policy, folder);
  std::vector<TensorToSave> tensors;
  for (const StateKind kind : kMoments) {
    const Parameters& moments =
        kind == StateKind::first_moment ? optimizer.first_moment() : optimizer.second_moment();
    for (size_t i = 0; i < policy.table().size(); ++i) {
      const ParameterInfo& info = policy.table()[i];
      tensors.push_back({stored_name(policy.lora(), kind, info.name), info.shape, moments.of(i)});
    }
  }
  sums["optimizer.safetensors"] = write_safetensors(folder + "/optimizer.safetensors", tensors);
  remove_other_files(folder, kMomentsStem, sums);
  sums["trainer.json"] = write_steps(folder, optimizer.steps());
  return sums;
}

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

namespace {

// `base`: of an adapter, where the caller has it.
Parameters checked(const std::string& folder, const std::shared_ptr<const Parameters>& base) {
  read_steps(folder);
  Parameters policy = base ? load_adapter(folder, base) : load_parameters(folder);
  SavedState(folder, state_model(policy)).check_moments();
  return policy;
}

}  // namespace

void require_same_model(const std::string& folder, const StateModel& wanted) {
  if (wanted.lora != nullptr) {
    const LoraSettings lora = load_lora_settings(folder);
    return require_same(folder, {wanted.config, &lora, lora_table(wanted.config, lora)}, wanted);
  }
  const ModelConfig config = load_model_config(folder);
  require_same(folder, {config, nullptr, parameter_table(config)}, wanted);
}

void load_state(const std::string& folder, Parameters& policy, AdamW& optimizer) {
  const int64_t steps = read_steps(folder);
  Parameters loaded = load_like(policy, folder);
  require_same(folder, state_model(loaded), state_model(policy));
  const SavedState saved(folder, state_model(loaded));
  AdamW state(loaded);
  for (size_t i = 0; i < loaded.table().size(); ++i) {
    const StatePiece whole{i, 0, static_cast<size_t>(loaded.table()[i].size())};
    saved.read(StateKind::first_moment, whole, state.first_moment().of(i));
    saved.read(StateKind::second_moment, whole, state.second_moment().of(i));
  }
  state.set_steps(steps);
  policy = std::move(loaded);
  optimizer = std::move(state);
}

Parameters check_state(const std::string& folder) { return checked(folder, nullptr); }

Parameters check_state_like(const Parameters& like, const std::string& folder) {
  return checked(folder, like.base());
}

}  // namespace leeway
