// Combines the template, its styles and scripts, Chart.js and the data.

#include "report/run_page.h"

#include <array>

#include "leeway/error.h"
#include "report/embedded_files.h"
#include "report/script_safe.h"

namespace leeway {

std::string run_page(std::string_view runs_json) {
  struct Part {
    std::string_view mark, text;
  };
  std::string data;
  data.reserve(runs_json.size() + 1024);
  append_script_safe(data, runs_json);
  const std::array<Part, 7> parts = {{{"@leeway_run_css@", run_page_css()},
                                      {"@leeway_runs_json@", data},
                                      {"@leeway_chart_js@", chart_js()},
                                      {"@leeway_run_js@", run_page_js()},
                                      {"@leeway_run_charts_js@", run_page_charts_js()},
                                      {"@leeway_run_account_js@", run_page_account_js()},
                                      {"@leeway_run_rollouts_js@", run_page_rollouts_js()}}};
  // Marks are searched for in the template only, in order, so that data containing a mark is not
  // replaced.
  std::string_view rest = run_page_template();
  std::string page;
  page.reserve(rest.size() + data.size() + chart_js().size() + (size_t{1} << 17));
  for (const Part& part : parts) {
    const size_t at = rest.find(part.mark);
    LEEWAY_CHECK(at != std::string_view::npos,
                 "the template must contain every mark, in this order");
    page += rest.substr(0, at);
    page += part.text;
    rest.remove_prefix(at + part.mark.size());
  }
  page += rest;
  return page;
}

}  // namespace leeway
