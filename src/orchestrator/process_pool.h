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
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "orchestrator/environment.h"
#include "orchestrator/processes.h"
#include "text/renderers/json_value.h"

namespace leeway {

// All methods are thread-safe; only the destructor waits for a process. There is no internal
// thread: I/O and time-outs are handled while someone calls `submit` or `poll`.
//
// Processes are started on demand (processes.h).
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
  // With processes that may have said hello already.
  ProcessPool(Processes processes, ReadAnswer read_answer);
  ~ProcessPool();

  // Starts a process if there is none, and waits up to turn_timeout for its hello. Returns an empty
  // string on success, else the problem; a program that ends at once is started three times. Call
  // before anything is submitted.
  std::string greet();

  // Requests {"type": "turn", "id": .., MEMBERS}, or of another request_type; `members` is JSON on
  // one line. Requests are taken in order. Returns the request's number.
  uint64_t submit(const std::string& members);

  // What came of a request: `pending` until then. Afterwards the number is forgotten. Failures:
  //   timeout            no answer within turn_timeout of its being sent; or no process took it for
  //                      so long, and none gave an answer to another or failed
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
  using Time = Processes::Time;
  using Slot = Processes::Slot;
  struct Unasked;
  // What a slot's process does.
  struct Work {
    uint64_t request = 0;  // the request it works on or is started for; 0: none
    uint64_t id = 0;       // id of the current turn; 0: nothing was asked
    uint64_t last_id = 0;  // id of the last turn it answered
    Time since;            // when it was asked
  };
  struct Request {
    uint64_t id = 0;   // as the process sees it
    std::string line;  // until it is sent
    Time submitted;
    bool done = false;
    Turn result;
  };

  void pump_if_due(Time now);
  void pump(Time now);
  void serve(size_t place, Time now);
  Turn read_answer(const JsonValue& answer) const;
  void take_line(size_t place, std::string_view line, Time now);
  void hand_out(Time now);
  void send(size_t place, Time now);
  void expire_queue(Time now);
  void finish(uint64_t request, Turn result);
  void fail(uint64_t request, FailureKind kind, const std::string& message);
  void lose(size_t place, const Processes::Loss& loss);
  uint64_t next_in_queue();

  std::mutex mutex_;
  Processes processes_;
  std::chrono::duration<double> timeout_;
  ReadAnswer read_answer_;
  std::vector<Work> works_;  // by slot
  std::unordered_map<uint64_t, Request> requests_;
  std::deque<uint64_t> queue_;  // unassigned requests; withdrawn ones are skipped
  uint64_t last_request_ = 0;
  Time last_pump_, last_answer_;
  int64_t unasked_answers_ = 0;
};

}  // namespace leeway
