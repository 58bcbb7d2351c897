// Combines the template, Chart.js and the data.

#include "report/compare_page.h"

#include "leeway/error.h"
#include "report/embedded_files.h"
#include "report/script_safe.h"

namespace leeway {
namespace {

constexpr std::string_view kChartJsMark = "@leeway_chart_js@";
constexpr std::string_view kDataMark = "@leeway_compare_json@";

}  // namespace

std::string compare_page(std::string_view compare_json) {
  const std::string_view page_template = compare_page_template();
  // Both marks are searched for in the template only, so that data containing a mark is not
  // replaced.
  const size_t data_at = page_template.find(kDataMark);
  const size_t chart_at = page_template.find(kChartJsMark);
  LEEWAY_CHECK(
      data_at != std::string_view::npos && chart_at != std::string_view::npos && data_at < chart_at,
      "the template must contain the data mark, then the Chart.js mark");
  const size_t after_data = data_at + kDataMark.size();

  std::string page;
  page.reserve(page_template.size() + chart_js().size() + compare_json.size() + 1024);
  page += page_template.substr(0, data_at);
  append_script_safe(page, compare_json);
  page += page_template.substr(after_data, chart_at - after_data);
  page += chart_js();
  page += page_template.substr(chart_at + kChartJsMark.size());
  return page;
}

}  // namespace leeway
