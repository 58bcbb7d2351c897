#include "base/utf8.h"

#include <cstring>

namespace leeway {
namespace {

// What the lead byte implies: the character's length and the range of its second byte, which is
// where overlong forms, surrogates and values past U+10FFFF are detected.
struct Lead {
  size_t length;
  uint8_t second_low, second_high;
};

Lead lead_of(uint8_t byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xC2) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

}  // namespace

Utf8Unit next_utf8(std::string_view text) {
  const auto first = static_cast<uint8_t>(text[0]);
  const Lead lead = lead_of(first);
  if (lead.length == 0) return {Utf8Kind::invalid, 1, 0};
  if (lead.length == 1) return {Utf8Kind::valid, 1, first};
  uint32_t code_point = first & (0x7Fu >> lead.length);
  for (size_t i = 1; i < lead.length; ++i) {
    if (i == text.size()) return {Utf8Kind::incomplete, i, 0};
    const auto byte = static_cast<uint8_t>(text[i]);
    const uint8_t low = i == 1 ? lead.second_low : uint8_t{0x80};
    const uint8_t high = i == 1 ? lead.second_high : uint8_t{0xBF};
    if (byte < low || byte > high) return {Utf8Kind::invalid, i, 0};
    code_point = (code_point << 6) | (byte & 0x3Fu);
  }
  return {Utf8Kind::valid, lead.length, code_point};
}

size_t valid_utf8_prefix(std::string_view text) {
  size_t at = 0;
  while (at < text.size()) {
    uint64_t eight = 0;
    if (text.size() - at >= sizeof(eight)) {
      std::memcpy(&eight, text.data() + at, sizeof(eight));
      if ((eight & 0x8080808080808080u) == 0) {
        at += sizeof(eight);
        continue;
      }
    }
    const Utf8Unit unit = next_utf8(text.substr(at));
    if (unit.kind != Utf8Kind::valid) break;
    at += unit.length;
  }
  return at;
}

void append_utf8(std::string& text, uint32_t code_point) {
  const auto put = [&](uint32_t byte) { text += static_cast<char>(static_cast<uint8_t>(byte)); };
  if (code_point < 0x80) {
    put(code_point);
  } else if (code_point < 0x800) {
    put(0xC0 | (code_point >> 6));
    put(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    put(0xE0 | (code_point >> 12));
    put(0x80 | ((code_point >> 6) & 0x3F));
    put(0x80 | (code_point & 0x3F));
  } else {
    put(0xF0 | (code_point >> 18));
    put(0x80 | ((code_point >> 12) & 0x3F));
    put(0x80 | ((code_point >> 6) & 0x3F));
    put(0x80 | (code_point & 0x3F));
  }
}

std::string with_replacements(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t valid = valid_utf8_prefix(text);
    out += text.substr(0, valid);
    text.remove_prefix(valid);
    if (text.empty()) break;
    append_utf8(out, kReplacementCharacter);
    text.remove_prefix(next_utf8(text).length);
  }
  return out;
}

}  // namespace leeway
