// Starting threads, which the system may refuse.
#pragma once

#include <functional>
#include <thread>

namespace leeway {

// Starts a thread that runs `body`. Throws Error if the system refuses because of a limit on
// processes or memory.
std::thread start_thread(std::function<void()> body);

}  // namespace leeway
