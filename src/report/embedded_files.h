// Files that the build puts into the binary, so that a page can be written without looking for
// them.
#pragma once

#include <string_view>

namespace leeway {

// compare_page.html, with its placeholders.
std::string_view compare_page_template();

// Chart.js, minified, with its licence banner.
std::string_view trajectory_page_template();
std::string_view chart_js();

}  // namespace leeway
