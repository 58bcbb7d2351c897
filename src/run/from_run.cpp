#include "run/from_run.h"

#include <fmt/format.h>

#include <charconv>
#include <filesystem>
#include <map>
#include <optional>

#include "base/files.h"
#include "config/given.h"
#include "leeway/error.h"
#include "model/adapter_io.h"
#include "run/policy_card.h"
#include "run/run_identity.h"
#include "trainer/state_files.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

// The newest complete folder of RUN/weights.
std::optional<Checkpoint> newest_weights(const std::string& run, Phase phase) {
  std::optional<Checkpoint> newest;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(run + "/weights", error)) {
    const std::string name = entry.path().filename().string();
    int64_t step = -1;
    const char* end = name.data() + name.size();
    if (!name.starts_with("step_")) continue;
    const auto parsed = std::from_chars(name.data() + 5, end, step);
    if (parsed.ec != std::errc() || parsed.ptr != end || step < 0) continue;
    if (!is_complete_folder(entry.path().string())) continue;
    if (!newest || newest->step < step) newest = {phase, step, entry.path().string()};
  }
  return newest;
}

// The tokenizer for [model] of the new run; empty if the weights folder has it.
std::string tokenizer_of(const RunOrigin& origin, const Config& saved) {
  if (is_adapter_folder(origin.weights)) return saved.run.model.tokenizer;
  const std::optional<PolicyCard> card = read_policy_card(origin.weights);
  if ((card && card->byte) || is_present(origin.weights + "/tokenizer.json")) return "";
  const ModelTable& model = saved.run.model;
  if (!model.tokenizer.empty()) return model.tokenizer;
  return model.path.empty() ? "byte" : model.path + "/tokenizer.json";
}

}  // namespace

RunOrigin origin_of(const std::string& run, bool keep_optimizer) {
  if (!is_present(run + "/config.toml")) {
    throw Error(
        fmt::format("--from {}: there is no {}/config.toml; name the folder of a run", run, run));
  }
  const auto identity = read_identity(run);
  const Phase phase = identity && identity->job == "sft" ? Phase::sft : Phase::rl;
  std::vector<std::string> notes;
  const auto checkpoint =
      CheckpointStore(run, {}, identity).newest(notes, [](const Checkpoint& each) {
        check_state(each.folder);  // numbers that are not finite
      });
  std::string why;
  for (const std::string& note : notes) why += "\n  " + note;
  if (keep_optimizer && !checkpoint) {
    throw Error(
        fmt::format("--from {}: there is no whole checkpoint with the optimizer's moments; leave "
                    "--keep-optimizer out to start with the weights alone{}",
                    run, why));
  }
  const auto weights = newest_weights(run, phase);
  if (!checkpoint && !weights) {
    throw Error(fmt::format("--from {}: the run has no weights yet, neither a checkpoint nor {}{}",
                            run, run + "/weights/step_N", why));
  }
  RunOrigin origin{.run = run};
  if (keep_optimizer) origin.optimizer = checkpoint->folder;
  const auto is_rounded = [](const Checkpoint& of) {
    const auto card = read_policy_card(of.folder);
    return card && card->rounded;
  };
  // For the same step prefer weights/, which also contains the tokenizer, but not fewer digits.
  bool from_weights = !keep_optimizer && weights && (!checkpoint || !weights->before(*checkpoint));
  origin.rounded = from_weights && is_rounded(*weights);
  if (origin.rounded && checkpoint && !checkpoint->before(*weights)) {
    from_weights = origin.rounded = false;
  }
  const Checkpoint& last = from_weights ? *weights : *checkpoint;
  origin.step = last.name();
  origin.weights = last.folder;
  return origin;
}

Config config_from(const Catalog& catalog, const RunOrigin& origin, const std::string& file,
                   const std::vector<std::string>& sets, const std::vector<std::string>& unsets,
                   std::vector<std::string>& notes) {
  const std::string saved_name = origin.run + "/config.toml";
  const Config saved =
      parse_config(catalog, saved_name, read_file(saved_name), {}, ConfigScope::whole);
  const std::string name = file.empty() ? saved_name : file;
  const Config wanted =
      parse_config(catalog, name, read_file(name), sets, ConfigScope::whole, unsets);
  for (const std::string& note : wanted.notes) notes.push_back("note: " + note);
  notes.push_back(fmt::format("starts from {} of {}: {}{}", origin.step, origin.run, origin.weights,
                              origin.optimizer.empty() ? "" : ", with the optimizer's moments"));
  if (origin.rounded) {
    notes.push_back(
        "note: these weights are rounded to bf16; the run had them in float32, and has no "
        "checkpoint of this step");
  }
  if (wanted.run.sft.enabled) {
    notes.push_back(fmt::format("note: [sft] of {} is not repeated", name));
  }
  if (!file.empty() && !wanted.run.model.path.empty()) {
    notes.push_back(fmt::format("note: model.path of {} is not used", name));
  }
  // The same keys except those of the model and of the supervised training.
  Config config = wanted;
  config.effective.clear();
  const std::string tokenizer = !file.empty() && !wanted.run.model.tokenizer.empty()
                                    ? wanted.run.model.tokenizer
                                    : tokenizer_of(origin, saved);
  const bool adapter = is_adapter_folder(origin.weights);
  if (!origin.optimizer.empty() && !adapter && wanted.run.model.lora.enabled) {
    throw Error(fmt::format(
        "--keep-optimizer: {} trained all weights, and its moments do not fit the adapter of "
        "[model.lora]; leave one of the two out",
        origin.run));
  }
  bool placed = false;
  std::map<std::string, std::string> origins;
  for (const EffectiveValue& value : wanted.effective) {
    if (value.key.starts_with("sft.")) continue;
    if (value.key == "trainer.learning_rate" && value.origin.ends_with(", auto")) {
      origins[value.key] = value.origin;  // determined anew, by the origin's model
      continue;
    }
    if (!value.key.starts_with("model.")) {
      config.effective.push_back(value);
      origins[value.key] = value.origin;
      continue;
    }
    if (!std::exchange(placed, true)) {
      const std::string from = "--from " + origin.run;
      const std::string weights = fs::absolute(origin.weights).string();
      config.effective.push_back(
          {"model.path", toml_string(adapter ? saved.run.model.path : weights), from});
      if (!tokenizer.empty()) {
        config.effective.push_back({"model.tokenizer", toml_string(tokenizer), from});
      }
      origins["model.path"] = origins["model.tokenizer"] = origins["model.lora.path"] = from;
    }
    if (value.key == "model.device") {
      config.effective.push_back(value);
      origins[value.key] = value.origin;
      if (adapter) {
        const std::string weights = toml_string(fs::absolute(origin.weights).string());
        config.effective.push_back({"model.lora.path", weights, origins["model.path"]});
      }
    }
    if (value.key.starts_with("model.lora.") && !adapter) {
      config.effective.push_back(value);
      origins[value.key] = value.origin;
    }
  }
  config = parse_config(catalog, name, config_toml(config), {}, ConfigScope::whole);
  for (EffectiveValue& value : config.effective) {
    const auto known = origins.find(value.key);
    value.origin = known == origins.end() ? "default" : known->second;
  }
  return config;
}

}  // namespace leeway
