// Tables of plain text.
#pragma once

#include <string>
#include <vector>

namespace leeway {

// The first column left-aligned, the others right-aligned as numbers are, except one with the
// header "settings"; a rule below the header.
std::string format_table(const std::vector<std::string>& header,
                         const std::vector<std::vector<std::string>>& rows);

}  // namespace leeway
