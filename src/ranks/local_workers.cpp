#include "ranks/local_workers.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <random>
#include <string_view>
#include <thread>

#include "base/folders.h"
#include "base/printable.h"
#include "leeway/error.h"

extern char** environ;  // of the process; the workers' differs

namespace leeway {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPolite = std::chrono::seconds(3);  // from SIGTERM to SIGKILL
constexpr auto kPause = std::chrono::milliseconds(5);
constexpr off_t kLastBytes = 2000;  // of a file, among which its last line is

// Variables of launchers and ours that would say something else to a worker.
constexpr std::string_view kTheirs[] = {
    "RANK=",          "WORLD_SIZE=",  "LOCAL_RANK=",   "LOCAL_WORLD_SIZE=", "MASTER_ADDR=",
    "MASTER_PORT=",   "LEEWAY_PORT=", "LEEWAY_JOB=",   "LEEWAY_RANKS=",     "LEEWAY_INTERFACE=",
    "LEEWAY_WORKER=", "SLURM_STEP_",  "TORCHELASTIC_", "OMPI_COMM_WORLD_"};

std::string new_job() {
  std::random_device random;
  return fmt::format("local {:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
}

std::string last_line_of(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, kLastBytes> bytes;
  const off_t size = ::lseek(file.get(), 0, SEEK_END);
  const ssize_t got =
      ::pread(file.get(), bytes.data(), bytes.size(), std::max<off_t>(size - kLastBytes, 0));
  std::string_view text(bytes.data(), got > 0 ? static_cast<size_t>(got) : 0);
  while (text.ends_with('\n')) text.remove_suffix(1);
  return printable(text.substr(text.rfind('\n') + 1));
}

}  // namespace

LocalWorkers::LocalWorkers(LocalWorkersOptions options)
    : options_(std::move(options)),
      job_(new_job()),
      listener_(listen_at("127.0.0.1", 0)),
      port_(port_of(listener_)) {
  if (options_.log_folder.empty()) {
    const char* parent = ::getenv("TMPDIR");
    options_.log_folder = std::string(parent == nullptr ? "/tmp" : parent) + "/leeway-ranks-XXXXXX";
    if (::mkdtemp(options_.log_folder.data()) == nullptr) {
      throw Error(fmt::format("{}: cannot be made: {}", options_.log_folder, std::strerror(errno)));
    }
    temporary_ = true;
  } else {
    make_folders(options_.log_folder);
  }
  try {
    for (int rank = 1; rank < options_.size; ++rank) start(rank);
  } catch (...) {
    end_all();
    throw;
  }
}

LocalWorkers::~LocalWorkers() {
  end_all();
  try {
    if (temporary_ && failure().empty()) remove_tree(options_.log_folder);
  } catch (const Error&) {
    // A folder that cannot be removed stays.
  }
}

std::string LocalWorkers::log_of(int rank) const {
  return fmt::format("{}/rank_{}.log", options_.log_folder, rank);
}

void LocalWorkers::start(int rank) {
  std::vector<std::string> words = {options_.program};
  words.insert(words.end(), options_.arguments.begin(), options_.arguments.end());
  std::vector<std::string> settings = {fmt::format("RANK={}", rank),
                                       fmt::format("WORLD_SIZE={}", options_.size),
                                       fmt::format("LOCAL_RANK={}", rank),
                                       fmt::format("LOCAL_WORLD_SIZE={}", options_.size),
                                       "MASTER_ADDR=127.0.0.1",
                                       fmt::format("MASTER_PORT={}", port_),
                                       "LEEWAY_JOB=" + job_,
                                       "LEEWAY_WORKER=1"};
  std::vector<char*> arguments, environment;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  for (char** each = environ; *each != nullptr; ++each) {
    const bool other = std::any_of(std::begin(kTheirs), std::end(kTheirs), [&](auto name) {
      return std::string_view(*each).starts_with(name);
    });
    if (!other) environment.push_back(*each);
  }
  for (std::string& setting : settings) environment.push_back(setting.data());
  environment.push_back(nullptr);
  const std::string log = log_of(rank);
  const Descriptor file(
      ::open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0600));
  const Descriptor nothing(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!file.open() || !nothing.open()) {
    throw Error(fmt::format("{}: cannot be written: {}", log, std::strerror(errno)));
  }
  const pid_t parent = ::getpid();
  const pid_t process = ::fork();
  if (process == 0) {
    // Only what a signal handler may do: other threads of the parent may hold any lock.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);
    ::setpgid(0, 0);  // Ctrl-C in a terminal is rank 0's to handle
    ::dup2(nothing.get(), 0);
    ::dup2(file.get(), 1);
    ::dup2(file.get(), 2);
    ::close_range(3, ~0u, 0);
    sigset_t none;
    sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    for (const int signal : {SIGPIPE, SIGINT, SIGTERM, SIGHUP}) ::signal(signal, SIG_DFL);
    ::execve(arguments[0], arguments.data(), environment.data());
    ::_exit(127);
  }
  if (process < 0) {
    throw Error(fmt::format("rank {} cannot be started: {}", rank, std::strerror(errno)));
  }
  workers_.push_back({.process = process, .running = true});
}

RanksOptions LocalWorkers::leader() {
  LEEWAY_CHECK(listener_.open(), "a group of local workers has one leader");
  return {.rank = 0,
          .size = options_.size,
          .local_rank = 0,
          .local_size = options_.size,
          .leader_address = "127.0.0.1",
          .leader_port = port_,
          .listener = listener_.release(),
          .job = job_,
          .given_up = [this] { return failure(); }};
}

void LocalWorkers::look() {
  for (Worker& worker : workers_) {
    if (worker.running && ::waitpid(worker.process, &worker.status, WNOHANG) == worker.process) {
      worker.running = false;
    }
  }
}

std::string LocalWorkers::failure() {
  look();
  for (size_t k = 0; k < workers_.size(); ++k) {
    const Worker& worker = workers_[k];
    if (worker.running || worker.status == 0) continue;
    const int rank = static_cast<int>(k) + 1;
    const std::string how =
        WIFSIGNALED(worker.status)
            ? fmt::format("was killed by signal {}", WTERMSIG(worker.status))
            : fmt::format("ended with exit code {}", WEXITSTATUS(worker.status));
    const std::string line = last_line_of(log_of(rank));
    return fmt::format("rank {} {}: {} {}", rank, how, log_of(rank),
                       line.empty() ? "is empty" : "ends with: " + line);
  }
  return "";
}

std::string LocalWorkers::wait(double seconds) {
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(seconds));
  const auto any = [&] {
    look();
    return std::any_of(workers_.begin(), workers_.end(),
                       [](const Worker& worker) { return worker.running; });
  };
  while (any() && Clock::now() < end) std::this_thread::sleep_for(kPause);
  end_all();
  return failure();
}

void LocalWorkers::end_all() {
  look();
  const auto end = Clock::now() + kPolite;
  for (const Worker& worker : workers_) {
    if (worker.running) ::kill(worker.process, SIGTERM);
  }
  for (Worker& worker : workers_) {
    while (worker.running) {
      if (Clock::now() >= end) ::kill(worker.process, SIGKILL);
      std::this_thread::sleep_for(kPause);
      look();
    }
  }
}

}  // namespace leeway
