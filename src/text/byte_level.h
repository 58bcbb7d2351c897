// UTF-8 one character at a time, and the byte-level alphabet in which the vocabularies of these
// families spell arbitrary bytes as printable characters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace leeway {

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

// The code point that spells a byte: itself where printable, else the next one from U+0100 on.
uint32_t byte_level_code_point(uint8_t byte);

// The bytes a vocabulary entry spells; nothing if a character is outside the alphabet.
std::optional<std::string> byte_level_bytes(std::string_view spelling);

}  // namespace leeway
