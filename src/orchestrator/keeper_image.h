// The program of keeper_main.cpp, as bytes: it is run from memory, so that nothing has to be
// installed or found.
#pragma once

#include <span>

namespace leeway {

std::span<const char> keeper_image();

}  // namespace leeway
