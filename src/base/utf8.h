// Decoding UTF-8 one character at a time, and making text valid.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace leeway {

inline constexpr uint32_t kReplacementCharacter = 0xFFFD;  // replaces bytes that are not UTF-8

enum class Utf8Kind {
  valid,
  invalid,     // no continuation would make these bytes a character
  incomplete,  // the text ends inside a sequence that could still become a character
};

struct Utf8Unit {
  Utf8Kind kind;
  size_t length;        // of the character, or of the bytes replaced by one U+FFFD
  uint32_t code_point;  // 0 unless valid
};

// Decodes the first character of a nonempty text. Surrogates, overlong forms and anything past
// U+10FFFF are invalid.
Utf8Unit next_utf8(std::string_view text);

// The number of leading bytes that form whole, valid characters.
size_t valid_utf8_prefix(std::string_view text);

void append_utf8(std::string& text, uint32_t code_point);

// The text with invalid bytes replaced by U+FFFD, as browsers and Python do it.
std::string with_replacements(std::string_view text);

}  // namespace leeway
