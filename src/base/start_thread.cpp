#include "base/start_thread.h"

#include <fmt/format.h>

#include <system_error>

#include "leeway/error.h"

namespace leeway {

std::thread start_thread(std::function<void()> body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw Error(
        fmt::format("cannot start a thread: {}; use fewer (trainer.threads, rollout.threads, "
                    "--threads) or raise the limit on processes (ulimit -u) or memory (ulimit -v)",
                    error.code().message()));
  }
}

}  // namespace leeway
