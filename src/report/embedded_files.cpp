// The assembler includes the files: a string literal would be too long for the compiler, and an
// array of numbers slow to compile. The build defines the names and recompiles when a file
// changes.

#include "report/embedded_files.h"

#define LEEWAY_EMBED(symbol, file)      \
  asm(".pushsection .rodata\n"          \
      ".global " symbol                 \
      "_begin\n"                        \
      ".global " symbol "_end\n" symbol \
      "_begin:\n"                       \
      ".incbin \"" file "\"\n" symbol   \
      "_end:\n"                         \
      ".byte 0\n"                       \
      ".popsection\n")

LEEWAY_EMBED("leeway_compare_page_template", LEEWAY_COMPARE_PAGE_TEMPLATE);
LEEWAY_EMBED("leeway_trajectory_page_template", LEEWAY_TRAJECTORY_PAGE_TEMPLATE);
LEEWAY_EMBED("leeway_chart_js", LEEWAY_CHART_JS);

extern "C" {
extern const char leeway_compare_page_template_begin[];
extern const char leeway_compare_page_template_end[];
extern const char leeway_trajectory_page_template_begin[];
extern const char leeway_trajectory_page_template_end[];
extern const char leeway_chart_js_begin[];
extern const char leeway_chart_js_end[];
}

namespace leeway {

std::string_view compare_page_template() {
  return {leeway_compare_page_template_begin, leeway_compare_page_template_end};
}

std::string_view trajectory_page_template() {
  return {leeway_trajectory_page_template_begin, leeway_trajectory_page_template_end};
}

std::string_view chart_js() { return {leeway_chart_js_begin, leeway_chart_js_end}; }

}  // namespace leeway
