#include "orchestrator/process_pool.h"

#include <fmt/format.h>
#include <sys/random.h>
#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <optional>
#include <thread>

#include "leeway/error.h"

namespace leeway {
namespace {

using std::chrono::milliseconds;
using Kind = JsonValue::Kind;

constexpr int kProtocol = 1;
constexpr const char* kGreeting = "{\"type\": \"hello\", \"protocol\": 1}";

// Many rollouts poll in turn: one check of the processes serves them all.
constexpr auto kPumpSlice = std::chrono::microseconds(200);
constexpr auto kLastGrace = milliseconds(1000);    // grace period after closing its input
constexpr auto kStatusGrace = milliseconds(200);   // between end of output and exit
constexpr auto kFirstBackoff = milliseconds(100);  // after a process that answered nothing
constexpr auto kLongestBackoff = milliseconds(5000);
constexpr int kReadsAtOnce = 32;  // so that endless output of one program does not block the others
constexpr int kStartsInVain = 3;  // before a program is considered unable to start

// A random id, so that a program can only answer what it has been asked. Exact as a double.
uint64_t unguessable_id() {
  uint64_t bits = 0;
  while (bits == 0) {
    if (::getrandom(&bits, sizeof bits, 0) != static_cast<ssize_t>(sizeof bits)) bits = 0;
    bits >>= 11;
  }
  return bits;
}

}  // namespace

// An answer that was not asked for.
struct ProcessPool::Unasked : Error {
  using Error::Error;
};

// A slot for a process, which is started when needed.
struct ProcessPool::Place {
  enum class State { empty, greeting, idle, busy };
  State state = State::empty;
  std::unique_ptr<ChildProcess> child;
  uint64_t request = 0;  // the request it works on or is started for; 0: none
  uint64_t id = 0;       // id of the current turn
  uint64_t last_id = 0;  // id of the last turn it answered
  Time since;            // greeting, busy: when that began
  std::optional<Time> output_end;
  bool answered = false;  // whether it has answered anything
  int starts_in_vain = 0;
  Time not_before;  // of the next start attempt
};

ProcessPool::ProcessPool(ProcessPoolSettings settings, ReadAnswer read_answer)
    : settings_(std::move(settings)),
      timeout_(settings_.turn_timeout),
      read_answer_(std::move(read_answer)) {
  LEEWAY_CHECK(settings_.processes > 0, "a pool has processes");
  for (int64_t i = 0; i < settings_.processes; ++i) places_.push_back(std::make_unique<Place>());
}

ProcessPool::~ProcessPool() {
  std::vector<ChildProcess*> left;
  for (const auto& place : places_) {
    if (!place->child) continue;
    place->child->close_input();
    left.push_back(place->child.get());
  }
  const Time deadline = std::chrono::steady_clock::now() + kLastGrace;
  while (!left.empty() && std::chrono::steady_clock::now() < deadline) {
    std::erase_if(left, [](ChildProcess* child) {
      // Drain its output, so that a full pipe does not block it.
      for (int i = 0; i < kReadsAtOnce && child->receive(); ++i) {
        while (child->next_line()) {
        }
      }
      return child->exited() && child->end();
    });
    if (!left.empty()) std::this_thread::sleep_for(milliseconds(1));
  }
  for (ChildProcess* child : left) {
    if (!child->end()) dying_.push_back(child->keeper_pid());
  }
  for (const pid_t pid : dying_) {
    while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
}

std::vector<std::string> ProcessPool::take_log() {
  const std::lock_guard lock(mutex_);
  const std::deque<std::string> lines = std::exchange(log_, {});
  return {lines.begin(), lines.end()};
}

int64_t ProcessPool::take_unasked_answers() {
  const std::lock_guard lock(mutex_);
  return std::exchange(unasked_answers_, 0);
}

std::string ProcessPool::greet() {
  Place& place = *places_.front();
  for (int starts = 0;;) {
    {
      const std::lock_guard lock(mutex_);
      const Time now = std::chrono::steady_clock::now();
      if (place.state == Place::State::idle || place.state == Place::State::busy) return "";
      if (place.state == Place::State::empty) {
        const bool again = refusal_.empty() && !greeting_late_ && starts < kStartsInVain;
        if (starts > 0 && !again) return last_failure_;
        if (now >= place.not_before) {
          ++starts;
          start(place, now);
        }
      }
      pump(now);
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
}

uint64_t ProcessPool::submit(const std::string& members) {
  LEEWAY_CHECK(members.find('\n') == std::string::npos, "a request is one line");
  const std::lock_guard lock(mutex_);
  const Time now = std::chrono::steady_clock::now();
  pump_if_due(now);
  const uint64_t number = ++last_request_;
  Request& request = requests_[number];
  if (!refusal_.empty()) {
    fail(number, FailureKind::bad_answer, refusal_);
    return number;
  }
  request.id = unguessable_id();
  request.line = fmt::format("{{\"type\": \"{}\", \"id\": {}, {}}}", settings_.request_type,
                             request.id, members);
  request.submitted = now;
  queue_.push_back(number);
  hand_out(now);
  return number;
}

Turn ProcessPool::poll(uint64_t request) {
  const std::lock_guard lock(mutex_);
  pump_if_due(std::chrono::steady_clock::now());
  const auto found = requests_.find(request);
  LEEWAY_CHECK(found != requests_.end(), "a request is polled until it has a result");
  if (!found->second.done) return {.kind = Turn::Kind::pending};
  Turn result = std::move(found->second.result);
  requests_.erase(found);
  return result;
}

void ProcessPool::withdraw(uint64_t request) {
  const std::lock_guard lock(mutex_);
  requests_.erase(request);
}

void ProcessPool::pump_if_due(Time now) {
  if (now - last_pump_ >= kPumpSlice) pump(now);
}

void ProcessPool::pump(Time now) {
  // While nobody polls, no request can be assigned, so waiting ones do not time out.
  const bool unwatched = now - last_pump_ > timeout_ / 4;
  if (unwatched) last_answer_ = now;
  last_pump_ = now;
  for (const auto& place : places_) {
    if (place->child) serve(*place, now);
  }
  std::erase_if(dying_, [](pid_t pid) { return ::waitpid(pid, nullptr, WNOHANG) != 0; });
  hand_out(now);
  expire_queue(now);
}

void ProcessPool::serve(Place& place, Time now) {
  ChildProcess& child = *place.child;
  const bool exited = child.exited();  // checked before reading, so that no output is missed
  child.flush();
  for (int i = 0; i < kReadsAtOnce && child.receive(); ++i) {
    if (!take_lines(place, now)) return;
  }
  if (!child.output_open() && !place.output_end) place.output_end = now;
  const char* when = place.state == Place::State::greeting ? "before it said hello"
                     : place.state == Place::State::busy   ? "before it answered"
                                                           : "while nothing was asked of it";
  if (exited) {
    child.end();
    replace(
        place, FailureKind::environment_error,
        fmt::format("process {} {} {}{}", child.pid(), child.end_text(), when, child.last_words()),
        now);
  } else if (place.output_end && now - *place.output_end > kStatusGrace) {
    replace(place, FailureKind::environment_error,
            fmt::format("process {} closed its output {}{}", child.pid(), when, child.last_words()),
            now);
  } else if (place.state != Place::State::idle && now - place.since > timeout_) {
    const char* what = place.state == Place::State::greeting ? "hello" : "answer";
    greeting_late_ = place.state == Place::State::greeting;
    replace(
        place, FailureKind::timeout,
        fmt::format("{}: process {} gave no {} within {} s and was killed{}", settings_.timeout_key,
                    child.pid(), what, settings_.turn_timeout, child.last_words()),
        now);
  }
}

// Returns false if the process is gone.
bool ProcessPool::take_lines(Place& place, Time now) {
  const auto most = static_cast<size_t>(settings_.max_output_bytes);
  const auto too_long = [&](const std::string& line) {
    if (line.size() <= most) return false;
    replace(place, FailureKind::bad_answer,
            fmt::format("{}: process {} wrote a line of more than {} bytes: {}",
                        settings_.output_key, place.child->pid(), most, in_quotes(line)),
            now);
    return true;
  };
  while (const std::optional<std::string> line = place.child->next_line()) {
    if (too_long(*line)) return false;
    take_line(place, *line, now);
    if (!place.child) return false;
  }
  return !too_long(place.child->unfinished_line());
}

void ProcessPool::take_line(Place& place, std::string_view line, Time now) {
  if (line.find_first_not_of(" \t\r") == std::string_view::npos) return;
  try {
    if (place.state == Place::State::greeting) return take_greeting(place, line, now);
    const JsonValue answer = read_json("JSON", line);
    if (!answer.is(Kind::object)) {
      throw Error(fmt::format("an answer is an object, not {}", name_of(answer.kind)));
    }
    const JsonValue* id = answer.find("id");
    const bool numbered = id != nullptr && id->is(Kind::number);
    const double given = numbered ? std::strtod(id->text.c_str(), nullptr) : 0.0;
    const bool busy = place.state == Place::State::busy;
    if (!busy || given != static_cast<double>(place.id)) {
      const bool again = given != 0.0 && given == static_cast<double>(place.last_id);
      if (again) throw Unasked("a second answer to a turn");
      if (!busy) throw Unasked("an answer before its turn: nothing was asked");
      if (numbered) throw Unasked(fmt::format("its id must be the turn's, {}", place.id));
      throw Error(fmt::format("the answer's id must be the turn's, {}", place.id));
    }
    Turn turn = read_answer_(answer);
    finish(place.request, std::move(turn));
  } catch (const Error& error) {
    if (dynamic_cast<const Unasked*>(&error) != nullptr || place.state == Place::State::idle) {
      ++unasked_answers_;
      place.child->note(fmt::format("unasked answer: {}: {}; the process is replaced",
                                    in_quotes(line), error.what()));
    }
    return replace(place, FailureKind::bad_answer,
                   fmt::format("process {} wrote {}: {}{}", place.child->pid(), in_quotes(line),
                               error.what(), place.child->last_words()),
                   now);
  }
  place.state = Place::State::idle;
  place.request = 0;
  place.last_id = std::exchange(place.id, 0);
  place.answered = true;
  place.starts_in_vain = 0;
  last_answer_ = now;
}

void ProcessPool::take_greeting(Place& place, std::string_view line, Time now) {
  const JsonValue hello = read_json("JSON", line);
  const JsonValue* type = hello.find("type");
  const JsonValue* protocol = hello.find("protocol");
  if (type == nullptr || type->text != "hello" || protocol == nullptr ||
      !protocol->is(Kind::number)) {
    throw Error(fmt::format("its first line must be {}", kGreeting));
  }
  if (std::strtod(protocol->text.c_str(), nullptr) != kProtocol) {
    refuse_all(
        fmt::format("the program of {} speaks protocol {}, and this version of Leeway protocol {}",
                    settings_.command_key, in_quotes(protocol->text), kProtocol));
    return replace(place, FailureKind::bad_answer, refusal_, now);
  }
  place.state = Place::State::idle;
  if (requests_.contains(place.request)) {
    send(place, now);
  } else {
    place.request = 0;
  }
}

void ProcessPool::send(Place& place, Time now) {
  Request& request = requests_.at(place.request);
  place.child->send(request.line);
  place.id = request.id;
  request.line.clear();
  place.state = Place::State::busy;
  place.since = now;
}

// The next request that is still wanted, or 0. It stays in the queue.
uint64_t ProcessPool::next_in_queue() {
  while (!queue_.empty() && !requests_.contains(queue_.front())) queue_.pop_front();
  return queue_.empty() ? 0 : queue_.front();
}

void ProcessPool::hand_out(Time now) {
  const auto take = [&](Place& place) {
    place.request = next_in_queue();
    if (place.request != 0) queue_.pop_front();
    return place.request != 0;
  };
  for (const auto& place : places_) {
    if (place->state == Place::State::idle && !place->output_end && take(*place)) send(*place, now);
  }
  for (const auto& place : places_) {
    if (place->state != Place::State::empty || now < place->not_before) continue;
    if (take(*place)) start(*place, now);
  }
}

void ProcessPool::start(Place& place, Time now) {
  place.output_end.reset();
  place.answered = false;
  place.id = place.last_id = 0;
  try {
    if (!keeper_.open()) keeper_ = make_keeper_file();
    place.child =
        std::make_unique<ChildProcess>(settings_.command, settings_.limits, keeper_, log_);
  } catch (const Error& error) {
    return replace(place, FailureKind::environment_error, error.what(), now);
  }
  place.state = Place::State::greeting;
  place.since = now;
  place.child->send(kGreeting);
}

void ProcessPool::expire_queue(Time now) {
  for (uint64_t number; (number = next_in_queue()) != 0;) {
    if (now - std::max(requests_.at(number).submitted, last_answer_) <= timeout_) return;
    queue_.pop_front();
    fail(number, FailureKind::timeout,
         fmt::format("{}: no process took the {} for {} s{}", settings_.timeout_key,
                     settings_.request_type, settings_.turn_timeout,
                     last_failure_.empty() ? "" : "; the last one that failed: " + last_failure_));
  }
}

// Does nothing for a withdrawn request.
void ProcessPool::finish(uint64_t request, Turn result) {
  const auto found = requests_.find(request);
  if (found == requests_.end()) return;
  found->second.done = true;
  found->second.result = std::move(result);
}

void ProcessPool::fail(uint64_t request, FailureKind kind, const std::string& message) {
  finish(request, {.kind = Turn::Kind::failed, .failure = message, .failure_kind = kind});
}

void ProcessPool::replace(Place& place, FailureKind kind, const std::string& message, Time now) {
  last_failure_ = message;
  fail(std::exchange(place.request, 0), kind, message);
  if (place.child && !place.child->end()) dying_.push_back(place.child->keeper_pid());
  place.child.reset();
  place.state = Place::State::empty;
  place.not_before = now;
  if (place.answered) return;
  const int doublings = std::min(place.starts_in_vain++, 16);
  place.not_before += std::min<milliseconds>(kFirstBackoff * (1 << doublings), kLongestBackoff);
}

void ProcessPool::refuse_all(const std::string& reason) {
  refusal_ = reason;
  for (uint64_t number; (number = next_in_queue()) != 0; queue_.pop_front()) {
    fail(number, FailureKind::bad_answer, reason);
  }
}

}  // namespace leeway
