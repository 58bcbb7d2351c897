// Members of a request's JSON body, read strictly: a value of another type is refused by name.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"

namespace leeway {

// A view of one object; the document must outlive it. Null counts as absent everywhere. All
// functions throw ApiError 400 with the key for a value of another type or out of range.
class JsonFields {
 public:
  // `path`: what stands before a key in messages, such as "sampling_params."; may be empty.
  JsonFields(const rapidjson::Value& object, std::string path);

  const rapidjson::Value* find(const char* key) const;  // null if absent
  std::vector<std::string> keys() const;                // those that are there, null or not
  bool has(const char* key) const { return find(key) != nullptr; }

  std::optional<bool> flag(const char* key) const;
  std::optional<int64_t> integer(const char* key, int64_t least, int64_t most) const;
  std::optional<uint64_t> natural(const char* key) const;
  std::optional<double> number(const char* key) const;  // finite
  std::optional<std::string> text(const char* key) const;
  std::optional<std::vector<int32_t>> ids(const char* key) const;
  std::optional<std::vector<std::string>> texts(const char* key) const;  // a string or a list
  std::optional<JsonFields> object(const char* key) const;

  std::string name(const char* key) const { return path_ + key; }
  [[noreturn]] void refuse(const char* key, const std::string& why) const;

 private:
  const rapidjson::Value* object_;
  std::string path_;
};

// The list of token ids in a value; `name` for messages.
std::vector<int32_t> ids_in(const rapidjson::Value& list, const std::string& name);

// Parses a body that must be an object; an empty body counts as {}. Throws ApiError 400.
rapidjson::Document parse_body(std::string_view body);

}  // namespace leeway
