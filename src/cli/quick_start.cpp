// The assembler includes the file; the build defines its path and recompiles when it changes.

#include "cli/quick_start.h"

asm(".pushsection .rodata\n"
    ".global leeway_quick_start_begin\n"
    ".global leeway_quick_start_end\n"
    "leeway_quick_start_begin:\n"
    ".incbin \"" LEEWAY_QUICK_START
    "\"\n"
    "leeway_quick_start_end:\n"
    ".byte 0\n"
    ".popsection\n");
extern "C" const char leeway_quick_start_begin[];
extern "C" const char leeway_quick_start_end[];

namespace leeway {

std::string_view quick_start_config() { return {leeway_quick_start_begin, leeway_quick_start_end}; }

}  // namespace leeway
