#include "pool/child_servers.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "base/printable.h"
#include "leeway/error.h"

extern char** environ;  // of the process; the children's has a key more

namespace leeway {
namespace {

constexpr double kLongestStart = 120.0;  // seconds until a server listens
constexpr double kRestartDelay = 0.5;    // seconds; doubles
constexpr const char* kListening = "listening on ";

std::string new_key() {
  std::random_device random;
  std::string key;
  for (int k = 0; k < 8; ++k) key += fmt::format("{:08x}", random());
  return key;
}

std::string ended_text(int status) {
  if (WIFSIGNALED(status)) return fmt::format("was killed by signal {}", WTERMSIG(status));
  return fmt::format("ended with exit code {}", WEXITSTATUS(status));
}

// Bytes of a file from `begin` on.
std::string rest_of(const std::string& path, size_t begin) {
  std::ifstream file(path, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(begin));
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

ChildServers::ChildServers(ChildServersOptions options)
    : options_(std::move(options)), key_(new_key()) {
  std::error_code error;
  std::filesystem::create_directories(options_.log_folder, error);
  if (error) {
    throw Error(fmt::format("{}: cannot be made: {}", options_.log_folder, error.message()));
  }
  for (int64_t number = 1; number <= options_.count; ++number) {
    children_.push_back({.number = number});
    start(children_.back(), 0.0);
  }
}

ChildServers::~ChildServers() {
  for (const Child& child : children_) {
    if (child.pid > 0) kill(child.pid, SIGTERM);
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  for (Child& child : children_) {
    while (child.pid > 0 && waitpid(child.pid, nullptr, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() >= end) {
        kill(child.pid, SIGKILL);
        waitpid(child.pid, nullptr, 0);
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
}

std::string ChildServers::log_of(const Child& child) const {
  return fmt::format("{}/server_{}.log", options_.log_folder, child.number);
}

void ChildServers::start(Child& child, double now) {
  std::vector<std::string> words = {
      options_.program,     "serve", options_.model, "--port", "0", "--weights-root",
      options_.weights_root};
  words.insert(words.end(), options_.options.begin(), options_.options.end());
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const std::string name = "LEEWAY_API_KEY=";
  std::string key = name + key_;
  std::vector<char*> environment;
  for (char** each = environ; *each != nullptr; ++each) {
    if (!std::string_view(*each).starts_with(name)) environment.push_back(*each);
  }
  environment.push_back(key.data());
  environment.push_back(nullptr);
  const std::string log = log_of(child);
  const int file = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  if (file < 0 || nothing < 0) {
    throw Error(fmt::format("{}: cannot be written: {}", log, std::strerror(errno)));
  }
  std::error_code ignored;
  child.read = static_cast<size_t>(std::filesystem::file_size(log, ignored));
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) {
    // Only what a signal handler may do: other threads of the parent may hold any lock.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    setpgid(0, 0);  // Ctrl-C in a terminal is the parent's to handle
    dup2(nothing, 0);
    dup2(nothing, 1);
    dup2(file, 2);
    close_range(3, ~0u, 0);  // connections of the parent end when it closes them
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    execve(arguments[0], arguments.data(), environment.data());
    _exit(127);
  }
  close(file);
  close(nothing);
  if (pid < 0) throw Error(fmt::format("a server cannot be started: {}", std::strerror(errno)));
  child.pid = pid;
  child.url.clear();
  child.started = now;
  ++child.starts;
}

void ChildServers::look(Child& child, double now) {
  if (child.pid < 0) {
    if (child.starts <= options_.most_restarts && now >= child.restart_at) start(child, now);
    return;
  }
  if (child.started == 0.0) child.started = now;
  int status = 0;
  const bool late = child.url.empty() && now - child.started > kLongestStart;
  if (late) kill(child.pid, SIGKILL);
  if (waitpid(child.pid, &status, late ? 0 : WNOHANG) == child.pid) {
    std::string words = rest_of(log_of(child), child.read);
    while (words.ends_with('\n')) words.pop_back();
    words = printable(words.substr(words.rfind('\n') + 1).substr(0, 200));
    child.end = late ? "did not listen in time" : ended_text(status);
    if (!words.empty() && !words.starts_with(kListening)) child.end += ": " + words;
    child.pid = -1;
    if (!child.url.empty()) ends_[child.url] = child.end;
    child.url.clear();
    child.restart_at =
        now + kRestartDelay * static_cast<double>(int64_t{1} << std::min<int64_t>(child.starts, 6));
    const bool again = child.starts <= options_.most_restarts;
    log_.push_back(fmt::format("server process {} {}; {}", child.number, child.end,
                               again ? "it is started again" : "it is given up"));
    return;
  }
  if (!child.url.empty()) return;
  const std::string text = rest_of(log_of(child), child.read);
  const size_t at = text.find(kListening);
  const size_t line_end = at == std::string::npos ? at : text.find('\n', at);
  if (line_end == std::string::npos) return;
  const size_t begin = at + std::strlen(kListening);
  child.url = text.substr(begin, line_end - begin);
  log_.push_back(fmt::format("server process {} listens on {}", child.number, child.url));
}

std::vector<ServerAddress> ChildServers::servers(double now) {
  std::vector<ServerAddress> out;
  for (Child& child : children_) {
    look(child, now);
    if (!child.url.empty()) out.push_back({child.url, child.url});
  }
  return out;
}

std::string ChildServers::why_gone(const std::string& url) const {
  const auto end = ends_.find(url);
  return end == ends_.end() ? ServerSource::why_gone(url) : "its process " + end->second;
}

std::string ChildServers::given_up() const {
  std::string last;
  for (const Child& child : children_) {
    if (child.pid > 0 || child.starts <= options_.most_restarts) return "";
    last = child.end;
  }
  return fmt::format("all {} server processes were given up, the last {}", children_.size(), last);
}

std::vector<pid_t> ChildServers::processes() const {
  std::vector<pid_t> out;
  for (const Child& child : children_) {
    if (child.pid > 0) out.push_back(child.pid);
  }
  return out;
}

}  // namespace leeway
