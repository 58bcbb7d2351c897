// The page of `leeway report`.
#pragma once

#include <string>
#include <string_view>

namespace leeway {

// One HTML document that shows one run, or several overlaid: headline numbers, charts of the
// metrics, objective and configuration, and sample rollouts token by token. `runs_json` is the JSON
// text of run_folders_json, inserted unparsed. The page is a single file that opens offline:
// styles, scripts, Chart.js and data are all in it. Values from the data are shown as text;
// `</script>` or markup in a string stays a string.
std::string run_page(std::string_view runs_json);

}  // namespace leeway
