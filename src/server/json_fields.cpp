#include "server/json_fields.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

#include "base/utf8.h"
#include "leeway/error.h"
#include "server/api_error.h"

namespace leeway {

JsonFields::JsonFields(const rapidjson::Value& object, std::string path)
    : object_(&object), path_(std::move(path)) {}

const rapidjson::Value* JsonFields::find(const char* key) const {
  const auto found = object_->FindMember(key);
  return found == object_->MemberEnd() || found->value.IsNull() ? nullptr : &found->value;
}

std::vector<std::string> JsonFields::keys() const {
  std::vector<std::string> keys;
  for (const auto& member : object_->GetObject()) {
    keys.emplace_back(member.name.GetString(), member.name.GetStringLength());
  }
  return keys;
}

void JsonFields::refuse(const char* key, const std::string& why) const {
  throw ApiError(400, fmt::format("{}: {}", name(key), why), name(key));
}

std::optional<bool> JsonFields::flag(const char* key) const {
  const rapidjson::Value* value = find(key);
  if (value == nullptr) return {};
  if (!value->IsBool()) refuse(key, "must be true or false");
  return value->GetBool();
}

std::optional<int64_t> JsonFields::integer(const char* key, int64_t least, int64_t most) const {
  const rapidjson::Value* value = find(key);
  if (value == nullptr) return {};
  if (!value->IsInt64() || value->GetInt64() < least || value->GetInt64() > most) {
    refuse(key, fmt::format("must be an integer from {} to {}", least, most));
  }
  return value->GetInt64();
}

std::optional<uint64_t> JsonFields::natural(const char* key) const {
  const rapidjson::Value* value = find(key);
  if (value == nullptr) return {};
  if (!value->IsUint64()) refuse(key, "must be an integer from 0 to 2^64 - 1");
  return value->GetUint64();
}

std::optional<double> JsonFields::number(const char* key) const {
  const rapidjson::Value* value = find(key);
  if (value == nullptr) return {};
  if (!value->IsNumber() || !std::isfinite(value->GetDouble()) ||
      std::abs(value->GetDouble()) > std::numeric_limits<float>::max()) {
    refuse(key, "must be a finite number");
  }
  return value->GetDouble();
}

std::optional<std::string> JsonFields::text(const char* key) const {
  const rapidjson::Value* value = find(key);
  if (value == nullptr) return {};
  if (!value->IsString()) refuse(key, "must be a string");
  return std::string(value->GetString(), value->GetStringLength());
}

std::optional<std::vector<int32_t>> JsonFields::ids(const char* key) const {
  const rapidjson::Value* value = find(key);
  if (value == nullptr) return {};
  return ids_in(*value, name(key));
}

std::optional<std::vector<std::string>> JsonFields::texts(const char* key) const {
  const rapidjson::Value* value = find(key);
  if (value == nullptr) return {};
  if (value->IsString()) return std::vector<std::string>{*text(key)};
  if (!value->IsArray()) refuse(key, "must be a string or a list of strings");
  std::vector<std::string> list;
  for (const rapidjson::Value& item : value->GetArray()) {
    if (!item.IsString()) refuse(key, "must be a string or a list of strings");
    list.emplace_back(item.GetString(), item.GetStringLength());
  }
  return list;
}

std::optional<JsonFields> JsonFields::object(const char* key) const {
  const rapidjson::Value* value = find(key);
  if (value == nullptr) return {};
  if (!value->IsObject()) refuse(key, "must be an object");
  return JsonFields(*value, name(key) + ".");
}

std::vector<int32_t> ids_in(const rapidjson::Value& list, const std::string& name) {
  if (!list.IsArray()) throw ApiError(400, name + ": must be a list of token ids", name);
  std::vector<int32_t> ids;
  ids.reserve(list.Size());
  for (const rapidjson::Value& item : list.GetArray()) {
    if (!item.IsInt()) {
      throw ApiError(400, fmt::format("{}[{}]: must be a token id", name, ids.size()), name);
    }
    ids.push_back(item.GetInt());
  }
  return ids;
}

rapidjson::Document parse_body(std::string_view body) {
  if (body.find_first_not_of(" \t\r\n") == std::string_view::npos) body = "{}";
  if (valid_utf8_prefix(body) != body.size()) throw ApiError(400, "the body is not valid UTF-8");
  try {
    rapidjson::Document document = parse_json("body", body);
    if (!document.IsObject()) throw ApiError(400, "the body must be a JSON object");
    return document;
  } catch (const Error& error) {
    throw ApiError(400, error.what());
  }
}

}  // namespace leeway
