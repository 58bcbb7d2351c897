// Reading answers of servers: each function throws Error naming the field that is not as it must
// be.
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "data/sampling.h"
#include "leeway/error.h"

namespace leeway {

inline const rapidjson::Value& field_of(const rapidjson::Value& object, const char* key) {
  if (!object.IsObject()) throw Error(fmt::format("\"{}\" is asked of what is no object", key));
  const auto found = object.FindMember(key);
  if (found == object.MemberEnd()) throw Error(fmt::format("\"{}\" is missing", key));
  return found->value;
}

inline const rapidjson::Value& list_of(const rapidjson::Value& object, const char* key) {
  const rapidjson::Value& list = field_of(object, key);
  if (!list.IsArray()) throw Error(fmt::format("\"{}\" is not a list", key));
  return list;
}

inline std::string text_of_field(const rapidjson::Value& object, const char* key) {
  const rapidjson::Value& text = field_of(object, key);
  if (!text.IsString()) throw Error(fmt::format("\"{}\" is not text", key));
  return {text.GetString(), text.GetStringLength()};
}

inline int64_t integer_of(const rapidjson::Value& value, const char* key) {
  if (!value.IsInt64()) throw Error(fmt::format("\"{}\" has an entry that is no integer", key));
  return value.GetInt64();
}

inline int32_t small_integer_of(const rapidjson::Value& value, const char* key) {
  const int64_t number = integer_of(value, key);
  if (number < INT32_MIN || number > INT32_MAX) {
    throw Error(fmt::format("\"{}\" has the entry {}, beyond 32 bits", key, number));
  }
  return static_cast<int32_t>(number);
}

inline float number_of(const rapidjson::Value& value, const char* key) {
  if (!value.IsNumber()) throw Error(fmt::format("\"{}\" has an entry that is no number", key));
  return static_cast<float>(value.GetDouble());
}

inline std::vector<int32_t> integers_of(const rapidjson::Value& object, const char* key) {
  std::vector<int32_t> out;
  for (const auto& value : list_of(object, key).GetArray()) {
    out.push_back(small_integer_of(value, key));
  }
  return out;
}

inline std::vector<float> numbers_of(const rapidjson::Value& object, const char* key) {
  std::vector<float> out;
  for (const auto& value : list_of(object, key).GetArray()) out.push_back(number_of(value, key));
  return out;
}

// "stop", "length" or "abort" as a Finish.
inline Finish finish_of(const std::string& reason) {
  if (reason == "stop") return Finish::stop;
  if (reason == "length") return Finish::length;
  if (reason == "abort") return Finish::cancelled;
  throw Error(fmt::format("\"finish_reason\" is \"{}\"", reason.substr(0, 40)));
}

// [1,2,3]
inline std::string ids_text(const std::vector<int32_t>& ids) {
  return fmt::format("[{}]", fmt::join(ids, ","));
}

}  // namespace leeway
