// The assembler includes the files: a string literal would be too long for the compiler, and an
// array of numbers slow to compile. The build defines their folder and recompiles when one of them
// changes.

#include "report/embedded_files.h"

// Defines `name`, which returns the file's bytes.
#define LEEWAY_EMBED(name, file)                                                   \
  asm(".pushsection .rodata\n"                                                     \
      ".global leeway_" #name                                                      \
      "_begin\n"                                                                   \
      ".global leeway_" #name                                                      \
      "_end\n"                                                                     \
      "leeway_" #name                                                              \
      "_begin:\n"                                                                  \
      ".incbin \"" file                                                            \
      "\"\n"                                                                       \
      "leeway_" #name                                                              \
      "_end:\n"                                                                    \
      ".byte 0\n"                                                                  \
      ".popsection\n");                                                            \
  extern "C" const char leeway_##name##_begin[];                                   \
  extern "C" const char leeway_##name##_end[];                                     \
  namespace leeway {                                                               \
  std::string_view name() { return {leeway_##name##_begin, leeway_##name##_end}; } \
  }

LEEWAY_EMBED(compare_page_template, LEEWAY_REPORT_DIR "/compare_page.html")
LEEWAY_EMBED(trajectory_page_template, LEEWAY_REPORT_DIR "/trajectory_page.html")
LEEWAY_EMBED(run_page_template, LEEWAY_REPORT_DIR "/run_page.html")
LEEWAY_EMBED(run_page_css, LEEWAY_REPORT_DIR "/run_page.css")
LEEWAY_EMBED(run_page_js, LEEWAY_REPORT_DIR "/run_page.js")
LEEWAY_EMBED(run_page_charts_js, LEEWAY_REPORT_DIR "/run_page_charts.js")
LEEWAY_EMBED(run_page_account_js, LEEWAY_REPORT_DIR "/run_page_account.js")
LEEWAY_EMBED(run_page_rollouts_js, LEEWAY_REPORT_DIR "/run_page_rollouts.js")
LEEWAY_EMBED(chart_js, LEEWAY_CHART_JS)
