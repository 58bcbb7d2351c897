// JSON as chat templates see it: key order and number spellings are kept, and output matches
// Python's json module and Jinja exactly.
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
  // Null if there is no such member or this is not an object.
  const JsonValue* find(std::string_view key) const;
  void set(std::string_view key, JsonValue value);
  // Python's bool() of the value.
  bool truthy() const;

  static JsonValue of_string(std::string_view text);
};

// The kind's name for error messages: "a string", "an object".
const char* name_of(JsonValue::Kind kind);

// Throws Error "NAME line L, column C: problem", also for nesting deeper than kDeepestJson, a NUL
// byte and half of a surrogate pair.
JsonValue read_json(const std::string& name, std::string_view text);

// `value | tojson` as Hugging Face defines it: ensure_ascii off, nothing escaped for HTML. With an
// indent, one item per line.
std::string to_json(const JsonValue& value, int indent = 0);
std::string to_json(std::string_view text);
// The same with `separators=(',', ':')`.
std::string to_compact_json(const JsonValue& value);

// `value | string`, but lists and objects as JSON: what templates write for arguments.
std::string to_python_text(const JsonValue& value);
// `value | string`: Python's str() of the value.
std::string to_python_repr(const JsonValue& value);

// The raw text of member `key` in the valid JSON object `object`; empty if absent.
std::string_view raw_member(std::string_view object, std::string_view key);

}  // namespace leeway
