// Files embedded in the binary, so that a page can be written without finding them at run time.
#pragma once

#include <string_view>

namespace leeway {

// The page templates, with their placeholders.
std::string_view compare_page_template();
std::string_view trajectory_page_template();
std::string_view run_page_template();

// The parts of the run page: its styles, then scripts for what the others share, charts, the
// account of rollouts, and rollouts.
std::string_view run_page_css();
std::string_view run_page_js();
std::string_view run_page_charts_js();
std::string_view run_page_account_js();
std::string_view run_page_rollouts_js();

// Chart.js, minified, with its licence banner.
std::string_view chart_js();

}  // namespace leeway
