// The page of `leeway report`.
#pragma once

#include <string>
#include <string_view>

namespace leeway {

// One HTML document that shows one run or several over each other: headline numbers, charts of the
// metrics, objective and configuration, and sample rollouts token by token. `runs_json` is the JSON
// text of run_folders_json, put in unparsed. The page is a single file that opens offline: styles,
// scripts, Chart.js and data are all inside it. What comes from the data is shown as text;
// `</script>` or markup inside a string stays a string.
std::string run_page(std::string_view runs_json);

}  // namespace leeway
