// JSON in and out, over RapidJSON. NaN and infinities are read as Python writes them.
#pragma once

#include <rapidjson/document.h>

#include <optional>
#include <string>
#include <string_view>

namespace leeway {

// "line 3, column 14" of a byte offset.
std::string place_in(std::string_view text, size_t offset);

// Lists and objects within one another. Whatever walks a document recurses, so that a hostile file
// must not decide how deep; Python's own reader gives up at about a thousand.
inline constexpr int kDeepestNesting = 100;

// Parses a whole document. Throws Error "NAME line L, column C: what is wrong", and for nesting
// deeper than kDeepestNesting.
rapidjson::Document parse_json(const std::string& name, std::string_view text);

// Throws Error if the text holds a NUL byte: no JSON does.
void refuse_nul(const std::string& name, std::string_view text);

// RapidJSON reads a long zero, such as 0e-30 or what "%.29f" makes of 0, as some other number. If
// the text has any, returns a copy in which they are plain zeros, every other byte at its place;
// otherwise nothing. For texts parsed without `parse_json`, which does this itself.
std::optional<std::string> with_plain_zeros(std::string_view text);

// What RapidJSON says of a parse error, in words.
std::string json_error_text(int code);

// Builds one JSON text, valid UTF-8 whatever it is given: U+FFFD stands for bytes that are not.
// Numbers are written shortest; NaN and infinities become null.
class JsonWriter {
 public:
  // `raw`: bytes stay as they are, for files that only this program reads.
  enum class Text { utf8, raw };
  explicit JsonWriter(Text text = Text::utf8) : raw_text_(text == Text::raw) {}

  JsonWriter& begin_object();
  JsonWriter& end_object();
  JsonWriter& begin_array();
  JsonWriter& end_array();
  JsonWriter& key(std::string_view name);
  JsonWriter& value(double number);
  JsonWriter& value(float number);  // shortest that reads back to the same float
  JsonWriter& value(std::string_view text);
  JsonWriter& value(const char* text) { return value(std::string_view(text)); }
  JsonWriter& value(bool flag);
  JsonWriter& null();
  const std::string& text() const { return text_; }

 private:
  void separate();
  std::string text_;
  bool raw_text_;
  bool needs_comma_ = false;
};

}  // namespace leeway
