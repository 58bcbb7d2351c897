// What an exception means to the user: a sentence and an exit code.
//
// Most exceptions are `Error`, whose message is complete. The rest come from the standard library:
// memory that the system refuses, a file that cannot be looked at; or from PyTorch. Anything else
// is a mistake of ours.
#pragma once

#include <exception>
#include <functional>
#include <optional>
#include <string>

namespace leeway {

inline constexpr int kOurBug = 134;  // what a shell shows for a program that aborted

struct Failure {
  int exit_code = kOurBug;  // 2: the user's mistake, 3: out of memory, or PyTorch gave up
  std::string message;
};

Failure failure_of(std::exception_ptr exception);

// Calls `work` and returns why it failed, such as a full disk or refused memory; nothing: it did
// not fail. An exception that means a bug of ours is passed on.
std::optional<std::string> failure_in(const std::function<void()>& work);

}  // namespace leeway
