// Child processes that answer requests, one line of JSON each way: version 1 of the protocol in
// docs/environments.md. The content of requests and answers is not interpreted here.
//
// A process keeps no state between requests, so any of them can take any request, and one that
// ends, hangs or violates the protocol costs only the request it was working on.
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
  // For other requests than the turns of an environment: their type, and the keys of the
  // configuration that messages name.
  std::string request_type = "turn";
  std::string command_key = "environment.command";
  std::string timeout_key = "environment.turn_timeout";
  std::string output_key = "environment.max_output_bytes";
};

// All methods are thread-safe; only the destructor waits for a process. There is no internal
// thread: I/O and time-outs are handled while someone calls `submit` or `poll`.
//
// Processes are started on demand, and end with everything that they started; none outlives this
// process, however it ends (child_process.h). After one that has not answered anything, its slot
// stays empty for 0.1 s, doubling up to 5 s. The last 20 lines of their stderr are kept for failure
// messages.
//
// A request's id, which its answer echoes, is a random number of 53 bits, so that an answer cannot
// be given in advance. An answer before its turn, or a second answer to a turn, is counted and
// logged, and the process is replaced.
class ProcessPool {
 public:
  // Interprets an answer with the right id: messages, a reward, or a failure reported by the
  // program. Throws Error for an answer that violates the protocol. Called with the pool's lock
  // held.
  using ReadAnswer = std::function<Turn(const JsonValue& answer)>;

  ProcessPool(ProcessPoolSettings settings, ReadAnswer read_answer);
  // Closes the processes' input, gives them 1 s to end, kills the rest, and waits for all of them.
  ~ProcessPool();
  ProcessPool(const ProcessPool&) = delete;
  ProcessPool& operator=(const ProcessPool&) = delete;

  // Starts a process if there is none, and waits up to turn_timeout for its hello. Returns an empty
  // string on success, else the problem; a program that ends at once is started three times. Call
  // before anything is submitted.
  std::string greet();

  // Requests {"type": "turn", "id": .., MEMBERS}, or of another request_type; `members` is JSON on
  // one line. Requests are taken in order. Returns the request's number.
  uint64_t submit(const std::string& members);

  // What came of a request: `pending` until then. Afterwards the number is forgotten. Failures:
  //   timeout            no answer within turn_timeout of its being sent; or no process took it for
  //                      so long, and none gave an answer to another
  //   environment_error  the process ended, or could not be started
  //   bad_answer         a line that is not an answer to it; every request, if the greeting shows
  //   that
  //                      the program speaks another version
  // After all but the last, the process is replaced.
  Turn poll(uint64_t request);

  // Lines of the processes' stderr since the last call, "PID: line"; the last 1000 of them.
  std::vector<std::string> take_log();

  // Unsolicited answers since the last call.
  int64_t take_unasked_answers();

  // The answer is no longer wanted. A process working on it continues until it answers or times
  // out.
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
  std::vector<pid_t> dying_;  // keepers being killed, not waited for yet
  std::unordered_map<uint64_t, Request> requests_;
  std::deque<uint64_t> queue_;  // unassigned requests; withdrawn ones are skipped
  uint64_t last_request_ = 0;
  Time last_pump_, last_answer_;
  std::string last_failure_;  // of a process
  std::string refusal_;       // why no request will ever be answered; empty: none
  int64_t unasked_answers_ = 0;
  bool greeting_late_ = false;  // the last process that timed out had not said hello
};

}  // namespace leeway
