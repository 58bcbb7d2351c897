// The assembler includes the file; C++ has no means of its own for that.
#include "orchestrator/keeper_image.h"

asm(".section .rodata\n"
    ".balign 16\n"
    ".global leeway_keeper_begin\n"
    "leeway_keeper_begin:\n"
    ".incbin \"" LEEWAY_KEEPER_IMAGE
    "\"\n"
    ".global leeway_keeper_end\n"
    "leeway_keeper_end:\n"
    ".previous\n");

extern "C" {
extern const char leeway_keeper_begin[];
extern const char leeway_keeper_end[];
}

namespace leeway {

std::span<const char> keeper_image() { return {leeway_keeper_begin, leeway_keeper_end}; }

}  // namespace leeway
