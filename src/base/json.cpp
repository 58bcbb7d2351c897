#include "base/json.h"

#include <fmt/format.h>
#include <rapidjson/error/en.h>

#include <algorithm>
#include <cmath>

#include "base/utf8.h"
#include "leeway/error.h"

namespace leeway {

std::string place_in(std::string_view text, size_t offset) {
  size_t line = 1, column = 1;
  for (size_t i = 0; i < offset && i < text.size(); ++i) {
    if (text[i] == '\n') {
      ++line, column = 1;
    } else {
      ++column;
    }
  }
  return fmt::format("line {}, column {}", line, column);
}

std::string json_error_text(int code) {
  return rapidjson::GetParseError_En(static_cast<rapidjson::ParseErrorCode>(code));
}

void refuse_nul(const std::string& name, std::string_view text) {
  // RapidJSON treats a NUL byte as the end of the text.
  const size_t at = text.find('\0');
  if (at != std::string_view::npos) {
    throw Error(fmt::format("{} {}: a NUL byte", name, place_in(text, at)));
  }
}

namespace {

void refuse_depth(const std::string& name, std::string_view text) {
  int depth = 0;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c == '\\') ++i;
      if (c == '"') quoted = false;
    } else if (c == '"') {
      quoted = true;
    } else if (c == '[' || c == '{') {
      if (++depth > kDeepestNesting) {
        throw Error(fmt::format("{} {}: nested more than {} deep", name, place_in(text, i),
                                kDeepestNesting));
      }
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
}

// -?0(.0+)?([eE][+-]?digits)?
bool is_zero(std::string_view token) {
  size_t i = token.starts_with('-') ? 1 : 0;
  const auto skip = [&](auto belongs) {
    const size_t first = i;
    while (i < token.size() && belongs(token[i])) ++i;
    return i > first;
  };
  if (i >= token.size() || token[i++] != '0') return false;
  if (i < token.size() && token[i] == '.') {
    ++i;
    if (!skip([](char c) { return c == '0'; })) return false;
  }
  if (i < token.size() && (token[i] == 'e' || token[i] == 'E')) {
    ++i;
    if (i < token.size() && (token[i] == '+' || token[i] == '-')) ++i;
    if (!skip([](char c) { return c >= '0' && c <= '9'; })) return false;
  }
  return i == token.size();
}

}  // namespace

std::optional<std::string> with_plain_zeros(std::string_view text) {
  std::optional<std::string> copy;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
      continue;
    }
    in_string = c == '"';
    if (c != '-' && (c < '0' || c > '9')) continue;
    const size_t end = std::min(text.find_first_not_of("0123456789.eE+-", i), text.size());
    const std::string_view token = text.substr(i, end - i);
    if (token.size() > 3 && is_zero(token)) {
      if (!copy) copy = std::string(text);
      const size_t digit = i + (c == '-' ? 1 : 0);
      std::fill(copy->begin() + static_cast<std::ptrdiff_t>(digit + 1),
                copy->begin() + static_cast<std::ptrdiff_t>(end), ' ');
    }
    i = end - 1;
  }
  return copy;
}

rapidjson::Document parse_json(const std::string& name, std::string_view text) {
  refuse_nul(name, text);
  refuse_depth(name, text);
  const std::optional<std::string> plain = with_plain_zeros(text);
  if (plain) text = *plain;
  rapidjson::Document document;
  // Parse iteratively, so that a hostile file cannot exhaust our stack.
  constexpr unsigned kFlags = rapidjson::kParseNanAndInfFlag | rapidjson::kParseFullPrecisionFlag |
                              rapidjson::kParseIterativeFlag;
  document.Parse<kFlags>(text.data(), text.size());
  if (document.HasParseError()) {
    throw Error(fmt::format("{} {}: {}", name, place_in(text, document.GetErrorOffset()),
                            json_error_text(document.GetParseError())));
  }
  return document;
}

void JsonWriter::separate() {
  if (needs_comma_) text_ += ", ";
  needs_comma_ = true;
}

JsonWriter& JsonWriter::begin_object() {
  separate();
  text_ += '{';
  needs_comma_ = false;
  return *this;
}
JsonWriter& JsonWriter::end_object() {
  text_ += '}';
  needs_comma_ = true;
  return *this;
}
JsonWriter& JsonWriter::begin_array() {
  separate();
  text_ += '[';
  needs_comma_ = false;
  return *this;
}
JsonWriter& JsonWriter::end_array() {
  text_ += ']';
  needs_comma_ = true;
  return *this;
}
JsonWriter& JsonWriter::key(std::string_view name) {
  value(name);
  text_ += ": ";
  needs_comma_ = false;
  return *this;
}
JsonWriter& JsonWriter::value(double number) {
  if (!std::isfinite(number)) return null();
  separate();
  fmt::format_to(std::back_inserter(text_), "{}", number);
  return *this;
}
JsonWriter& JsonWriter::value(float number) {
  if (!std::isfinite(number)) return null();
  separate();
  fmt::format_to(std::back_inserter(text_), "{}", number);
  return *this;
}
JsonWriter& JsonWriter::value(std::string_view text) {
  if (!raw_text_ && valid_utf8_prefix(text) < text.size()) return value(with_replacements(text));
  separate();
  text_ += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      text_ += '\\';
      text_ += c;
    } else if (c == '\n') {
      text_ += "\\n";
    } else if (c == '\t') {
      text_ += "\\t";
    } else if (c == '\r') {
      text_ += "\\r";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      fmt::format_to(std::back_inserter(text_), "\\u{:04x}", static_cast<unsigned>(c));
    } else {
      text_ += c;
    }
  }
  text_ += '"';
  return *this;
}
JsonWriter& JsonWriter::value(bool flag) {
  separate();
  text_ += flag ? "true" : "false";
  return *this;
}
JsonWriter& JsonWriter::null() {
  separate();
  text_ += "null";
  return *this;
}
JsonWriter& JsonWriter::raw(std::string_view json) {
  separate();
  text_ += json;
  return *this;
}

}  // namespace leeway
