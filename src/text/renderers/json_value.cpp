#include "text/renderers/json_value.h"

#include <fmt/format.h>
#include <rapidjson/encodedstream.h>
#include <rapidjson/memorystream.h>
#include <rapidjson/reader.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <unordered_map>

#include "base/json.h"
#include "leeway/error.h"

namespace leeway {
namespace {

// Builds a JsonValue from RapidJSON's events; returning false stops the reader.
class Events {
 public:
  bool too_deep() const { return too_deep_; }
  JsonValue take() { return std::move(root_); }

  bool Null() { return add({}); }
  bool Bool(bool truth) { return add({.kind = JsonValue::Kind::boolean, .truth = truth}); }
  bool RawNumber(const char* text, rapidjson::SizeType size, bool) {
    return add({.kind = JsonValue::Kind::number, .text = std::string(text, size)});
  }
  bool String(const char* text, rapidjson::SizeType size, bool) {
    return add(JsonValue::of_string({text, size}));
  }
  bool StartObject() { return open(JsonValue::Kind::object); }
  bool StartArray() { return open(JsonValue::Kind::array); }
  bool Key(const char* text, rapidjson::SizeType size, bool) {
    open_.back().key.assign(text, size);
    return true;
  }
  bool EndObject(rapidjson::SizeType) { return close(); }
  bool EndArray(rapidjson::SizeType) { return close(); }
  // Numbers arrive as text, except NaN and the infinities.
  bool Int(int) { return false; }
  bool Uint(unsigned) { return false; }
  bool Int64(int64_t) { return false; }
  bool Uint64(uint64_t) { return false; }
  bool Double(double value) {
    return add({.kind = JsonValue::Kind::number, .text = fmt::format("{}", value)});
  }

 private:
  struct Open {
    JsonValue value;
    std::string key;                               // of the next member
    std::unordered_map<std::string, size_t> seen;  // index of each key, so that lookups stay fast
  };

  static void add_member(Open& open, JsonValue value) {
    auto& members = open.value.members;
    const auto [at, is_new] = open.seen.emplace(open.key, members.size());
    if (is_new) {
      members.emplace_back(open.key, std::move(value));
    } else {
      members[at->second].second = std::move(value);
    }
  }

  bool add(JsonValue value) {
    if (open_.empty()) {
      root_ = std::move(value);
    } else if (open_.back().value.is(JsonValue::Kind::array)) {
      open_.back().value.items.push_back(std::move(value));
    } else {
      add_member(open_.back(), std::move(value));
    }
    return true;
  }
  bool open(JsonValue::Kind kind) {
    too_deep_ = open_.size() >= kDeepestJson;
    if (!too_deep_) open_.push_back({.value = {.kind = kind}, .key = {}, .seen = {}});
    return !too_deep_;
  }
  bool close() {
    JsonValue done = std::move(open_.back().value);
    open_.pop_back();
    return add(std::move(done));
  }

  std::vector<Open> open_;
  JsonValue root_;
  bool too_deep_ = false;
};

bool is_integer(std::string_view number) {
  return number.find_first_not_of("-0123456789") == std::string_view::npos;
}

// Python's repr() of a float: shortest digits, always with a decimal point or an exponent.
std::string float_text(double value) {
  std::string text = fmt::format("{}", value);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

std::string number_text(const std::string& written, bool as_json) {
  if (is_integer(written)) return written == "-0" ? "0" : written;
  const double value = std::strtod(written.c_str(), nullptr);
  const char* sign = std::signbit(value) ? "-" : "";
  if (std::isnan(value)) return as_json ? "NaN" : "nan";
  if (std::isinf(value)) return fmt::format("{}{}", sign, as_json ? "Infinity" : "inf");
  return float_text(value);
}

void write_string(std::string& out, std::string_view text) {
  out += '"';
  for (const char c : text) {
    switch (c) {
      case '"': out += "\\\""; break;
      case '\\': out += "\\\\"; break;
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      case '\f': out += "\\f"; break;
      case '\b': out += "\\b"; break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          out += fmt::format("\\u{:04x}", static_cast<unsigned>(c));
        } else {
          out += c;
        }
    }
  }
  out += '"';
}

constexpr int kCompact = -1;  // in place of an indent: no spaces at all

void write(std::string& out, const JsonValue& value, int indent, int depth) {
  const auto next_item = [&](bool first, int at) {
    if (!first) out += indent == 0 ? ", " : ",";
    if (indent > 0) out += '\n' + std::string(static_cast<size_t>(indent * at), ' ');
  };
  switch (value.kind) {
    case JsonValue::Kind::null: out += "null"; return;
    case JsonValue::Kind::boolean: out += value.truth ? "true" : "false"; return;
    case JsonValue::Kind::number: out += number_text(value.text, true); return;
    case JsonValue::Kind::string: write_string(out, value.text); return;
    case JsonValue::Kind::array:
      out += '[';
      for (size_t i = 0; i < value.items.size(); ++i) {
        next_item(i == 0, depth + 1);
        write(out, value.items[i], indent, depth + 1);
      }
      if (!value.items.empty() && indent > 0) next_item(true, depth);
      out += ']';
      return;
    case JsonValue::Kind::object:
      out += '{';
      for (size_t i = 0; i < value.members.size(); ++i) {
        next_item(i == 0, depth + 1);
        write_string(out, value.members[i].first);
        out += indent == kCompact ? ":" : ": ";
        write(out, value.members[i].second, indent, depth + 1);
      }
      if (!value.members.empty() && indent > 0) next_item(true, depth);
      out += '}';
      return;
  }
}

// Python's repr() of a string: single quotes, unless only those are inside.
void write_repr(std::string& out, std::string_view text) {
  const bool has_single = text.find('\'') != std::string_view::npos;
  const char quote = has_single && text.find('"') == std::string_view::npos ? '"' : '\'';
  out += quote;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    switch (c) {
      case '\n': out += "\\n"; break;
      case '\r': out += "\\r"; break;
      case '\t': out += "\\t"; break;
      case '\\': out += "\\\\"; break;
      default:
        if (c == quote) out += '\\';
        out += byte < 0x20 || byte == 0x7f ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
    }
  }
  out += quote;
}

// Python's repr() of a value; str() is the same, except for a string.
void write_repr(std::string& out, const JsonValue& value) {
  if (value.is(JsonValue::Kind::string)) return write_repr(out, std::string_view(value.text));
  if (value.is(JsonValue::Kind::array)) {
    out += '[';
    for (const JsonValue& item : value.items) {
      if (&item != &value.items.front()) out += ", ";
      write_repr(out, item);
    }
    out += ']';
  } else if (value.is(JsonValue::Kind::object)) {
    out += '{';
    for (const auto& member : value.members) {
      if (&member != &value.members.front()) out += ", ";
      write_repr(out, std::string_view(member.first));
      out += ": ";
      write_repr(out, member.second);
    }
    out += '}';
  } else {
    out += to_python_text(value);
  }
}

// The code of the escape \uXXXX at `at`, or nothing.
std::optional<unsigned> unicode_escape(std::string_view text, size_t at) {
  unsigned code = 0;
  const std::string_view digits = text.size() >= at + 6 ? text.substr(at + 2, 4) : "";
  const auto read = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
  const bool whole = !digits.empty() && read.ptr == digits.data() + digits.size();
  if (!whole || text.substr(at, 2) != "\\u") return std::nullopt;
  return code;
}

// RapidJSON refuses the first half of a surrogate pair without the second, but makes bytes that are
// not UTF-8 of the second without the first.
void refuse_lone_low_surrogates(const std::string& name, std::string_view text) {
  const auto is_low = [](unsigned code) { return code >= 0xDC00 && code <= 0xDFFF; };
  for (size_t at = text.find('\\'); at < text.size(); at = text.find('\\', at)) {
    const std::optional<unsigned> code = unicode_escape(text, at);
    if (code && is_low(*code)) {
      throw Error(fmt::format("{} {}: the second half of a surrogate pair stands alone", name,
                              place_in(text, at)));
    }
    at += !code ? 2 : *code >= 0xD800 && *code <= 0xDBFF ? 12 : 6;
  }
}

// The end of the JSON value that starts at `at`, in text known to be valid.
size_t end_of_value(std::string_view text, size_t at) {
  int depth = 0;
  for (; at < text.size(); ++at) {
    const char c = text[at];
    if (c == '"') {
      for (++at; at < text.size() && text[at] != '"'; ++at) at += text[at] == '\\';
      if (depth == 0) return std::min(at + 1, text.size());
    } else if (c == '{' || c == '[') {
      ++depth;
    } else if (c == '}' || c == ']') {
      if (depth == 0) return at;
      if (--depth == 0) return at + 1;
    } else if (depth == 0 && (c == ',' || c == ' ' || c == '\n' || c == '\t' || c == '\r')) {
      return at;
    }
  }
  return at;
}

}  // namespace

const JsonValue* JsonValue::find(std::string_view key) const {
  for (const auto& [name, value] : members) {
    if (name == key) return &value;
  }
  return nullptr;
}

void JsonValue::set(std::string_view key, JsonValue value) {
  for (auto& [name, old] : members) {
    if (name == key) {
      old = std::move(value);
      return;
    }
  }
  members.emplace_back(key, std::move(value));
}

bool JsonValue::truthy() const {
  switch (kind) {
    case Kind::null: return false;
    case Kind::boolean: return truth;
    case Kind::number: return std::strtod(text.c_str(), nullptr) != 0.0;
    case Kind::string: return !text.empty();
    case Kind::array: return !items.empty();
    case Kind::object: return !members.empty();
  }
  return false;
}

JsonValue JsonValue::of_string(std::string_view text) {
  return {.kind = Kind::string, .text = std::string(text)};
}

const char* name_of(JsonValue::Kind kind) {
  switch (kind) {
    case JsonValue::Kind::null: return "null";
    case JsonValue::Kind::boolean: return "a boolean";
    case JsonValue::Kind::number: return "a number";
    case JsonValue::Kind::string: return "a string";
    case JsonValue::Kind::array: return "a list";
    case JsonValue::Kind::object: return "an object";
  }
  return "";
}

JsonValue read_json(const std::string& name, std::string_view text) {
  refuse_nul(name, text);
  refuse_lone_low_surrogates(name, text);
  constexpr unsigned kFlags = rapidjson::kParseNanAndInfFlag | rapidjson::kParseIterativeFlag |
                              rapidjson::kParseNumbersAsStringsFlag;
  rapidjson::MemoryStream memory(text.data(), text.size());
  rapidjson::EncodedInputStream<rapidjson::UTF8<>, rapidjson::MemoryStream> stream(memory);
  rapidjson::Reader reader;
  Events events;
  const rapidjson::ParseResult result = reader.Parse<kFlags>(stream, events);
  if (events.too_deep()) {
    throw Error(fmt::format("{} {}: nested deeper than {} levels", name,
                            place_in(text, result.Offset()), kDeepestJson));
  }
  if (result.IsError()) {
    throw Error(fmt::format("{} {}: {}", name, place_in(text, result.Offset()),
                            json_error_text(result.Code())));
  }
  return events.take();
}

std::string to_json(const JsonValue& value, int indent) {
  std::string out;
  write(out, value, indent, 0);
  return out;
}

std::string to_compact_json(const JsonValue& value) {
  std::string out;
  write(out, value, kCompact, 0);
  return out;
}

std::string to_json(std::string_view text) {
  std::string out;
  write_string(out, text);
  return out;
}

std::string to_python_text(const JsonValue& value) {
  switch (value.kind) {
    case JsonValue::Kind::null: return "None";
    case JsonValue::Kind::boolean: return value.truth ? "True" : "False";
    case JsonValue::Kind::number: return number_text(value.text, false);
    case JsonValue::Kind::string: return value.text;
    default: return to_json(value);
  }
}

std::string to_python_repr(const JsonValue& value) {
  if (!value.is(JsonValue::Kind::array) && !value.is(JsonValue::Kind::object)) {
    return to_python_text(value);
  }
  std::string out;
  write_repr(out, value);
  return out;
}

std::string_view raw_member(std::string_view object, std::string_view key) {
  const auto skip = [&](size_t at) {
    const size_t next = object.find_first_not_of(" \n\r\t,:", at);
    return next == std::string_view::npos ? object.size() : next;
  };
  std::string_view found;
  const std::string quoted = to_json(key);
  for (size_t at = skip(object.find('{') + 1); at < object.size() && object[at] == '"';) {
    const size_t key_end = end_of_value(object, at);
    const size_t start = skip(key_end);
    const size_t end = end_of_value(object, start);
    if (object.substr(at, key_end - at) == quoted) found = object.substr(start, end - start);
    at = skip(end);
  }
  return found;
}

}  // namespace leeway
