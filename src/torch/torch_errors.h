// Torch's exceptions as Leeway's, which callers outside this folder know.
#pragma once

#include <ATen/ATen.h>

#include <string>

#include "leeway/error.h"

namespace leeway {

// What `work` gives; what torch throws in it becomes an Error with torch's message, without its
// stack. `when_out_of_memory` follows the message where the device's memory does not suffice.
template <class Work>
auto with_plain_errors(Work&& work, const char* when_out_of_memory = "") {
  try {
    return work();
  } catch (const c10::OutOfMemoryError& error) {
    throw Error(std::string(error.what_without_backtrace()) + when_out_of_memory);
  } catch (const c10::Error& error) {
    throw Error(error.what_without_backtrace());
  }
}

}  // namespace leeway
