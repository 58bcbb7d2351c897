#include "text/trajectory_json.h"

#include <fmt/format.h>

#include <cmath>
#include <unordered_map>

#include "base/json.h"
#include "leeway/error.h"

namespace leeway {
namespace {

using Json = rapidjson::Value;

// The first of the names that is present: trainers spell these keys differently.
const Json* member(const Json& object, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const auto found = object.FindMember(name);
    if (found != object.MemberEnd() && !found->value.IsNull()) return &found->value;
  }
  return nullptr;
}

std::vector<double> numbers(const Json& json, const char* what) {
  if (!json.IsArray()) throw Error(fmt::format("\"{}\" must be a list of numbers", what));
  std::vector<double> out;
  out.reserve(json.Size());
  for (const Json& item : json.GetArray()) {
    if (item.IsBool()) {
      out.push_back(item.GetBool() ? 1.0 : 0.0);
    } else if (item.IsNumber()) {
      out.push_back(item.GetDouble());
    } else {
      throw Error(fmt::format("\"{}\" must be a list of numbers", what));
    }
  }
  return out;
}

std::vector<int32_t> whole_numbers(const Json& json, const char* what) {
  std::vector<int32_t> out;
  for (double v : numbers(json, what)) {
    if (!(std::abs(v) <= 2147483647.0) || v != std::floor(v)) {
      throw Error(fmt::format("\"{}\" holds {}, not a whole number", what, v));
    }
    out.push_back(static_cast<int32_t>(v));
  }
  return out;
}

std::vector<int32_t> token_ids(const Json& json, const char* what) {
  std::vector<int32_t> out = whole_numbers(json, what);
  for (int32_t id : out) {
    if (id < 0) throw Error(fmt::format("\"{}\" holds {}, not a token id", what, id));
  }
  return out;
}

TrajectoryStep read_step(const Json& json) {
  if (!json.IsObject()) throw Error("a step must be an object");
  TrajectoryStep step;
  const Json* prompt = member(json, {"prompt_ids", "prompt", "prompt_tokens"});
  const Json* completion = member(json, {"completion_ids", "completion", "completion_tokens"});
  if (prompt == nullptr) throw Error("a step has no \"prompt_ids\"");
  if (completion == nullptr) throw Error("a step has no \"completion_ids\"");
  step.prompt = token_ids(*prompt, "prompt_ids");
  step.completion = token_ids(*completion, "completion_ids");
  if (const Json* logprobs = member(json, {"logprobs", "completion_logprobs"})) {
    for (double v : numbers(*logprobs, "logprobs")) {
      if (!std::isfinite(v)) throw Error(fmt::format("\"logprobs\" holds {}", v));
      step.logprobs.push_back(static_cast<float>(v));
    }
  } else {
    step.logprobs.assign(step.completion.size(), 0.0f);
  }
  if (const Json* versions = member(json, {"versions", "completion_versions"})) {
    step.versions = whole_numbers(*versions, "versions");
  }
  if (const Json* mask = member(json, {"mask", "loss_mask", "completion_mask"})) {
    for (double v : numbers(*mask, "mask")) {
      if (v != 0.0 && v != 1.0) throw Error(fmt::format("\"mask\" holds {}, not 0 or 1", v));
      step.loss_mask.push_back(v != 0.0);
    }
  }
  const size_t n = step.completion.size();
  if (step.logprobs.size() != n || (!step.versions.empty() && step.versions.size() != n) ||
      (!step.loss_mask.empty() && step.loss_mask.size() != n)) {
    throw Error(
        fmt::format("a step has {} completion tokens and {} logprobs, {} versions, {} mask "
                    "entries",
                    n, step.logprobs.size(), step.versions.size(), step.loss_mask.size()));
  }
  return step;
}

std::string rollout_of(const Json& json) {
  const Json* rollout = member(json, {"rollout", "rollout_id"});
  if (rollout == nullptr) return "0";
  if (rollout->IsString()) return rollout->GetString();
  if (rollout->IsNumber()) return fmt::format("{}", rollout->GetDouble());
  throw Error("\"rollout\" must be text or a number");
}

}  // namespace

std::vector<NamedTrajectory> parse_trajectories(const std::string& name, std::string_view text) {
  std::vector<NamedTrajectory> out;
  std::unordered_map<std::string, size_t> index;
  size_t line_number = 0;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(text.size(), end + 1));
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    try {
      const rapidjson::Document json = parse_json("step", line);
      if (!json.IsObject()) throw Error("a line must be an object");
      const std::string rollout = rollout_of(json);
      const auto [found, is_new] = index.emplace(rollout, out.size());
      if (is_new) out.push_back({rollout, {}});
      auto& steps = out[found->second].steps;
      if (const Json* list = member(json, {"steps"})) {
        if (!list->IsArray()) throw Error("\"steps\" must be a list");
        for (const Json& step : list->GetArray()) steps.push_back(read_step(step));
      } else {
        steps.push_back(read_step(json));
      }
    } catch (const Error& error) {
      throw Error(fmt::format("{} line {}: {}", name, line_number, error.what()));
    }
  }
  std::erase_if(out, [](const NamedTrajectory& t) { return t.steps.empty(); });
  if (out.empty()) throw Error(fmt::format("{}: contains no steps", name));
  return out;
}

}  // namespace leeway
