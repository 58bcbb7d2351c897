// Parses TOML text, for every file and assignment.
#pragma once

#include <toml++/toml.h>

#include <string>
#include <string_view>

namespace leeway {

// Throws Error "NAME line N: problem" for invalid TOML, for more than kMostTomlBytes, and for keys
// or values nested deeper than kMostTomlDepth, since the parser recurses as deeply as its input
// nests.
inline constexpr size_t kMostTomlBytes = size_t{16} << 20;
inline constexpr size_t kMostTomlDepth = 64;
toml::table parse_toml(const std::string& name, std::string_view text);

// Whether a string can be written as TOML: UTF-8 without a NUL character.
bool is_toml_text(const std::string& text);

}  // namespace leeway
