// Reading and writing JSON with RapidJSON. NaN and infinities are accepted as Python writes them.
#pragma once

#include <rapidjson/document.h>

#include <optional>
#include <string>
#include <string_view>

namespace leeway {

// The byte offset as "line 3, column 14".
std::string place_in(std::string_view text, size_t offset);

// How deep lists and objects may nest. Code that walks a document recurses, so a hostile file must
// not choose the depth; Python's own reader gives up at about a thousand.
inline constexpr int kDeepestNesting = 100;

// Parses a whole document. Throws Error "NAME line L, column C: problem", also for nesting deeper
// than kDeepestNesting.
rapidjson::Document parse_json(const std::string& name, std::string_view text);

// Throws Error if the text contains a NUL byte, which is never valid in JSON.
void refuse_nul(const std::string& name, std::string_view text);

// RapidJSON misreads long zeros such as 0e-30, or what "%.29f" prints for 0, as other numbers. If
// the text contains any, returns a copy in which they are plain zeros and every other byte keeps
// its place; otherwise nothing. For texts parsed without `parse_json`, which does this itself.
std::optional<std::string> with_plain_zeros(std::string_view text);

// RapidJSON's description of a parse error.
std::string json_error_text(int code);

// Builds a JSON text that is always valid UTF-8: invalid bytes become U+FFFD. Numbers are written
// in their shortest form; NaN and infinities become null.
class JsonWriter {
 public:
  // `raw` keeps bytes as they are, for files that only this program reads.
  enum class Text { utf8, raw };
  explicit JsonWriter(Text text = Text::utf8) : raw_text_(text == Text::raw) {}

  JsonWriter& begin_object();
  JsonWriter& end_object();
  JsonWriter& begin_array();
  JsonWriter& end_array();
  JsonWriter& key(std::string_view name);
  JsonWriter& value(double number);
  JsonWriter& value(float number);  // shortest form that parses back to the same float
  JsonWriter& value(std::string_view text);
  JsonWriter& value(const char* text) { return value(std::string_view(text)); }
  JsonWriter& value(bool flag);
  JsonWriter& null();
  JsonWriter& raw(std::string_view json);  // a value that is JSON already
  const std::string& text() const { return text_; }

 private:
  void separate();
  std::string text_;
  bool raw_text_;
  bool needs_comma_ = false;
};

}  // namespace leeway
