// The program of keeper_main.cpp as bytes. It is run from memory, so that it need not be installed
// or found.
#pragma once

#include <span>

namespace leeway {

std::span<const char> keeper_image();

}  // namespace leeway
