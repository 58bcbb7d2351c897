// Files that the build puts into the binary, so that a page can be written without looking for
// them.
#pragma once

#include <string_view>

namespace leeway {

// The pages with their placeholders.
std::string_view compare_page_template();
std::string_view trajectory_page_template();
std::string_view run_page_template();

// The parts of the run page: its style, then what its scripts share, its charts, its account, its
// rollouts.
std::string_view run_page_css();
std::string_view run_page_js();
std::string_view run_page_charts_js();
std::string_view run_page_account_js();
std::string_view run_page_rollouts_js();

// Chart.js, minified, with its licence banner.
std::string_view chart_js();

}  // namespace leeway
