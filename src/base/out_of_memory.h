// An allocation failure that can say what the memory was for.
#pragma once

#include "leeway/error.h"

namespace leeway {

// Says how much memory was requested and why. The program exits as for std::bad_alloc: the request
// may be valid and the machine too small.
class OutOfMemory : public Error {
 public:
  using Error::Error;
};

}  // namespace leeway
