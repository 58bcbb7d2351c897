// A program that a test talks with while it runs, over pipes or on a terminal of its own.
#pragma once

#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <vector>

#include "run_program.h"

namespace leeway {

class LiveProgram {
 public:
  enum class Streams { pipes, terminal };

  // Whether the machine has terminals to give: a bare folder that is used as a system has none.
  static bool has_terminals() {
    int ours = -1, theirs = -1;
    if (::openpty(&ours, &theirs, nullptr, nullptr, nullptr) != 0) return false;
    ::close(ours);
    ::close(theirs);
    return true;
  }

  // `before`: words of a program that starts this one, such as `ip netns exec NAME`.
  LiveProgram(std::vector<std::string> args, Streams streams,
              const std::vector<std::string>& before = {}) {
    args.insert(args.begin(), leeway_program());
    args.insert(args.begin(), before.begin(), before.end());
    ::signal(SIGPIPE, SIG_IGN);
    if (streams == Streams::terminal) {
      child_ = ::forkpty(&in_, nullptr, nullptr, nullptr);
      if (child_ == 0) run_detail::exec_child(args, {}, 0, 1, 2);
      out_ = ::dup(in_);
    } else {
      run_detail::Pipe in, out;
      child_ = ::fork();
      if (child_ == 0) {
        run_detail::exec_child(args, {}, in.ends[0], out.ends[1], out.ends[1]);
      }
      in_ = ::dup(in.ends[1]);
      out_ = ::dup(out.ends[0]);
      ::fcntl(in_, F_SETFD, FD_CLOEXEC);
    }
    if (child_ < 0) throw std::runtime_error("fork failed");
  }
  ~LiveProgram() {
    if (child_ > 0) ::kill(child_, SIGKILL);
    wait();
    ::close(in_);
    ::close(out_);
  }
  LiveProgram(const LiveProgram&) = delete;
  LiveProgram& operator=(const LiveProgram&) = delete;

  // What a program that has ended does not read is lost.
  void type(const std::string& text) { (void)!::write(in_, text.data(), text.size()); }
  void send(int signal) { ::kill(child_, signal); }
  pid_t process() const { return child_; }

  // All that it has printed, both streams together.
  const std::string& printed() const { return printed_; }
  // Reads until `done` holds of it; false after two minutes, or when it has ended without.
  template <class Condition>
  bool wait_until(const Condition& done) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    while (!done(printed_)) {
      if (std::chrono::steady_clock::now() > deadline || !read_some()) return done(printed_);
    }
    return true;
  }
  bool wait_for(const std::string& text) {
    return wait_until([&](const std::string& all) { return contains(all, text); });
  }
  bool has_ended() {
    if (child_ > 0 && ::waitpid(child_, &status_, WNOHANG) == child_) child_ = -1;
    return child_ <= 0;
  }
  // The exit code, or minus the signal; all that it printed is read.
  int wait() {
    while (child_ > 0 && !has_ended()) read_some();
    while (read_some(0)) {
    }
    return WIFEXITED(status_) ? WEXITSTATUS(status_) : -WTERMSIG(status_);
  }

 private:
  // False at the end of its output; also if there is none now and `patience`, in milliseconds, is
  // 0.
  bool read_some(int patience = 100) {
    pollfd waiting = {out_, POLLIN, 0};
    if (::poll(&waiting, 1, patience) <= 0) return patience > 0;
    char buffer[1 << 14];
    const ssize_t got = ::read(out_, buffer, sizeof buffer);
    if (got > 0) printed_.append(buffer, static_cast<size_t>(got));
    return got > 0;
  }

  pid_t child_ = -1;
  int in_ = -1, out_ = -1, status_ = 0;
  std::string printed_;
};

}  // namespace leeway
