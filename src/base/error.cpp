#include "leeway/error.h"

#include <cstdio>
#include <cstdlib>

#include "base/printable.h"

namespace leeway {

void check_failed(const char* condition, const char* file, int line, const std::string& message) {
  std::fprintf(stderr, "leeway: internal error (a bug in leeway): %s:%d: check %s failed: %s\n",
               file, line, condition, printable(message).c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace leeway
