#include "report/trajectory_page.h"

#include "leeway/error.h"
#include "report/embedded_files.h"
#include "report/script_safe.h"

namespace leeway {

std::string trajectory_page(std::string_view trajectory_json) {
  constexpr std::string_view kDataMark = "@leeway_trajectory_json@";
  const std::string_view page_template = trajectory_page_template();
  const size_t at = page_template.find(kDataMark);
  LEEWAY_CHECK(at != std::string_view::npos, "the template must contain the data mark");
  std::string page(page_template.substr(0, at));
  append_script_safe(page, trajectory_json);
  page += page_template.substr(at + kDataMark.size());
  return page;
}

}  // namespace leeway
