// Child processes that answer requests, one line of JSON each way: version 1 of the protocol in
// docs/environments.md. What requests and answers are about is not known here.
//
// A process keeps no state between requests, so that any of them can take any request, and one that
// ends, hangs or talks nonsense costs the request it was working on and nothing else.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <sys/types.h>

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
};

// All methods may be called from several threads at once; none waits for a process, but for the
// destructor. There is no thread at work inside: lines move and time-outs are seen while somebody
// calls `submit` or `poll`.
//
// Processes are started when requests need them, and end with everything that they started; none
// outlives this process, however it ends (child_process.h). After one that has not answered
// anything, its place stays empty for 0.1 s, doubling up to 5 s. What they write to stderr is kept
// (20 lines) for the messages of failures.
//
// A request's id, which its answer echoes, is a random number of 53 bits: an answer is to what was
// asked. One sent before its turn, or a second one to a turn, is counted, stands in the log, and
// costs the process.
class ProcessPool {
 public:
  // What an answer with the right id means: messages, a reward, or a failure that the program
  // reports. Throws Error for an answer that breaks the protocol. Called with the pool's lock held.
  using ReadAnswer = std::function<Turn(const JsonValue& answer)>;

  ProcessPool(ProcessPoolSettings settings, ReadAnswer read_answer);
  // Closes the processes' input, gives them 1 s to end, kills those that have not, and waits for
  // all: none is left.
  ~ProcessPool();
  ProcessPool(const ProcessPool&) = delete;
  ProcessPool& operator=(const ProcessPool&) = delete;

  // Starts a process, if none is there, and waits for its hello, for turn_timeout at most. Empty:
  // it came. Else what was wrong; a program that ends at once is started three times. To be called
  // before anything is submitted.
  std::string greet();

  // Asks for {"type": "turn", "id": .., MEMBERS}; `members` is JSON in one line. Requests are taken
  // in order. Returns the request's number.
  uint64_t submit(const std::string& members);

  // What came of a request: `pending` until then. Afterwards the number is forgotten. Failures:
  //   timeout            no answer within turn_timeout of its being sent; or no process took it for
  //                      so long, and none gave an answer to another
  //   environment_error  the process ended, or could not be started
  //   bad_answer         a line that is no answer to it; every request, if the greeting shows that
  //                      the program speaks another version
  // After all but the last, the process is replaced.
  Turn poll(uint64_t request);

  // Lines of the processes' stderr since the last call, "PID: line"; the last 1000 of them.
  std::vector<std::string> take_log();

  // Answers that nothing had asked for, since the last call.
  int64_t take_unasked_answers();

  // The answer is no longer wanted. A process at work on it goes on until it answers or is late.
  void withdraw(uint64_t request);

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct Place;
  struct Unasked;
  struct Request {
    uint64_t id = 0;   // as the process sees it
    std::string line;  // until it is sent
    Time submitted;
    bool done = false;
    Turn result;
  };

  void pump_if_due(Time now);
  void pump(Time now);
  void serve(Place& place, Time now);
  bool take_lines(Place& place, Time now);
  void take_line(Place& place, std::string_view line, Time now);
  void take_greeting(Place& place, std::string_view line, Time now);
  void hand_out(Time now);
  void start(Place& place, Time now);
  void send(Place& place, Time now);
  void expire_queue(Time now);
  void finish(uint64_t request, Turn result);
  void fail(uint64_t request, FailureKind kind, const std::string& message);
  void replace(Place& place, FailureKind kind, const std::string& message, Time now);
  void refuse_all(const std::string& reason);
  uint64_t next_in_queue();

  std::mutex mutex_;
  std::deque<std::string> log_;  // before the processes, which write to it
  ProcessPoolSettings settings_;
  std::chrono::duration<double> timeout_;
  ReadAnswer read_answer_;
  OpenFile keeper_;  // made with the first process
  std::vector<std::unique_ptr<Place>> places_;
  std::vector<pid_t> dying_;  // keepers of what is being killed, not yet waited for
  std::unordered_map<uint64_t, Request> requests_;
  std::deque<uint64_t> queue_;  // those that no process has; withdrawn ones are skipped
  uint64_t last_request_ = 0;
  Time last_pump_, last_answer_;
  std::string last_failure_;  // of a process
  std::string refusal_;       // why no request will ever be answered
  int64_t unasked_answers_ = 0;
  bool greeting_late_ = false;  // the last process that was late had not said hello
};

}  // namespace leeway
