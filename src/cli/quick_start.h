// The built-in configuration, examples/01_sort/config.toml.
#pragma once

#include <string_view>

namespace leeway {

std::string_view quick_start_config();
inline constexpr const char* kQuickStartName = "examples/01_sort/config.toml";

}  // namespace leeway
