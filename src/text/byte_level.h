// The byte-level alphabet: vocabularies of these families spell arbitrary bytes as printable
// characters.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/utf8.h"

namespace leeway {

// The code point that spells a byte: itself if printable, else the next one from U+0100 on.
uint32_t byte_level_code_point(uint8_t byte);

// The bytes that a vocabulary entry spells, or nothing if a character is outside the alphabet.
std::optional<std::string> byte_level_bytes(std::string_view spelling);

}  // namespace leeway
