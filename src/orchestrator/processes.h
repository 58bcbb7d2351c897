// Processes of one command in a fixed number of slots: starting, greeting, reading lines,
// replacing. What is said after the greeting is the business of the pools above (process_pool.h,
// episode_pool.h).
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "orchestrator/child_process.h"
#include "orchestrator/environment.h"
#include "text/renderers/json_value.h"

namespace leeway {

struct ProcessPoolSettings {
  std::string command;  // run by /bin/sh -c, in this process's working directory
  int64_t processes = 1;
  double turn_timeout = 60.0;                   // seconds, of the greeting and of every answer
  int64_t max_output_bytes = int64_t{1} << 20;  // of a line
  ProcessLimits limits;
  // For other requests than those of an environment: their type, and the keys of the configuration
  // that messages name.
  std::string request_type = "turn";
  std::string command_key = "environment.command";
  std::string timeout_key = "environment.turn_timeout";
  std::string output_key = "environment.max_output_bytes";
};

// A random number of 53 bits, not 0, so that a program can only answer what it has been asked.
// Exact as a double.
uint64_t unguessable_id();

// Not thread-safe: a pool has a lock. Only the destructor and `greet` wait.
//
// Processes end with everything that they started; none outlives this process, however it ends
// (child_process.h). After one that has not answered anything, its slot stays empty for 0.1 s,
// doubling up to 5 s. The last 20 lines of their stderr are kept for failure messages.
class Processes {
 public:
  using Time = std::chrono::steady_clock::time_point;

  struct Slot {
    enum class State { empty, greeting, ready };
    State state = State::empty;
    std::unique_ptr<ChildProcess> child;
    uint64_t number = 0;  // of the process, among all that were started; never used again
    Time since;           // greeting: when that began
    Time heard;           // its last line
    std::optional<Time> output_end;
    bool answered = false;  // whether it has said anything useful
    int starts_in_vain = 0;
    Time not_before;  // of the next start attempt
  };
  // Why a process was given up.
  struct Loss {
    FailureKind kind = FailureKind::environment_error;
    std::string message;
  };

  // `protocols`: the versions that a program may choose from, 1 or 2 or both.
  Processes(ProcessPoolSettings settings, std::vector<int> protocols);
  // Closes the processes' input, gives them 1 s to end, kills the rest, and waits for all of them.
  ~Processes();
  Processes(Processes&&) noexcept = default;
  Processes& operator=(Processes&&) = delete;

  const ProcessPoolSettings& settings() const { return settings_; }
  size_t count() const { return slots_.size(); }
  Slot& slot(size_t i) { return slots_[i]; }

  // Starts a process in the first slot if there is none, and waits up to turn_timeout for its
  // hello. Returns an empty string on success, else the problem; a program that ends at once is
  // started three times.
  std::string greet();
  // The first hello; null before it. Every other process must choose the same protocol.
  const JsonValue* hello() const { return hello_ ? &*hello_ : nullptr; }
  int protocol() const { return protocol_; }  // 0: no hello yet

  bool may_start(const Slot& slot, Time now) const;
  // Starts a process in an empty slot. What prevented it, if anything; the slot is empty then.
  std::optional<Loss> start(Slot& slot, Time now);

  // Reads what the process has written and calls `take` for each line after the hello, which throws
  // Error for one that violates the protocol; it may also replace the process. Without `take` lines
  // after the hello are left for the next call. Returns why the process is gone, if it is; `when`
  // is for the message: "before it answered".
  using TakeLine = std::function<void(std::string_view line)>;
  std::optional<Loss> serve(Slot& slot, const char* when, Time now, const TakeLine& take);

  // Ends the process and empties the slot.
  void replace(Slot& slot, const Loss& loss, Time now);
  // It works: no delay before the next start.
  void note_answer(Slot& slot) {
    last_failure_ = {};
    slot.answered = true;
    slot.starts_in_vain = 0;
  }
  // Waits for processes that were killed, as far as they have ended.
  void reap();

  std::vector<std::string> take_log();
  // Of the process that was given up last; an empty message: none since an answer.
  const Loss& last_failure() const { return last_failure_; }
  // Why no process will ever work: it speaks another protocol. Empty: none.
  const std::string& refusal() const { return refusal_; }

 private:
  std::optional<Loss> take_lines(Slot& slot, Time now, const TakeLine& take);
  std::optional<Loss> take_greeting(Slot& slot, std::string_view line);
  Loss lose(Slot& slot, FailureKind kind, const std::string& message, Time now);

  ProcessPoolSettings settings_;
  std::vector<int> protocols_;
  std::chrono::duration<double> timeout_;
  std::unique_ptr<std::deque<std::string>> log_;  // before the processes, which write to it
  OpenFile keeper_;                               // made with the first process
  std::vector<Slot> slots_;
  std::vector<pid_t> dying_;  // keepers being killed, not waited for yet
  uint64_t started_ = 0;
  int protocol_ = 0;
  std::optional<JsonValue> hello_;
  Loss last_failure_;
  std::string refusal_;
  bool greeting_late_ = false;  // the last process that timed out had not said hello
};

}  // namespace leeway
