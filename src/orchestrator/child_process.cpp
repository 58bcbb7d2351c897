#include "orchestrator/child_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <sstream>
#include <vector>

#include "leeway/error.h"
#include "orchestrator/keeper_image.h"

namespace leeway {
namespace {

constexpr size_t kReadSize = 1 << 16;
constexpr int kReadsAtOnce = 32;       // so that endless output does not block the caller
constexpr size_t kLoggedLines = 1000;  // kept between two calls; earlier ones are dropped
constexpr size_t kKeptLines = 20, kKeptColumns = 500, kQuotedBytes = 200;
constexpr size_t kMostReports = 4096;  // bytes
constexpr int kAboveStreams = 16;      // keeps files away from the child's standard streams
constexpr int kKeeperControl = 3, kKeeperProgram = 4;  // in the child

[[noreturn]] void fail(const char* what) {
  throw Error(fmt::format("cannot {}: {}", what, std::strerror(errno)));
}

// The same file under a high descriptor.
OpenFile out_of_the_way(OpenFile file) {
  OpenFile high(::fcntl(file.get(), F_DUPFD_CLOEXEC, kAboveStreams));
  if (!high.open()) fail("open a file");
  return high;
}

struct Pipe {
  OpenFile read, write;
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) fail("make a pipe");
    read = OpenFile(ends[0]);
    write = OpenFile(ends[1]);
  }
};

void never_wait(const OpenFile& file) { ::fcntl(file.get(), F_SETFL, O_NONBLOCK); }

// Like write(), but a closed reader gives EPIPE without a signal.
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

}  // namespace

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

void OpenFile::close() {
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = -1;
}

OpenFile make_keeper_file() {
  OpenFile file(::memfd_create("leeway-keeper", MFD_CLOEXEC));
  if (!file.open()) fail("make a file in memory");
  const std::span<const char> image = keeper_image();
  for (size_t done = 0; done < image.size();) {
    const ssize_t put = ::write(file.get(), image.data() + done, image.size() - done);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) fail("write a file in memory");
    done += static_cast<size_t>(put);
  }
  // A file that is open for writing cannot be executed.
  OpenFile readable(
      ::open(fmt::format("/proc/self/fd/{}", file.get()).c_str(), O_RDONLY | O_CLOEXEC));
  return out_of_the_way(std::move(readable.open() ? readable : file));
}

ChildProcess::ChildProcess(const std::string& command, const std::string& command_key,
                           const ProcessLimits& limits, const OpenFile& keeper,
                           std::deque<std::string>& log)
    : command_(command), command_key_(command_key), limits_(limits), log_(log) {
  Pipe in, out, err;
  int both[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, both) != 0) fail("make a socket");
  OpenFile own(both[0]), theirs(both[1]);
  theirs = out_of_the_way(std::move(theirs));
  const std::string memory = std::to_string(limits.max_memory_bytes),
                    cpu = std::to_string(limits.max_cpu_seconds),
                    processes = std::to_string(limits.max_processes);
  const char* const arguments[] = {"leeway-keeper", command.c_str(),   memory.c_str(),
                                   cpu.c_str(),     processes.c_str(), nullptr};
  keeper_ = ::fork();
  if (keeper_ == 0) {
    // Only async-signal-safe calls: this is a fork of a multithreaded process.
    ::setpgid(0, 0);
    if (::dup2(in.read.get(), 0) < 0 || ::dup2(out.write.get(), 1) < 0 ||
        ::dup2(err.write.get(), 2) < 0 || ::dup2(theirs.get(), kKeeperControl) < 0 ||
        ::dup2(keeper.get(), kKeeperProgram) < 0 ||
        ::fcntl(kKeeperProgram, F_SETFD, FD_CLOEXEC) < 0) {
      ::_exit(127);
    }
    ::close_range(kKeeperProgram + 1, ~0U, 0);
    for (const int signal : {SIGPIPE, SIGINT, SIGTERM, SIGHUP, SIGXFSZ, SIGCHLD}) {
      ::signal(signal, SIG_DFL);
    }
    sigset_t none;
    sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    ::fexecve(kKeeperProgram, const_cast<char* const*>(arguments), environ);
    constexpr std::string_view kProblem = "limit keeper 0\n";
    (void)!::write(kKeeperControl, kProblem.data(), kProblem.size());
    ::_exit(127);
  }
  if (keeper_ < 0) fail("start a process");
  input_ = std::move(in.write);
  output_ = std::move(out.read);
  errors_ = std::move(err.read);
  control_ = std::move(own);
  for (const OpenFile* file : {&input_, &output_, &errors_, &control_}) never_wait(*file);
}

pid_t ChildProcess::pid() {
  if (program_ < 0) read_reports();
  return program_ < 0 ? keeper_ : program_;
}

void ChildProcess::send(std::string_view line) {
  unsent_ += line;
  unsent_ += '\n';
  flush();
}

void ChildProcess::flush() {
  while (input_.open() && !unsent_.empty()) {
    const ssize_t put = write_quietly(input_.get(), unsent_);
    if (put > 0) {
      unsent_.erase(0, static_cast<size_t>(put));
    } else if (put < 0 && errno == EINTR) {
      continue;
    } else {
      if (errno != EAGAIN) input_.close();  // its end is detected where its output is read
      return;
    }
  }
}

bool ChildProcess::receive() {
  read_errors();
  return read_some(output_, received_);
}

std::optional<std::string> ChildProcess::next_line() {
  const size_t end = received_.find('\n', searched_);
  if (end == std::string::npos) {
    received_.erase(0, taken_);
    taken_ = 0;
    searched_ = received_.size();
    return std::nullopt;
  }
  std::string line = received_.substr(taken_, end - taken_);
  taken_ = searched_ = end + 1;
  return line;
}

bool ChildProcess::exited() const {
  siginfo_t info = {};
  const int rc = ::waitid(P_PID, static_cast<id_t>(keeper_), &info, WEXITED | WNOHANG | WNOWAIT);
  return rc != 0 ? errno == ECHILD : info.si_pid == keeper_;
}

bool ChildProcess::end() {
  if (!waited_for_) {
    read_reports();
    // The keeper itself is never killed: only it knows the other processes.
    if (control_.open()) ::shutdown(control_.get(), SHUT_WR);
    waited_for_ = ::waitpid(keeper_, &status_, WNOHANG) != 0;
    if (waited_for_) read_reports();
    control_.close();
  }
  return waited_for_;
}

std::string ChildProcess::end_text() const {
  if (limit_ == "max_processes") {
    return fmt::format(
        "was killed with all that it started: environment.max_processes = {}, and "
        "there were {}",
        limits_.max_processes, limit_value_);
  }
  if (limit_ == "max_cpu_seconds") {
    return fmt::format("was killed: environment.max_cpu_seconds = {} are used up",
                       limits_.max_cpu_seconds);
  }
  if (limit_ == "keeper") {
    return "could not be started: this system cannot run programs from memory (memfd_create), "
           "which "
           "process environments need";
  }
  // A program that exceeds its memory limit fails in its own way.
  const bool failed = WIFSIGNALED(status_) || WEXITSTATUS(status_) != 0;
  const std::string memory =
      failed && limits_.max_memory_bytes > 0
          ? fmt::format(" (environment.max_memory_bytes = {} is the limit of its memory)",
                        limits_.max_memory_bytes)
          : "";
  if (WIFSIGNALED(status_)) {
    return fmt::format("was ended by signal {}{}", WTERMSIG(status_), memory);
  }
  const int code = WEXITSTATUS(status_);
  const char* shell = code == 127 ? "did not find" : code == 126 ? "could not run" : nullptr;
  return fmt::format("ended with exit status {}{}{}", code,
                     shell == nullptr ? ""
                                      : fmt::format(" (/bin/sh {} a program of {} = {})", shell,
                                                    command_key_, in_quotes(command_)),
                     memory);
}

std::string ChildProcess::last_words() {
  read_errors();
  std::vector<std::string> lines(kept_.begin(), kept_.end());
  if (!error_line_.empty()) lines.push_back(error_line_);
  if (lines.size() > kKeptLines) lines.erase(lines.begin());
  if (lines.empty()) return "";
  return fmt::format("; it wrote to stderr: {}", fmt::join(lines, " | "));
}

void ChildProcess::note(const std::string& line) {
  log_.push_back(fmt::format("{}: {}", pid(), line));
  if (log_.size() > kLoggedLines) log_.pop_front();
}

bool ChildProcess::read_some(OpenFile& file, std::string& to) {
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

void ChildProcess::read_errors() {
  std::string text;
  for (int i = 0; i < kReadsAtOnce && read_some(errors_, text); ++i) {
    for (const char c : text) {
      if (c == '\n') {
        note(error_line_);
        kept_.push_back(std::exchange(error_line_, {}));
        if (kept_.size() > kKeptLines) kept_.pop_front();
      } else if (error_line_.size() < kKeptColumns) {
        error_line_ += static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? ' ' : c;
      }
    }
    text.clear();
  }
}

void ChildProcess::read_reports() {
  while (control_.open() && reports_.size() < kMostReports) {
    char buffer[256];
    const ssize_t got = ::read(control_.get(), buffer, sizeof buffer);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    reports_.append(buffer, static_cast<size_t>(got));
  }
  for (size_t end; (end = reports_.find('\n')) != std::string::npos; reports_.erase(0, end + 1)) {
    std::istringstream line(reports_.substr(0, end));
    std::string word;
    line >> word;
    if (word == "pid") line >> program_;
    if (word == "limit") line >> limit_ >> limit_value_;
  }
}

}  // namespace leeway
