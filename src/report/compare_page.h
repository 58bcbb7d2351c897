// The page of `leeway loss compare --html`.
#pragma once

#include <string>
#include <string_view>

namespace leeway {

// One HTML document that shows a comparison of presets: headline numbers, a sortable table, charts.
// `compare_json` is the JSON text of `leeway loss compare --json`, inserted unparsed. The page is a
// single file that opens offline: styles, script, Chart.js and data are all in it. Names from the
// data are shown as text; `</script>` or markup in a string stays a string.
std::string compare_page(std::string_view compare_json);

}  // namespace leeway
