// JSON as the chat templates see it: key order kept, numbers as they were written, and written out
// again exactly as Python's json module and Jinja do.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace leeway {

// Deeper JSON is refused, so that nothing here can exhaust the stack.
inline constexpr int kDeepestJson = 100;

struct JsonValue {
  enum class Kind { null, boolean, number, string, array, object };

  Kind kind = Kind::null;
  bool truth = false;
  std::string text;                                        // string: its bytes; number: as written
  std::vector<JsonValue> items;                            // array
  std::vector<std::pair<std::string, JsonValue>> members;  // object; a repeated key keeps its place

  bool is(Kind wanted) const { return kind == wanted; }
  // Null where there is no such member, or where this is no object.
  const JsonValue* find(std::string_view key) const;
  void set(std::string_view key, JsonValue value);
  // What Python's bool() says of it.
  bool truthy() const;

  static JsonValue of_string(std::string_view text);
};

// What the kind is called in messages to the user: "a string", "an object".
const char* name_of(JsonValue::Kind kind);

// Throws Error "NAME line L, column C: what is wrong", and for nesting deeper than kDeepestJson.
JsonValue read_json(const std::string& name, std::string_view text);

// `value | tojson` as Hugging Face defines it: ensure_ascii off, nothing escaped for HTML. With an
// indent, one item a line.
std::string to_json(const JsonValue& value, int indent = 0);
std::string to_json(std::string_view text);

// `value | string`: Python's str() of it.
std::string to_python_text(const JsonValue& value);

// The text of member `key` in `object`, a valid JSON object, as it was written; empty if absent.
std::string_view raw_member(std::string_view object, std::string_view key);

}  // namespace leeway
