#include "torch/ops/spec_json.h"

#include <fmt/format.h>

#include <set>

#include "base/json.h"
#include "leeway/error.h"
#include "leeway/presets.h"

namespace leeway {
namespace {

constexpr const char* kName = "spec_json";
constexpr const char* kExample = R"(e.g. {"preset": "icepop", "icepop_ratio_low": 0.5})";

Value value_of(const std::string& key, const rapidjson::Value& json) {
  if (json.IsNull()) return std::monostate();
  if (json.IsBool()) return json.GetBool();
  if (json.IsNumber()) return json.GetDouble();
  if (json.IsString()) return std::string(json.GetString(), json.GetStringLength());
  throw Error(fmt::format("{}: {}: must be a number, text, true or false", kName, key));
}

// Presets and keys never change while the program runs.
const Catalog& catalog() {
  static const Catalog the_catalog;
  return the_catalog;
}

}  // namespace

LossSpec spec_from_json(std::string_view text) {
  const rapidjson::Document document = parse_json(kName, text);
  if (!document.IsObject()) {
    throw Error(fmt::format("{}: must be an object with \"preset\", {}", kName, kExample));
  }
  std::string preset;
  Settings settings;
  std::set<std::string> seen;
  for (const auto& member : document.GetObject()) {
    const std::string key(member.name.GetString(), member.name.GetStringLength());
    if (!seen.insert(key).second) {
      throw Error(fmt::format("{}: \"{}\" occurs twice", kName, key));
    }
    if (key == "preset") {
      if (!member.value.IsString()) {
        throw Error(fmt::format("{}: preset: must be text, {}", kName, kExample));
      }
      preset.assign(member.value.GetString(), member.value.GetStringLength());
      continue;
    }
    settings.push_back({key, value_of(key, member.value), fmt::format("{}: ", kName)});
  }
  if (!seen.contains("preset")) {
    throw Error(fmt::format("{}: has no \"preset\", {}", kName, kExample));
  }
  try {
    return catalog().make_spec(preset, settings);
  } catch (const Error& error) {
    // Settings know their place; the preset's name does not.
    const std::string problem = error.what();
    if (problem.starts_with(kName)) throw;
    throw Error(fmt::format("{}: {}", kName, problem));
  }
}

}  // namespace leeway
