#include "run/policy_card.h"

#include <filesystem>

#include "base/files.h"
#include "base/json.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr const char* kName = "/leeway.json";
constexpr const char* kThinking = "preserve_all_thinking";
constexpr const char* kBetweenCalls = "preserve_thinking_between_tool_calls";

}  // namespace

FileSum write_policy_card(const std::string& folder, const PolicyCard& card) {
  JsonWriter json;
  json.begin_object().key("format").value(1.0);
  json.key("tokenizer").value(card.byte ? "byte" : "tokenizer.json");
  if (card.byte) {
    json.key("control_tokens").begin_array();
    for (const std::string& token : card.control_tokens) json.value(token);
    json.end_array();
  }
  if (!card.renderer.name.empty()) {
    json.key("renderer").begin_object().key("name").value(card.renderer.name);
    json.key(kThinking).value(card.renderer.preserve_all_thinking);
    json.key(kBetweenCalls).value(card.renderer.preserve_thinking_between_tool_calls);
    json.end_object();
  }
  if (card.rounded) json.key("rounded").value(true);
  return write_file_atomically(folder + kName, json.end_object().text() + "\n");
}

std::optional<PolicyCard> read_policy_card(const std::string& folder) {
  const std::string name = folder + kName;
  std::error_code ignored;
  if (!std::filesystem::exists(name, ignored)) return std::nullopt;
  const rapidjson::Document json = parse_json(name, read_file(name));
  const auto refuse = [&](const char* key) {
    throw Error(name + ": \"" + key + "\" is missing or invalid");
  };
  PolicyCard card;
  if (!json.IsObject() || !json.HasMember("tokenizer") || !json["tokenizer"].IsString()) {
    refuse("tokenizer");
  }
  const std::string tokenizer = json["tokenizer"].GetString();
  card.byte = tokenizer == "byte";
  if (!card.byte && tokenizer != "tokenizer.json") refuse("tokenizer");
  if (card.byte) {
    if (!json.HasMember("control_tokens") || !json["control_tokens"].IsArray()) {
      refuse("control_tokens");
    }
    for (const auto& token : json["control_tokens"].GetArray()) {
      if (!token.IsString()) refuse("control_tokens");
      card.control_tokens.emplace_back(token.GetString());
    }
  }
  if (json.HasMember("renderer")) {
    const rapidjson::Value& renderer = json["renderer"];
    if (!renderer.IsObject() || !renderer.HasMember("name") || !renderer["name"].IsString()) {
      refuse("renderer");
    }
    const auto flag = [&](const char* key) {
      if (!renderer.HasMember(key) || !renderer[key].IsBool()) refuse(key);
      return renderer[key].GetBool();
    };
    card.renderer.name = renderer["name"].GetString();
    card.renderer.preserve_all_thinking = flag(kThinking);
    card.renderer.preserve_thinking_between_tool_calls = flag(kBetweenCalls);
    card.renderer.where = name + ": renderer.";
  }
  if (json.HasMember("rounded")) {
    if (!json["rounded"].IsBool()) refuse("rounded");
    card.rounded = json["rounded"].GetBool();
  }
  return card;
}

}  // namespace leeway
