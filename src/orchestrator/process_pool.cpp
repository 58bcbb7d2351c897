#include "orchestrator/process_pool.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>

#include "leeway/error.h"

namespace leeway {
namespace {

using std::chrono::milliseconds;
using Kind = JsonValue::Kind;

constexpr int kProtocol = 1;
constexpr const char* kGreeting = "{\"type\": \"hello\", \"protocol\": 1}";

// Many rollouts poll in turn: one look at the processes serves all of them.
constexpr auto kPumpSlice = std::chrono::microseconds(200);
constexpr auto kLastGrace = milliseconds(1000);    // to end by itself, once its input is closed
constexpr auto kStatusGrace = milliseconds(200);   // between the end of output and the exit
constexpr auto kFirstBackoff = milliseconds(100);  // after a process that answered nothing
constexpr auto kLongestBackoff = milliseconds(5000);
constexpr size_t kReadSize = 1 << 16;
constexpr int kReadsAtOnce = 32;       // so that endless output holds nobody up
constexpr size_t kLoggedLines = 1000;  // between two looks; earlier ones go
constexpr size_t kKeptLines = 20, kKeptColumns = 500, kQuotedBytes = 200;

// The beginning of what a process wrote, fit for a message.
std::string in_quotes(std::string_view line) {
  std::string out = "\"";
  for (const char c : line.substr(0, kQuotedBytes)) {
    if (c == '"' || c == '\\') {
      out += fmt::format("\\{}", c);
    } else if (c >= 0x20 && c < 0x7f) {
      out += c;
    } else {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    }
  }
  return out + (line.size() > kQuotedBytes ? "\" .." : "\"");
}

class File {
 public:
  explicit File(int descriptor = -1) : descriptor_(descriptor) {}
  ~File() { close(); }
  File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  File& operator=(File&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  void close() {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = -1;
  }
  int get() const { return descriptor_; }
  bool open() const { return descriptor_ >= 0; }

 private:
  int descriptor_;
};

struct Pipe {
  File read, write;
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) {
      throw Error(fmt::format("cannot make a pipe: {}", std::strerror(errno)));
    }
    read = File(ends[0]);
    write = File(ends[1]);
  }
};

void never_wait(const File& file) { ::fcntl(file.get(), F_SETFL, O_NONBLOCK); }

// write(), but a reader that is gone is EPIPE and no signal.
ssize_t write_quietly(int file, std::string_view bytes) {
  sigset_t pipe, pending, before;
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  sigpending(&pending);
  pthread_sigmask(SIG_BLOCK, &pipe, &before);
  const ssize_t put = ::write(file, bytes.data(), bytes.size());
  const int error = errno;
  if (put < 0 && error == EPIPE && sigismember(&pending, SIGPIPE) == 0) {
    const timespec none = {};
    sigtimedwait(&pipe, nullptr, &none);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  errno = error;
  return put;
}

// Runs the command $1 in this very process, beside a watcher that belongs to nobody but its group:
// it waits for the end of file 3, and then kills the group. The command has no part in either.
constexpr const char* kWatched =
    "( ( read -r line; kill -9 0 ) <&3 3<&- >/dev/null 2>&1 & )\n"
    "exec /bin/sh -c \"$1\" 3<&-";

std::string status_text(int status, const std::string& command) {
  if (WIFSIGNALED(status)) return fmt::format("was ended by signal {}", WTERMSIG(status));
  const int code = WEXITSTATUS(status);
  const char* shell = code == 127   ? " (/bin/sh did not find a program of environment.command = "
                      : code == 126 ? " (/bin/sh could not run a program of environment.command = "
                                    : nullptr;
  return fmt::format("ended with exit status {}{}", code,
                     shell != nullptr ? shell + in_quotes(command) + ")" : "");
}

}  // namespace

// One process and its three pipes. Nothing here waits.
class ProcessPool::Child {
 public:
  // All of its group is killed when the writing end of `lifeline` is closed. Lines of its stderr go
  // to `log` too, which outlives it. Throws Error.
  Child(const std::string& command, const File& lifeline, std::deque<std::string>& log)
      : log_(log) {
    Pipe in, out, err;
    const char* const arguments[] = {"sh", "-c", kWatched, "sh", command.c_str(), nullptr};
    pid_ = ::fork();
    if (pid_ == 0) {
      // Only what is safe in a copy of one thread of many.
      ::setpgid(0, 0);
      if (::dup2(in.read.get(), 0) < 0 || ::dup2(out.write.get(), 1) < 0 ||
          ::dup2(err.write.get(), 2) < 0 || ::dup2(lifeline.get(), 3) < 0 ||
          ::fcntl(3, F_SETFD, 0) < 0) {
        ::_exit(127);
      }
      ::close_range(4, ~0U, 0);
      for (const int signal : {SIGPIPE, SIGINT, SIGTERM, SIGCHLD}) ::signal(signal, SIG_DFL);
      sigset_t none;
      sigemptyset(&none);
      ::sigprocmask(SIG_SETMASK, &none, nullptr);
      ::execv("/bin/sh", const_cast<char* const*>(arguments));
      ::_exit(127);
    }
    if (pid_ < 0) throw Error(fmt::format("cannot start a process: {}", std::strerror(errno)));
    ::setpgid(pid_, pid_);  // whichever of the two is first: killing the group works from here on
    input_ = std::move(in.write);
    output_ = std::move(out.read);
    errors_ = std::move(err.read);
    for (const File* file : {&input_, &output_, &errors_}) never_wait(*file);
  }

  pid_t pid() const { return pid_; }

  void send(std::string_view line) {
    unsent_ += line;
    unsent_ += '\n';
    flush();
  }
  void flush() {
    while (input_.open() && !unsent_.empty()) {
      const ssize_t put = write_quietly(input_.get(), unsent_);
      if (put > 0) {
        unsent_.erase(0, static_cast<size_t>(put));
      } else if (put < 0 && errno == EINTR) {
        continue;
      } else {
        if (errno != EAGAIN) input_.close();  // its end is seen where its output is read
        return;
      }
    }
  }
  void close_input() { input_.close(); }

  // Reads a piece of its output. False: there is none at the moment.
  bool receive() {
    read_errors();
    return read_some(output_, received_);
  }
  // The first whole line received, without its end.
  std::optional<std::string> next_line() {
    const size_t end = received_.find('\n', searched_);
    if (end == std::string::npos) {
      searched_ = received_.size();
      return std::nullopt;
    }
    std::string line = received_.substr(0, end);
    received_.erase(0, end + 1);
    searched_ = 0;
    return line;
  }
  // Of a line that has no end yet.
  const std::string& unfinished_line() const { return received_; }
  bool output_open() const { return output_.open(); }

  // Has ended; it can still be waited for.
  bool exited() const {
    siginfo_t info = {};
    const int rc = ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT);
    return rc != 0 ? errno == ECHILD : info.si_pid == pid_;
  }
  // Kills its whole group, before its number can belong to others. True: it has been waited for;
  // false: somebody must.
  bool end() {
    if (!waited_for_) {
      ::kill(-pid_, SIGKILL);
      waited_for_ = ::waitpid(pid_, &status_, WNOHANG) != 0;
    }
    return waited_for_;
  }
  int status() const { return status_; }  // of one that has been waited for

  // "; it wrote to stderr: a | b", or nothing.
  std::string last_words() {
    read_errors();
    std::vector<std::string> lines(kept_.begin(), kept_.end());
    if (!error_line_.empty()) lines.push_back(error_line_);
    if (lines.size() > kKeptLines) lines.erase(lines.begin());
    if (lines.empty()) return "";
    return fmt::format("; it wrote to stderr: {}", fmt::join(lines, " | "));
  }

 private:
  bool read_some(File& file, std::string& to) {
    while (file.open()) {
      char buffer[kReadSize];
      const ssize_t got = ::read(file.get(), buffer, sizeof buffer);
      if (got > 0) {
        to.append(buffer, static_cast<size_t>(got));
        return true;
      }
      if (got < 0 && errno == EINTR) continue;
      if (got == 0 || errno != EAGAIN) file.close();
      break;
    }
    return false;
  }
  void read_errors() {
    std::string text;
    for (int i = 0; i < kReadsAtOnce && read_some(errors_, text); ++i) {
      for (const char c : text) {
        if (c == '\n') {
          log_.push_back(fmt::format("{}: {}", pid_, error_line_));
          if (log_.size() > kLoggedLines) log_.pop_front();
          kept_.push_back(std::exchange(error_line_, {}));
          if (kept_.size() > kKeptLines) kept_.pop_front();
        } else if (error_line_.size() < kKeptColumns) {
          error_line_ += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? ' ' : c;
        }
      }
      text.clear();
    }
  }

  pid_t pid_ = -1;
  bool waited_for_ = false;
  int status_ = 0;
  File input_, output_, errors_;
  std::string unsent_, received_, error_line_;
  size_t searched_ = 0;  // bytes of received_ without a line's end
  std::deque<std::string> kept_;
  std::deque<std::string>& log_;
};

// Its writing end closes when this process ends, however that happens. (The signal that Linux sends
// on a parent's end reaches one process only, and comes when the thread that made it ends.)
struct ProcessPool::Lifeline {
  Pipe pipe;
};

// Where a process is, or will be once one is needed.
struct ProcessPool::Place {
  enum class State { empty, greeting, idle, busy };
  State state = State::empty;
  std::unique_ptr<Child> child;
  uint64_t request = 0;  // what it is started for or at work on; 0: nothing
  Time since;            // greeting, busy: when that began
  std::optional<Time> output_end;
  bool answered = false;  // anything at all
  int starts_in_vain = 0;
  Time not_before;  // of the next start
};

ProcessPool::ProcessPool(ProcessPoolSettings settings, ReadAnswer read_answer)
    : settings_(std::move(settings)),
      timeout_(settings_.turn_timeout),
      read_answer_(std::move(read_answer)) {
  LEEWAY_CHECK(settings_.processes > 0, "a pool has processes");
  for (int64_t i = 0; i < settings_.processes; ++i) places_.push_back(std::make_unique<Place>());
}

ProcessPool::~ProcessPool() {
  std::vector<Child*> left;
  for (const auto& place : places_) {
    if (!place->child) continue;
    place->child->close_input();
    left.push_back(place->child.get());
  }
  const Time deadline = std::chrono::steady_clock::now() + kLastGrace;
  while (!left.empty() && std::chrono::steady_clock::now() < deadline) {
    std::erase_if(left, [](Child* child) {
      // What it still has to say must not be in its way.
      for (int i = 0; i < kReadsAtOnce && child->receive(); ++i) {
        while (child->next_line()) {
        }
      }
      return child->exited() && child->end();
    });
    if (!left.empty()) std::this_thread::sleep_for(milliseconds(1));
  }
  for (Child* child : left) {
    if (!child->end()) dying_.push_back(child->pid());
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
  request.line = fmt::format("{{\"type\": \"turn\", \"id\": {}, {}}}", number, members);
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
  // While nobody calls, no request can be handed out: those that wait are not late for it.
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
  Child& child = *place.child;
  const bool exited = child.exited();  // first: all that it wrote is read after it
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
    const std::string end = status_text(child.status(), settings_.command);
    replace(place, FailureKind::environment_error,
            fmt::format("process {} {} {}{}", child.pid(), end, when, child.last_words()), now);
  } else if (place.output_end && now - *place.output_end > kStatusGrace) {
    replace(place, FailureKind::environment_error,
            fmt::format("process {} closed its output {}{}", child.pid(), when, child.last_words()),
            now);
  } else if (place.state != Place::State::idle && now - place.since > timeout_) {
    const char* what = place.state == Place::State::greeting ? "hello" : "answer";
    replace(place, FailureKind::timeout,
            fmt::format("environment.turn_timeout: process {} gave no {} within {} s and was "
                        "killed{}",
                        child.pid(), what, settings_.turn_timeout, child.last_words()),
            now);
  }
}

// False: the process is gone.
bool ProcessPool::take_lines(Place& place, Time now) {
  const auto most = static_cast<size_t>(settings_.max_output_bytes);
  const auto too_long = [&](const std::string& line) {
    if (line.size() <= most) return false;
    replace(place, FailureKind::bad_answer,
            fmt::format("environment.max_output_bytes: process {} wrote a line of more than {} "
                        "bytes: {}",
                        place.child->pid(), most, in_quotes(line)),
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
    if (place.state == Place::State::idle) throw Error("nothing was asked");
    const JsonValue answer = read_json("JSON", line);
    if (!answer.is(Kind::object)) {
      throw Error(fmt::format("an answer is an object, not {}", name_of(answer.kind)));
    }
    const JsonValue* id = answer.find("id");
    if (id == nullptr || !id->is(Kind::number) ||
        std::strtod(id->text.c_str(), nullptr) != static_cast<double>(place.request)) {
      throw Error(fmt::format("the answer's id must be the request's, {}", place.request));
    }
    Turn turn = read_answer_(answer);
    finish(place.request, std::move(turn));
  } catch (const Error& error) {
    return replace(place, FailureKind::bad_answer,
                   fmt::format("process {} wrote {}: {}{}", place.child->pid(), in_quotes(line),
                               error.what(), place.child->last_words()),
                   now);
  }
  place.state = Place::State::idle;
  place.request = 0;
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
        fmt::format("the program of environment.command speaks protocol {}, and this "
                    "version of Leeway protocol {}",
                    in_quotes(protocol->text), kProtocol));
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
  request.line.clear();
  place.state = Place::State::busy;
  place.since = now;
}

// The next request that is still wanted; 0: none. It stays in the queue.
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
  try {
    if (!lifeline_) lifeline_ = std::make_unique<Lifeline>();
    place.child = std::make_unique<Child>(settings_.command, lifeline_->pipe.read, log_);
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
         fmt::format("environment.turn_timeout: no process took the turn for {} s{}",
                     settings_.turn_timeout,
                     last_failure_.empty() ? "" : "; the last one that failed: " + last_failure_));
  }
}

// Nothing happens for a request that was withdrawn.
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
  if (place.child && !place.child->end()) dying_.push_back(place.child->pid());
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
