// TOML text to a tree, for every file and assignment that is TOML.
#pragma once

#include <toml++/toml.h>

#include <string>
#include <string_view>

namespace leeway {

// Throws Error "NAME line N: what is wrong" for what is no TOML, for more than kMostTomlBytes, and
// for keys or values nested deeper than kMostTomlDepth: the parser goes as deep as its text does.
inline constexpr size_t kMostTomlBytes = size_t{16} << 20;
inline constexpr size_t kMostTomlDepth = 64;
toml::table parse_toml(const std::string& name, std::string_view text);

// Whether a string can be written as TOML: UTF-8 without a NUL character.
bool is_toml_text(const std::string& text);

}  // namespace leeway
