// The two kinds of errors in the code base.
//
// `Error` is thrown for the user's mistake: a bad file, key, value or batch. The command line turns
// it into exit code 2. `LEEWAY_CHECK` aborts on a bug of ours; it is always on. Expected outcomes
// (a time-out, a missing optional stream) are return values, never either of these.
#pragma once

#include <stdexcept>
#include <string>

namespace leeway {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

[[noreturn]] void check_failed(const char* condition, const char* file, int line,
                               const std::string& message);

}  // namespace leeway

#define LEEWAY_CHECK(condition, message)                                 \
  do {                                                                   \
    if (!(condition)) {                                                  \
      ::leeway::check_failed(#condition, __FILE__, __LINE__, (message)); \
    }                                                                    \
  } while (false)
