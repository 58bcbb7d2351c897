// What this program is and how it was built.
#pragma once

#include <string>

namespace leeway {

std::string version_number();  // "0.1.0"
// What --version prints: "leeway 0.1.0 (c2f03e7)" and a line on PyTorch and CUDA. The commit ends
// with "-dirty" where files differed from it, and is "unknown" where the sources were no checkout.
std::string version_text();

}  // namespace leeway
