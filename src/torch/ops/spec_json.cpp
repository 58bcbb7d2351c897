#include "torch/ops/spec_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <set>

#include "base/json.h"
#include "core/spec_text.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr const char* kName = "spec_json";
constexpr const char* kExample = R"(e.g. {"preset": "icepop", "icepop_ratio_low": 0.5})";

struct Known {
  std::mutex mutex;
  std::shared_ptr<const Catalog> catalog = std::make_shared<const Catalog>();
  int64_t generation = 0;
};

Known& known() {
  static Known the_known;
  return the_known;
}

// Stands for what the caller computes until it is bound to a batch.
[[noreturn]] void refuse_unbound(const std::string& name) {
  throw Error(fmt::format(
      "correction {} is computed by the caller: give correction_weights or correction_mask", name));
}

const char* const kCallers = "this process";

std::string text_in(const rapidjson::Value& object, const char* key) {
  const auto found = object.FindMember(key);
  if (found == object.MemberEnd() || !found->value.IsString()) {
    throw Error(fmt::format("corrections: \"{}\" must be text", key));
  }
  return {found->value.GetString(), found->value.GetStringLength()};
}

const rapidjson::Value& list_in(const rapidjson::Value& object, const char* key) {
  const auto found = object.FindMember(key);
  if (found == object.MemberEnd() || !found->value.IsArray()) {
    throw Error(fmt::format("corrections: \"{}\" must be a list", key));
  }
  return found->value;
}

// A default that is a number has numbers as values, "off" numbers or "off", and a list of texts one
// of them, the first by default.
KeyInfo key_from(const rapidjson::Value& json) {
  if (!json.IsObject()) throw Error("corrections: keys are objects");
  KeyInfo key;
  key.name = text_in(json, "name");
  key.meaning = text_in(json, "meaning");
  const auto found = json.FindMember("default");
  if (found == json.MemberEnd()) throw Error(fmt::format("key {}: has no default", key.name));
  const rapidjson::Value& value = found->value;
  if (value.IsNumber()) {
    key.default_value = number_text(value.GetDouble());
    const auto low = json.FindMember("low"), high = json.FindMember("high");
    if (low != json.MemberEnd() && low->value.IsNumber()) key.range.low = low->value.GetDouble();
    if (high != json.MemberEnd() && high->value.IsNumber())
      key.range.high = high->value.GetDouble();
    return key;
  }
  if (value.IsString() && std::string_view(value.GetString()) == "off") {
    key.type = KeyType::number_or_off;
    key.default_value = "off";
    return key;
  }
  key.type = KeyType::choice;
  if (value.IsArray()) {
    for (const auto& choice : value.GetArray()) {
      if (choice.IsString()) key.choices.emplace_back(choice.GetString());
    }
  }
  if (key.choices.empty()) {
    throw Error(fmt::format("key {}: its default must be a number, \"off\" or a list of choices",
                            key.name));
  }
  key.default_value = key.choices.front();
  return key;
}

Stream stream_named(const std::string& name) {
  for (int k = 0; k < kStreamCount; ++k) {
    if (name == name_of(static_cast<Stream>(k))) return static_cast<Stream>(k);
  }
  throw Error(
      fmt::format("corrections: there is no stream \"{}\"; there are pi, prox, rollout, "
                  "ref and teacher",
                  name));
}

CorrectionInfo correction_from(const rapidjson::Value& json) {
  if (!json.IsObject()) throw Error("corrections: must be a list of objects");
  CorrectionInfo info;
  info.name = text_in(json, "name");
  info.origin = kCallers;
  info.summary = text_in(json, "summary");
  for (const auto& key : list_in(json, "keys").GetArray()) info.keys.push_back(key_from(key));
  Correction correction;
  correction.name = info.name;
  correction.formula = text_in(json, "formula");
  for (const auto& read : list_in(json, "reads").GetArray()) {
    correction.reads.push_back(stream_named(read.IsString() ? read.GetString() : ""));
  }
  const auto unbound = [name = info.name](const auto&, auto) { refuse_unbound(name); };
  correction.apply_double = unbound;
  correction.apply_float = unbound;
  info.build = [correction](const KeyValues&) { return correction; };
  return info;
}

}  // namespace

Value value_from_json(const char* where, const std::string& key, const rapidjson::Value& json) {
  if (json.IsNull()) return std::monostate();
  if (json.IsBool()) return json.GetBool();
  if (json.IsNumber()) return json.GetDouble();
  if (json.IsString()) return std::string(json.GetString(), json.GetStringLength());
  throw Error(fmt::format("{}: {}: must be a number, text, true or false", where, key));
}

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
    settings.push_back(
        {key, value_from_json(kName, key, member.value), fmt::format("{}: ", kName)});
  }
  if (!seen.contains("preset")) {
    throw Error(fmt::format("{}: has no \"preset\", {}", kName, kExample));
  }
  try {
    return current_catalog()->make_spec(preset, settings);
  } catch (const Error& error) {
    // Settings know their place; the preset's name does not.
    const std::string problem = error.what();
    if (problem.starts_with(kName)) throw;
    throw Error(fmt::format("{}: {}", kName, problem));
  }
}

std::shared_ptr<const Catalog> current_catalog() {
  const std::lock_guard lock(known().mutex);
  return known().catalog;
}

int64_t catalog_generation() {
  const std::lock_guard lock(known().mutex);
  return known().generation;
}

void set_caller_corrections(std::string_view text) {
  const rapidjson::Document document = parse_json("corrections", text);
  if (!document.IsArray()) throw Error("corrections: must be a list");
  const auto catalog = std::make_shared<Catalog>();
  for (const auto& json : document.GetArray()) catalog->add(correction_from(json));
  const std::lock_guard lock(known().mutex);
  known().catalog = catalog;
  ++known().generation;
}

bool is_callers(const std::string& name) {
  const std::shared_ptr<const Catalog> catalog = current_catalog();
  return std::any_of(
      catalog->corrections().begin(), catalog->corrections().end(),
      [&](const CorrectionInfo& c) { return c.origin == kCallers && c.name == name; });
}

void check_given(const LossSpec& spec, bool given) {
  const auto found =
      std::find_if(spec.corrections.begin(), spec.corrections.end(),
                   [](const Correction& correction) { return is_callers(correction); });
  if (found != spec.corrections.end() && !given) {
    throw Error(fmt::format(
        "preset {}: its correction {} is computed by the caller: give correction_weights or "
        "correction_mask, or call it through the Python package",
        spec.preset, found->name));
  }
  if (found == spec.corrections.end() && given) {
    throw Error(fmt::format(
        "preset {}: correction_weights and correction_mask are for a correction that the caller "
        "computes; it has none",
        spec.preset));
  }
}

LossSpec without_callers(const LossSpec& spec) {
  LossSpec rest = spec;
  std::erase_if(rest.corrections,
                [](const Correction& correction) { return is_callers(correction); });
  return rest;
}

template <class T>
void bind_corrections(LossSpec& spec, const T* first, std::span<const T> weights,
                      std::span<const uint8_t> mask) {
  // Products are given, so that one of several carries them and the others do nothing.
  bool bound = false;
  for (Correction& correction : spec.corrections) {
    if (!is_callers(correction)) continue;
    const auto none = std::span<const T>();
    correction = bound_correction<T>(correction, first, bound ? none : weights,
                                     bound ? std::span<const uint8_t>() : mask);
    bound = true;
  }
}

template void bind_corrections(LossSpec&, const float*, std::span<const float>,
                               std::span<const uint8_t>);
template void bind_corrections(LossSpec&, const double*, std::span<const double>,
                               std::span<const uint8_t>);

}  // namespace leeway
