// Runs programs for tests: takes arguments, returns exit code, stdout and stderr. POSIX only, so
// that it needs nothing but the compiler.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <ostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace leeway {

struct RunOptions {
  std::string input;                        // stdin
  std::string directory;                    // working directory; empty: the current one
  std::string path_first;                   // prepended to PATH
  std::string stdout_file, stderr_file;     // e.g. /dev/full; empty: captured
  std::chrono::seconds time_limit{120};     // after which it is killed and `code` is -SIGKILL
  std::optional<std::string> program = {};  // instead of the leeway of this build
  std::function<void()> in_child = {};  // called last before exec, to set limits or close streams
};

struct RunResult {
  int code = -1;  // the exit code, or minus the signal that ended it
  std::string out, err;
};

inline std::ostream& operator<<(std::ostream& stream, const RunResult& result) {
  auto shortened = [](const std::string& text) {
    return text.size() < 1500 ? text : text.substr(0, 1500) + " ..";
  };
  return stream << "exit code " << result.code << "\nstdout: " << shortened(result.out)
                << "\nstderr: " << shortened(result.err);
}

inline std::string leeway_program() { return LEEWAY_BINARY_DIR "/leeway"; }

namespace run_detail {

struct Pipe {
  int ends[2] = {-1, -1};
  Pipe() {
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe2 failed");
  }
  ~Pipe() { close_end(0), close_end(1); }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void close_end(int which) {
    if (ends[which] >= 0) ::close(ends[which]);
    ends[which] = -1;
  }
};

[[noreturn]] inline void exec_child(const std::vector<std::string>& args, const RunOptions& options,
                                    int in, int out, int err) {
  auto redirect = [](const std::string& file, int fd, int target) {
    if (!file.empty()) fd = ::open(file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (fd < 0 || ::dup2(fd, target) < 0) ::_exit(126);
  };
  redirect("", in, STDIN_FILENO);
  redirect(options.stdout_file, out, STDOUT_FILENO);
  redirect(options.stderr_file, err, STDERR_FILENO);
  if (!options.directory.empty() && ::chdir(options.directory.c_str()) != 0) ::_exit(126);
  if (!options.path_first.empty()) {
    const char* path = ::getenv("PATH");
    ::setenv("PATH", (options.path_first + ":" + (path != nullptr ? path : "")).c_str(), 1);
  }
  std::vector<char*> argv;
  for (const std::string& arg : args) argv.push_back(const_cast<char*>(arg.c_str()));
  argv.push_back(nullptr);
  if (options.in_child) options.in_child();
  ::execvp(argv[0], argv.data());
  ::_exit(127);
}

}  // namespace run_detail

// Runs the program with `args`. Code 127: it could not be started. All streams are served together,
// so neither side can block on a full pipe.
inline RunResult run_program(std::vector<std::string> args, const RunOptions& options = {}) {
  using Clock = std::chrono::steady_clock;
  args.insert(args.begin(), options.program.value_or(leeway_program()));
  // A child that does not read its input must not kill the test.
  ::signal(SIGPIPE, SIG_IGN);
  run_detail::Pipe in, out, err;
  const pid_t child = ::fork();
  if (child < 0) throw std::runtime_error("fork failed");
  if (child == 0) {
    ::signal(SIGPIPE, SIG_DFL);
    run_detail::exec_child(args, options, in.ends[0], out.ends[1], err.ends[1]);
  }
  in.close_end(0), out.close_end(1), err.close_end(1);
  ::fcntl(in.ends[1], F_SETFL, O_NONBLOCK);

  RunResult result;
  std::string_view input = options.input;
  if (input.empty()) in.close_end(1);
  const auto deadline = Clock::now() + options.time_limit;
  bool killed = false;
  while (out.ends[0] >= 0 || err.ends[0] >= 0) {
    if (!killed && Clock::now() > deadline) {
      ::kill(child, SIGKILL);
      killed = true;
    }
    pollfd waiting[3] = {
        {in.ends[1], POLLOUT, 0}, {out.ends[0], POLLIN, 0}, {err.ends[0], POLLIN, 0}};
    if (::poll(waiting, 3, 100) <= 0) continue;
    if (waiting[0].revents != 0) {
      const ssize_t put = ::write(in.ends[1], input.data(), input.size());
      if (put > 0) input.remove_prefix(static_cast<size_t>(put));
      if ((put < 0 && errno != EAGAIN && errno != EINTR) || input.empty()) in.close_end(1);
    }
    auto drain = [](run_detail::Pipe& pipe, short events, std::string& to) {
      if (events == 0) return;
      char buffer[1 << 16];
      const ssize_t got = ::read(pipe.ends[0], buffer, sizeof buffer);
      if (got > 0) to.append(buffer, static_cast<size_t>(got));
      if (got == 0 || (got < 0 && errno != EINTR)) pipe.close_end(0);
    };
    drain(out, waiting[1].revents, result.out);
    drain(err, waiting[2].revents, result.err);
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return result;
}

// A temporary folder for a test, removed with the object.
class TempFolder {
 public:
  TempFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "leeway_test_XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = pattern;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  // Writes a file and returns its path.
  std::string write(const std::string& name, std::string_view content) const {
    const std::string file = *this / name;
    std::ofstream stream(file, std::ios::binary);
    stream.write(content.data(), static_cast<std::streamsize>(content.size()));
    if (!stream.flush()) throw std::runtime_error("cannot write " + file);
    return file;
  }

 private:
  std::filesystem::path path_;
};

inline std::string file_text(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  if (!stream) throw std::runtime_error("cannot read " + file.string());
  return {std::istreambuf_iterator<char>(stream), {}};
}

inline bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace leeway
