#include "generate/folder_settings.h"

#include <fmt/format.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <cmath>
#include <limits>
#include <utility>

#include "base/files.h"
#include "base/json.h"
#include "engine/sampler.h"
#include "leeway/error.h"

namespace leeway {
namespace {

using Json = rapidjson::Value;

std::string text_of(const Json& value) {
  rapidjson::StringBuffer buffer;
  rapidjson::Writer<rapidjson::StringBuffer, rapidjson::UTF8<>, rapidjson::UTF8<>,
                    rapidjson::CrtAllocator,
                    rapidjson::kWriteValidateEncodingFlag | rapidjson::kWriteNanAndInfFlag>
      writer(buffer);
  value.Accept(writer);
  const std::string text(buffer.GetString(), buffer.GetSize());
  return text.size() <= 60 ? text : text.substr(0, 60) + "..";
}

// One JSON object of a file, whose members are checked as they are read.
class SettingsFile {
 public:
  // A file that is not there is an object without members.
  explicit SettingsFile(std::string name) : name_(std::move(name)) {
    if (!is_present(name_)) return;
    json_ = parse_json(name_, read_file(name_));
    if (!json_.IsObject()) throw Error(fmt::format("{}: must be a JSON object", name_));
  }

  const std::string& name() const { return name_; }

  // Absent and null are the same.
  const Json* find(const char* key) const {
    if (!json_.IsObject()) return nullptr;
    const auto member = json_.FindMember(key);
    return member == json_.MemberEnd() || member->value.IsNull() ? nullptr : &member->value;
  }

  [[noreturn]] void refuse(const char* key, const Json& value, const std::string& must) const {
    throw Error(fmt::format("{}: {} = {}: must be {}", name_, key, text_of(value), must));
  }

  std::optional<float> number(const char* key) const {
    const Json* value = find(key);
    if (!value) return std::nullopt;
    if (!value->IsNumber()) refuse(key, *value, "a number");
    return static_cast<float>(value->GetDouble());
  }

  std::optional<int64_t> whole_number(const char* key, int64_t least) const {
    const Json* value = find(key);
    if (!value) return std::nullopt;
    if (!value->IsInt64() || value->GetInt64() < least) {
      refuse(key, *value, fmt::format("a whole number of at least {}", least));
    }
    return value->GetInt64();
  }

  std::optional<bool> flag(const char* key) const {
    const Json* value = find(key);
    if (!value) return std::nullopt;
    if (!value->IsBool()) refuse(key, *value, "true or false");
    return value->GetBool();
  }

  std::vector<int32_t> ids(const char* key) const {
    const Json* value = find(key);
    std::vector<int32_t> ids;
    if (!value) return ids;
    const auto add = [&](const Json& id) {
      if (!id.IsInt() || id.GetInt() < 0) refuse(key, *value, "a token id or a list of them");
      ids.push_back(id.GetInt());
    };
    if (!value->IsArray())
      add(*value);
    else
      for (const Json& id : value->GetArray()) add(id);
    return ids;
  }

  std::string token(const char* key) const {
    const Json* value = find(key);
    if (!value) return "";
    const Json* text = value;
    if (value->IsObject() && value->HasMember("content")) text = &(*value)["content"];
    if (!text->IsString()) refuse(key, *value, "a token, or an object with its \"content\"");
    return {text->GetString(), text->GetStringLength()};
  }

 private:
  std::string name_;
  rapidjson::Document json_;
};

// Member `key` of an object, or null.
const Json* member_of(const Json& value, const char* key) {
  if (!value.IsObject()) return nullptr;
  const auto found = value.FindMember(key);
  return found == value.MemberEnd() ? nullptr : &found->value;
}

// "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": ..}, ..]: the special tokens in front.
void collect_before(const Json& processor, std::vector<std::string>& tokens, int depth) {
  constexpr int kDeepest = 8;
  const Json* parts = member_of(processor, "processors");
  if (parts && parts->IsArray() && depth < kDeepest) {
    for (const Json& part : parts->GetArray()) collect_before(part, tokens, depth + 1);
  }
  const Json* single = member_of(processor, "single");
  if (!single || !single->IsArray()) return;
  for (const Json& piece : single->GetArray()) {
    const Json* special = member_of(piece, "SpecialToken");
    const Json* id = special ? member_of(*special, "id") : nullptr;
    if (!id || !id->IsString()) return;
    tokens.emplace_back(id->GetString(), id->GetStringLength());
  }
}

// Settings of other programs that change what is drawn, and the value that switches each off.
constexpr std::pair<const char*, float> kNotApplied[] = {
    {"repetition_penalty", 1.0f}, {"no_repeat_ngram_size", 0.0f}, {"typical_p", 1.0f},
    {"epsilon_cutoff", 0.0f},     {"eta_cutoff", 0.0f},           {"num_beams", 1.0f}};

}  // namespace

GenerationConfig read_generation_config(const std::string& folder) {
  const SettingsFile file(folder + "/generation_config.json");
  GenerationConfig config;
  config.temperature = file.number("temperature");
  config.top_p = file.number("top_p");
  config.min_p = file.number("min_p");
  config.top_k = file.whole_number("top_k", 0);
  config.max_new_tokens = file.whole_number("max_new_tokens", 1);
  config.eos_token_id = file.ids("eos_token_id");
  for (const auto& [key, off] : kNotApplied) {
    const std::optional<float> value = file.number(key);
    if (value && *value != off) config.not_applied.push_back(fmt::format("{} {}", key, *value));
  }
  SamplingSettings settings;
  settings.temperature = config.temperature.value_or(settings.temperature);
  settings.top_p = config.top_p.value_or(settings.top_p);
  settings.min_p = config.min_p.value_or(settings.min_p);
  try {
    check_sampling(settings);
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}", file.name(), error.what()));
  }
  if (file.flag("do_sample") == false) config.temperature = 0.0f;
  return config;
}

TokenizerConfig read_tokenizer_config(const std::string& folder) {
  const SettingsFile file(folder + "/tokenizer_config.json");
  TokenizerConfig config;
  config.add_bos_token = file.flag("add_bos_token");
  config.bos_token = file.token("bos_token");
  config.eos_token = file.token("eos_token");
  if (config.add_bos_token == true && config.bos_token.empty()) {
    throw Error(fmt::format("{}: add_bos_token = true: there is no bos_token", file.name()));
  }
  return config;
}

std::vector<std::string> tokens_before_text(const std::string& tokenizer_file) {
  const SettingsFile file(tokenizer_file);
  std::vector<std::string> tokens;
  if (const Json* processor = file.find("post_processor")) collect_before(*processor, tokens, 0);
  return tokens;
}

}  // namespace leeway
