// UTF-8 one character at a time, and texts that are made valid.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace leeway {

inline constexpr uint32_t kReplacementCharacter = 0xFFFD;  // stands for bytes that are not UTF-8

enum class Utf8Kind {
  valid,
  invalid,     // no continuation makes these bytes a character
  incomplete,  // the text ends inside what may still become a character
};

struct Utf8Unit {
  Utf8Kind kind;
  size_t length;        // of the character, or of the bytes that one U+FFFD stands for
  uint32_t code_point;  // 0 unless valid
};

// The first character of a text that is not empty. Surrogates, overlong forms and anything past
// U+10FFFF are invalid.
Utf8Unit next_utf8(std::string_view text);

// How many leading bytes are whole, valid characters.
size_t valid_utf8_prefix(std::string_view text);

void append_utf8(std::string& text, uint32_t code_point);

// The text with U+FFFD for what is not UTF-8, as browsers and Python replace it.
std::string with_replacements(std::string_view text);

}  // namespace leeway
