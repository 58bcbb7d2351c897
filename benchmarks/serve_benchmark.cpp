// Many streams on one server: what serving costs beside sampling.
//
//   serve_benchmark PROGRAM [SECONDS] [STREAMS]
//
// Makes a model of ten million weights, starts `PROGRAM serve` for it on one thread, and keeps
// STREAMS (256) streams of /v1/completions open for SECONDS (60), each followed by the next. Beside
// them 1,000 connections are idle and eight streams are never read. Then the engine samples the
// same requests in this process. The last line compares the CPU time per token.

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "model/parameters.h"

namespace {

using namespace leeway;
using Clock = std::chrono::steady_clock;

constexpr int64_t kPrompt = 32, kTokens = 64;
constexpr int kIdle = 1000, kUnread = 8;

ModelConfig config_of_ten_million() {
  ModelConfig config;
  config.family = Family::qwen3;
  config.qk_norm = true;
  config.vocab_size = 320;
  config.hidden_size = 384;
  config.intermediate_size = 1024;
  config.num_hidden_layers = 6;
  config.num_attention_heads = 6;
  config.num_key_value_heads = 2;
  config.head_dim = 64;
  config.max_position_embeddings = 1024;
  config.tie_word_embeddings = true;
  return config;
}

int connect_to(int port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (fd < 0 || ::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    std::perror("connect");
    std::exit(1);
  }
  return fd;
}

std::string request_text(uint64_t seed, int64_t tokens, int samples = 1) {
  std::string prompt;
  for (int64_t i = 0; i < kPrompt; ++i) prompt += fmt::format("{}{}", i == 0 ? "" : ",", 65 + i);
  const std::string body =
      fmt::format(R"({{"prompt": [{}], "max_tokens": {}, "seed": {}, "stream": true, )"
                  R"("n": {}, "ignore_eos": true}})",
                  prompt, tokens, seed, samples);
  return fmt::format("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{}",
                     body.size(), body);
}

// A `leeway serve` that is killed with this object.
class ServerProcess {
 public:
  ServerProcess(const std::string& program, const std::string& model) {
    int ends[2];
    if (::pipe(ends) != 0) std::exit(1);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(ends[1], 2);
      ::close(ends[0]);
      ::execl(program.c_str(), program.c_str(), "serve", model.c_str(), "--port", "0", "--threads",
              "1", "--tokenizer", "byte", "--max-sequences", "512", nullptr);
      _exit(127);
    }
    ::close(ends[1]);
    std::string line;
    char c = 0;
    while (::read(ends[0], &c, 1) == 1 && c != '\n') line += c;
    const size_t colon = line.rfind(':');
    if (line.find("listening on") == std::string::npos) {
      fmt::print(stderr, "the server did not start: {}\n", line);
      std::exit(1);
    }
    port = std::atoi(line.c_str() + colon + 1);
  }
  ~ServerProcess() {
    ::kill(pid_, SIGTERM);
    ::waitpid(pid_, nullptr, 0);
  }
  ServerProcess(const ServerProcess&) = delete;
  ServerProcess& operator=(const ServerProcess&) = delete;

  double cpu_seconds() const {
    std::ifstream file(fmt::format("/proc/{}/stat", pid_));
    std::string text((std::istreambuf_iterator<char>(file)), {});
    std::istringstream fields(text.substr(text.rfind(')') + 2));
    std::string skipped;
    double user = 0, system = 0;
    for (int i = 0; i < 11; ++i) fields >> skipped;
    fields >> user >> system;
    return (user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK));
  }
  // Of memory in use now and at most, in MiB.
  std::string memory() const {
    std::ifstream file(fmt::format("/proc/{}/status", pid_));
    std::string line, found;
    while (std::getline(file, line)) {
      if (line.starts_with("VmRSS:") || line.starts_with("VmHWM:")) {
        found +=
            fmt::format("{} {:.0f} MiB  ", line.substr(0, 5), std::atof(line.c_str() + 6) / 1024);
      }
    }
    return found;
  }
  int port = 0;

 private:
  pid_t pid_ = -1;
};

// Tokens that the server has sampled so far.
int64_t sampled_tokens(int port) {
  const int fd = connect_to(port);
  const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
  (void)!::send(fd, request.data(), request.size(), MSG_NOSIGNAL);
  std::string text;
  char bytes[4096];
  for (ssize_t count = 0; (count = ::recv(fd, bytes, sizeof bytes, 0)) > 0;) {
    text.append(bytes, static_cast<size_t>(count));
  }
  ::close(fd);
  const size_t at = text.find("\nleeway_sampled_tokens_total{");
  return at == std::string::npos ? 0 : std::atoll(text.c_str() + text.find("} ", at) + 2);
}

struct Stream {
  int fd = -1;
  std::string tail;  // of what was read: an end may be cut in two
};

struct Load {
  int64_t finished = 0, errors = 0, tokens = 0;
  double seconds = 0, cpu = 0;
};

Load run_streams(const ServerProcess& server, int streams, double seconds) {
  std::vector<Stream> open(static_cast<size_t>(streams));
  std::vector<pollfd> polled(open.size());
  uint64_t seed = 0;
  const auto start = [&](Stream& stream) {
    const std::string text = request_text(++seed, kTokens);
    (void)!::send(stream.fd, text.data(), text.size(), MSG_NOSIGNAL);
  };
  for (size_t i = 0; i < open.size(); ++i) {
    open[i].fd = connect_to(server.port);
    polled[i] = {open[i].fd, POLLIN, 0};
    start(open[i]);
  }
  Load load;
  const int64_t tokens = sampled_tokens(server.port);
  const double cpu = server.cpu_seconds();
  const auto begin = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  std::vector<char> bytes(1 << 16);
  int64_t running = streams;
  while (running > 0) {
    if (::poll(polled.data(), polled.size(), 10'000) <= 0) {
      fmt::print(stderr, "nothing for ten seconds\n");
      ++load.errors;
      break;
    }
    for (size_t i = 0; i < open.size(); ++i) {
      if (polled[i].revents == 0) continue;
      const ssize_t count = ::recv(open[i].fd, bytes.data(), bytes.size(), 0);
      if (count <= 0) {
        ++load.errors, --running;
        polled[i].fd = -1;
        continue;
      }
      std::string& tail = open[i].tail;
      tail.append(bytes.data(), static_cast<size_t>(count));
      if (tail.find("\"error\"") != std::string::npos) ++load.errors;
      if (tail.find("0\r\n\r\n") == std::string::npos || tail.find("[DONE]") == std::string::npos) {
        if (tail.size() > 4096) tail.erase(0, tail.size() - 64);
        continue;
      }
      tail.clear();
      ++load.finished;
      if (elapsed() < seconds) {
        start(open[i]);
      } else {
        --running;
        polled[i].fd = -1;
      }
    }
  }
  load.seconds = elapsed();
  load.cpu = server.cpu_seconds() - cpu;
  load.tokens = sampled_tokens(server.port) - tokens;
  for (const Stream& stream : open) ::close(stream.fd);
  return load;
}

// CPU seconds per token of the same requests, so many at a time.
double engine_cpu_per_token(const Parameters& weights, int streams, int64_t requests) {
  EngineOptions options;
  options.threads = 1;
  options.max_sequences = 512;
  Engine engine(weights, 0, options);
  Request request;
  for (int64_t i = 0; i < kPrompt; ++i) request.prompt.push_back(static_cast<int32_t>(65 + i));
  request.max_new_tokens = kTokens;
  timespec begin = {}, end = {};
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
  int64_t submitted = 0, finished = 0;
  while (finished < requests) {
    while (submitted < requests && submitted - finished < streams) {
      request.seed = static_cast<uint64_t>(++submitted);
      engine.submit(request);
    }
    engine.step();
    finished += static_cast<int64_t>(engine.take_finished().size());
  }
  ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
  const double seconds = static_cast<double>(end.tv_sec - begin.tv_sec) +
                         static_cast<double>(end.tv_nsec - begin.tv_nsec) * 1e-9;
  return seconds / static_cast<double>(requests * kTokens);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    fmt::print(stderr, "serve_benchmark PROGRAM [SECONDS] [STREAMS]\n");
    return 2;
  }
  const double seconds = argc > 2 ? std::atof(argv[2]) : 60;
  const int streams = argc > 3 ? std::atoi(argv[3]) : 256;
  const rlimit files = {8192, 8192};
  ::setrlimit(RLIMIT_NOFILE, &files);
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("serve-{}", ::getpid());
  Parameters weights(config_of_ten_million());
  initialise(weights, 1);
  save_parameters(weights, folder);
  {
    const ServerProcess server(argv[1], folder);
    std::vector<int> others;
    for (int i = 0; i < kIdle; ++i) others.push_back(connect_to(server.port));
    const std::string start = server.memory();
    for (int i = 0; i < kUnread; ++i) {
      others.push_back(connect_to(server.port));
      const std::string text = request_text(static_cast<uint64_t>(i), 900, 8);
      (void)!::send(others.back(), text.data(), text.size(), MSG_NOSIGNAL);
    }
    const Load load = run_streams(server, streams, seconds);
    const int64_t tokens = load.finished * kTokens;
    fmt::print("weights                 {:.1f} million\n",
               static_cast<double>(weights.count()) / 1e6);
    fmt::print("streams                 {} at a time, {} finished, {} errors\n", streams,
               load.finished, load.errors);
    fmt::print("beside them             {} idle connections, {} streams that are not read\n", kIdle,
               kUnread);
    fmt::print("tokens                  {} in {:.1f} s, {:.0f} per second\n", tokens, load.seconds,
               static_cast<double>(tokens) / load.seconds);
    fmt::print("memory before           {}\nmemory after            {}\n", start, server.memory());
    // Tokens of the streams whose clients do not read count too: the engine samples them until
    // they are cut off.
    const double served = load.cpu / static_cast<double>(load.tokens);
    const double engine =
        engine_cpu_per_token(weights, streams, std::min<int64_t>(load.finished, 4 * streams));
    fmt::print("CPU time per token      {:.2f} us served, {:.2f} us in process: {:.3f}\n",
               served * 1e6, engine * 1e6, served / engine);
    for (const int fd : others) ::close(fd);
  }
  std::filesystem::remove_all(folder);
  return 0;
}
