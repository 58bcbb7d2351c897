// A process between Leeway and a program that it runs: it ends with everything that the program has
// started, however that hides. A program of its own, small, which orchestrator/child_process.cpp
// holds as bytes and runs from memory.
//
//   keeper COMMAND MAX_MEMORY_BYTES MAX_CPU_SECONDS MAX_PROCESSES      (0: no limit)
//
// It runs COMMAND by /bin/sh with its own standard streams, and ends when that does, in the same
// way, or when the other end of file 3 is closed, which happens when Leeway ends, also by SIGKILL.
// As the reaper of its descendants it is the parent of those that made themselves orphans, in
// whatever session, so that no process gets away; before it ends it kills all of them. To file 3 it
// writes lines: "pid N" of the command, "limit NAME N" for a limit that ended it.

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

namespace {

constexpr int kLeeway = 3;
constexpr int kLookEvery = 20;  // milliseconds between counts of processes
constexpr int kKillingMilliseconds =
    10000;  // for processes that cannot die, such as in a hung read

struct Process {
  pid_t pid, parent;
  bool alive;
};

// All processes of the system; -1: /proc cannot be read. The list is reused between calls.
Process* list = nullptr;
int room = 0;

int read_processes() {
  DIR* folder = ::opendir("/proc");
  if (folder == nullptr) return -1;
  int count = 0;
  while (const dirent* entry = ::readdir(folder)) {
    if (entry->d_name[0] < '0' || entry->d_name[0] > '9') continue;
    char name[300], text[600];
    ::snprintf(name, sizeof name, "/proc/%s/stat", entry->d_name);
    const int file = ::open(name, O_RDONLY | O_CLOEXEC);
    if (file < 0) continue;
    const ssize_t got = ::read(file, text, sizeof text - 1);
    ::close(file);
    if (got <= 0) continue;
    text[got] = 0;
    // "PID (NAME) STATE PARENT ..", where NAME may contain anything.
    const char* after = ::strrchr(text, ')');
    char state = 0;
    int parent = 0;
    if (after == nullptr || ::sscanf(after + 1, " %c %d", &state, &parent) != 2) continue;
    if (count == room) {
      void* more = ::realloc(list, sizeof(Process) * static_cast<size_t>(room + 1024));
      if (more == nullptr) break;
      list = static_cast<Process*>(more);
      room += 1024;
    }
    list[count++] = {::atoi(entry->d_name), parent, state != 'Z' && state != 'X'};
  }
  ::closedir(folder);
  return count;
}

// Moves this process's descendants to the front of the list and returns their number.
int find_descendants() {
  const int count = read_processes();
  const auto swap = [](Process& a, Process& b) {
    const Process third = a;
    a = b;
    b = third;
  };
  int found = 0;
  pid_t parent = ::getpid();
  for (int next = 0; next <= found; ++next) {
    if (next > 0) parent = list[next - 1].pid;
    for (int i = found; i < count; ++i) {
      if (list[i].parent == parent) swap(list[found++], list[i]);
    }
  }
  return found;
}

int count_living() {
  const int count = find_descendants();
  int living = 0;
  for (int i = 0; i < count; ++i) living += list[i].alive ? 1 : 0;
  return living;
}

struct End {
  bool there = false;
  int status = 0;
  double cpu_seconds = 0.0;
};

void reap(pid_t command, End& end, bool& children) {
  for (;;) {
    int status = 0;
    rusage usage = {};
    const pid_t pid = ::wait4(-1, &status, WNOHANG, &usage);
    children = pid >= 0;
    if (pid <= 0) return;
    if (pid != command) continue;
    const auto seconds = [](const timeval& time) {
      return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
    };
    end = {true, status, seconds(usage.ru_utime) + seconds(usage.ru_stime)};
  }
}

// The first child that has ended, without reaping it; 0: none has.
pid_t ended_child() {
  siginfo_t info = {};
  return ::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 ? info.si_pid : 0;
}

// The command may only be reaped afterwards: until then its group id cannot be reused.
void kill_all(pid_t command, End& end) {
  ::kill(-command, SIGKILL);
  for (int waited = 0; waited < kKillingMilliseconds; ++waited) {
    const int count = find_descendants();
    for (int i = 0; i < count; ++i) {
      if (list[i].alive) ::kill(list[i].pid, SIGKILL);
    }
    bool children = false;
    reap(command, end, children);
    if (!children) return;
    const timespec moment = {0, 1000000};
    ::nanosleep(&moment, nullptr);
  }
}

void limit(int what, long long soft, long long hard) {
  const rlimit both = {static_cast<rlim_t>(soft), static_cast<rlim_t>(hard)};
  ::setrlimit(static_cast<__rlimit_resource>(what), &both);
}

[[noreturn]] void run_command(char* command, long long memory, long long cpu_seconds,
                              pid_t keeper) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // in case the keeper is killed
  if (::getppid() != keeper) ::_exit(127);
  ::close(kLeeway);
  if (memory > 0) limit(RLIMIT_AS, memory, memory);
  // A process that ignores the signal at the limit is killed a second later.
  if (cpu_seconds > 0) limit(RLIMIT_CPU, cpu_seconds, cpu_seconds + 1);
  sigset_t none;
  sigemptyset(&none);
  ::signal(SIGCHLD, SIG_DFL);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  char shell[] = "sh", option[] = "-c";
  char* const arguments[] = {shell, option, command, nullptr};
  ::execv("/bin/sh", arguments);
  ::_exit(127);
}

void report_limit(const char* name, long long value) {
  ::dprintf(kLeeway, "limit %s %lld\n", name, value);
}

// Ends with the command's exit status or signal.
[[noreturn]] void end_like(const End& end) {
  if (!end.there) ::_exit(128 + SIGKILL);
  if (WIFEXITED(end.status)) ::_exit(WEXITSTATUS(end.status));
  const int signal = WTERMSIG(end.status);
  limit(RLIMIT_CORE, 0, 0);
  sigset_t own;
  sigemptyset(&own);
  sigaddset(&own, signal);
  ::signal(signal, SIG_DFL);
  ::sigprocmask(SIG_UNBLOCK, &own, nullptr);
  ::kill(::getpid(), signal);
  ::_exit(128 + signal);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 127;
  const long long memory = ::atoll(argv[2]), cpu_seconds = ::atoll(argv[3]),
                  most_processes = ::atoll(argv[4]);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  ::prctl(PR_SET_NAME, "leeway-keeper");
  ::fcntl(kLeeway, F_SETFD, FD_CLOEXEC);
  ::signal(SIGPIPE, SIG_IGN);
  // Only an ended child interrupts the wait below.
  sigset_t child, before;
  sigemptyset(&child);
  sigaddset(&child, SIGCHLD);
  ::sigprocmask(SIG_BLOCK, &child, &before);
  struct sigaction action = {};
  action.sa_handler = [](int) {};
  ::sigaction(SIGCHLD, &action, nullptr);
  sigdelset(&before, SIGCHLD);

  const pid_t self = ::getpid(), command = ::fork();
  if (command == 0) {
    ::signal(SIGPIPE, SIG_DFL);
    run_command(argv[1], memory, cpu_seconds, self);
  }
  if (command < 0) return 127;
  ::setpgid(command, command);
  ::dprintf(kLeeway, "pid %d\n", static_cast<int>(command));
  // Only the command keeps the streams open, so that the parent sees when it closes them.
  const int null = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int file = 0; file < 3; ++file) {
    if (null < 0 || ::dup2(null, file) < 0) ::close(file);
  }

  End end;
  bool too_many = false;
  for (;;) {
    const pid_t ended = ended_child();
    if (ended == command) break;
    if (ended > 0) {
      ::waitpid(ended, nullptr, WNOHANG);  // an orphan that was reparented to us
      continue;
    }
    if (most_processes > 0) {
      const int living = count_living();
      if (living > most_processes) {
        report_limit("max_processes", living);
        too_many = true;
        break;
      }
    }
    pollfd leeway = {kLeeway, POLLIN, 0};
    const timespec moment = {0, kLookEvery * 1000000L};
    const int ready = ::ppoll(&leeway, 1, most_processes > 0 ? &moment : nullptr, &before);
    if (ready > 0) break;  // nothing is ever written to it, so it has been closed
  }
  kill_all(command, end);
  const bool used_up =
      end.there && cpu_seconds > 0 &&
      ((WIFSIGNALED(end.status) && WTERMSIG(end.status) == SIGXCPU) ||
       (WIFSIGNALED(end.status) && end.cpu_seconds >= static_cast<double>(cpu_seconds)) ||
       (WIFEXITED(end.status) && WEXITSTATUS(end.status) == 128 + SIGXCPU));
  if (used_up && !too_many) report_limit("max_cpu_seconds", cpu_seconds);
  end_like(end);
}
