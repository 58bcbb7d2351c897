// A `leeway serve` process on loopback that a test may kill, stop and start again.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "run_program.h"

namespace leeway {

class ServerProcess {
 public:
  // Listens when this returns. `log` is written anew with every start.
  ServerProcess(std::string model, std::string weights_root, std::string log)
      : model_(std::move(model)), root_(std::move(weights_root)), log_(std::move(log)) {
    start();
  }
  ~ServerProcess() { kill(SIGKILL); }
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  const std::string& url() const { return url_; }
  void send(int signal) const { ::kill(pid_, signal); }
  // Ends it and takes its exit status, so that no process is left.
  void kill(int signal) {
    if (pid_ <= 0) return;
    ::kill(pid_, signal);
    int status = 0;
    ASSERT_EQ(::waitpid(pid_, &status, 0), pid_);
    pid_ = -1;
  }
  // On the port that it had before.
  void start() {
    ASSERT_LE(pid_, 0);
    std::filesystem::remove(log_);
    const std::string port = url_.empty() ? "0" : url_.substr(url_.rfind(':') + 1);
    std::vector<std::string> words = {leeway_program(), "serve", model_,      "--port", port,
                                      "--weights-root", root_,   "--threads", "1"};
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      const int file = ::open(log_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      ::dup2(file, 1);
      ::dup2(file, 2);
      ::execv(arguments[0], arguments.data());
      ::_exit(127);
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    std::string text;
    while (std::chrono::steady_clock::now() < end) {
      text = std::filesystem::exists(log_) ? file_text(log_) : "";
      const size_t at = text.find("listening on ");
      if (at != std::string::npos && text.find('\n', at) != std::string::npos) {
        url_ = text.substr(at + 13, text.find('\n', at) - at - 13);
        return;
      }
      if (::waitpid(pid_, nullptr, WNOHANG) == pid_) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    FAIL() << "the server does not listen: " << text;
  }

 private:
  std::string model_, root_, log_, url_;
  pid_t pid_ = -1;
};

}  // namespace leeway
