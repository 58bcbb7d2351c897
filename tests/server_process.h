// A process that listens on loopback, `leeway serve` most often, which a test may kill, stop and
// start again.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "run_program.h"

namespace leeway {

class ServerProcess {
 public:
  static constexpr const char* kPort = "PORT";

  // Listens when this returns. `log` is written anew with every start.
  ServerProcess(const std::string& model, const std::string& weights_root, std::string log)
      : ServerProcess({leeway_program(), "serve", model, "--port", kPort, "--weights-root",
                       weights_root, "--threads", "1"},
                      std::move(log)) {}
  // Any program that says "listening on URL"; the word kPort stands for its port.
  ServerProcess(std::vector<std::string> words, std::string log)
      : words_(std::move(words)), log_(std::move(log)) {
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
    std::vector<std::string> words = words_;
    std::replace(words.begin(), words.end(), std::string(kPort), port);
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
  std::vector<std::string> words_;
  std::string log_, url_;
  pid_t pid_ = -1;
};

}  // namespace leeway
