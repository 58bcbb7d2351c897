// Memory that the system refuses, where it can be said what for.
#pragma once

#include "leeway/error.h"

namespace leeway {

// Says how much was wanted and why. The program ends as it does for std::bad_alloc: what is asked
// for may be right, and the machine too small.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

}  // namespace leeway
