// Threads that the system may refuse.
#pragma once

#include <functional>
#include <thread>

namespace leeway {

// A thread that runs `body`. Throws Error where the system refuses one: a limit on processes or
// memory.
std::thread start_thread(std::function<void()> body);

}  // namespace leeway
