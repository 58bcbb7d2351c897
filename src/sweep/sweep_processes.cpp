#include "sweep/sweep_processes.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "leeway/error.h"

namespace leeway {
namespace {

int open_file(const std::string& path, int flags) {
  const int file = ::open(path.c_str(), flags | O_CLOEXEC, 0644);
  if (file < 0) throw Error(fmt::format("{}: cannot open: {}", path, std::strerror(errno)));
  return file;
}

}  // namespace

SweepProcesses::~SweepProcesses() {
  for (const Process& process : processes_) ::kill(process.pid, SIGKILL);
  for (const Process& process : processes_) {
    while (::waitpid(process.pid, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
}

void SweepProcesses::start(size_t run, std::vector<std::string> args, const std::string& out,
                           const std::string& err) {
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  const int files[3] = {open_file("/dev/null", O_RDONLY),
                        open_file(out, O_WRONLY | O_CREAT | O_TRUNC),
                        open_file(err, O_WRONLY | O_CREAT | O_TRUNC)};
  const pid_t parent = ::getpid(), pid = ::fork();
  if (pid == 0) {
    for (int k = 0; k < 3; ++k) {
      if (::dup2(files[k], k) < 0) ::_exit(127);
    }
    // A sweep that is killed takes its runs with it.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);
    if (in_child_) in_child_();
    ::execv("/proc/self/exe", argv.data());
    ::_exit(127);
  }
  for (const int file : files) ::close(file);
  if (pid < 0) throw Error(fmt::format("cannot start a run: {}", std::strerror(errno)));
  processes_.push_back({pid, run, std::chrono::steady_clock::now()});
}

std::optional<SweepProcesses::Ended> SweepProcesses::reap() {
  for (auto process = processes_.begin(); process != processes_.end(); ++process) {
    int status = 0;
    if (::waitpid(process->pid, &status, WNOHANG) != process->pid) continue;
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - process->start;
    const Ended ended{process->run, status, spent.count()};
    processes_.erase(process);
    return ended;
  }
  return std::nullopt;
}

}  // namespace leeway
