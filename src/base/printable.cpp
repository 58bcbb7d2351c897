#include "base/printable.h"

#include <fmt/format.h>

#include <cstdint>
#include <optional>

namespace leeway {
namespace {

struct Character {
  uint32_t code;
  size_t bytes;
};

// The first character of a nonempty text, or nothing if it does not begin with a valid one.
std::optional<Character> first_character(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) return Character{lead, 1};
  const size_t bytes = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < bytes) return std::nullopt;
  uint32_t code = lead & (0x7fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return std::nullopt;
    code = code << 6 | (byte(i) & 0x3fu);
  }
  const uint32_t smallest = bytes == 4 ? 0x10000 : bytes == 3 ? 0x800 : 0x80;
  const bool surrogate = code >= 0xd800 && code < 0xe000;
  if (code < smallest || code > 0x10ffff || surrogate) return std::nullopt;
  return Character{code, bytes};
}

bool steers(uint32_t code) {
  if (code == '\n' || code == '\t') return false;
  return code < 0x20 || (code >= 0x7f && code <= 0x9f) ||      // C0, DEL, C1
         code == 0x61c || code == 0x200e || code == 0x200f ||  // direction marks
         (code >= 0x2028 && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069);
}

}  // namespace

std::string printable(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const auto character = first_character(text);
    const size_t bytes = character ? character->bytes : 1;
    if (!character) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(text[0]));
    } else if (steers(character->code)) {
      out += fmt::format("\\u{:04x}", character->code);
    } else {
      out += text.substr(0, bytes);
    }
    text.remove_prefix(bytes);
  }
  return out;
}

std::string fitting(std::string text, size_t columns) {
  constexpr std::string_view kMore = "...";
  size_t characters = 0, cut = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xc0) == 0x80) continue;  // goes on a character
    if (characters + kMore.size() <= columns) cut = i;
    if (++characters > columns) return text.substr(0, cut).append(kMore.substr(0, columns));
  }
  return text;
}

}  // namespace leeway
