// Many requests on one server: what serving costs beside sampling.
//
//   serve_benchmark PROGRAM [SECONDS] [STREAMS]
//   serve_benchmark PROGRAM routes [SECONDS] [STREAMS]
//   serve_benchmark PROGRAM prompts [SECONDS] [TOKENIZER]
//   serve_benchmark PROGRAM cuda [SECONDS] [STREAMS] MODEL [OPTION ..]
//
// The first makes a model of ten million weights, starts `PROGRAM serve` for it on one thread, and
// keeps STREAMS (256) streams of /v1/completions open for SECONDS (60), each followed by the next.
// Beside them 1,000 connections are idle and eight streams are never read. Then the engine samples
// the same requests in this process. The last line compares the CPU time per token.
//
// `routes` does the same with a model so small that HTTP is all there is to measure, for each kind
// of request alone. `prompts` has eight streams beside a client that sends prompts of a megabyte,
// with the file TOKENIZER (a tokenizer.json) or bytes, and prints the longest gap of a stream.
// `cuda` serves the folder MODEL on the GPU in bf16, with more options of `leeway serve` as given.

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

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "model/parameters.h"

namespace {

using namespace leeway;
using Clock = std::chrono::steady_clock;

constexpr int kIdle = 1000, kUnread = 8;

// What one client asks for, again and again.
struct Kind {
  const char* name;
  const char* path;
  const char* more;  // JSON members
  bool streams;
};
struct Shape {
  int64_t prompt, tokens;
};
constexpr Shape kLoadShape = {32, 64}, kRouteShape = {128, 128};
constexpr Kind kStream = {"completions, streamed", "/v1/completions", "", true};

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

ModelConfig tiny_config() {
  ModelConfig config = config_of_ten_million();
  config.hidden_size = 32;
  config.intermediate_size = 32;
  config.num_hidden_layers = 1;
  config.num_attention_heads = 1;
  config.num_key_value_heads = 1;
  config.head_dim = 32;
  return config;
}

std::string post_text(const std::string& path, const std::string& body) {
  return fmt::format("POST {} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{}", path,
                     body.size(), body);
}

std::string request_text(const Kind& kind, const Shape& shape, uint64_t seed, int samples = 1) {
  std::string prompt;
  for (int64_t i = 0; i < shape.prompt; ++i) {
    prompt += fmt::format("{}{}", i == 0 ? "" : ",", 65 + i % 32);
  }
  const std::string path = kind.path;
  if (path == "/inference/v1/generate") {
    return post_text(path,
                     fmt::format(R"({{"token_ids": [{}], "sampling_params": {{"max_tokens": {}, )"
                                 R"("seed": {}, "n": {}{}}}, "stream": {}}})",
                                 prompt, shape.tokens, seed, samples, kind.more, kind.streams));
  }
  const std::string what =
      path == "/v1/completions"
          ? fmt::format(R"("prompt": [{}])", prompt)
          : fmt::format(R"("messages": [{{"role": "user", "content": "{}"}}])",
                        std::string(static_cast<size_t>(shape.prompt - 10), 'x'));
  return post_text(path, fmt::format(R"({{{}, "max_tokens": {}, "seed": {}, "stream": {}, )"
                                     R"("n": {}, "ignore_eos": true{}}})",
                                     what, shape.tokens, seed, kind.streams, samples, kind.more));
}

const std::vector<std::string> kOneThread = {"--threads", "1", "--tokenizer", "byte"};

// A `leeway serve` that is killed with this object.
class ServerProcess {
 public:
  ServerProcess(const std::string& program, const std::string& model,
                const std::vector<std::string>& options = kOneThread) {
    std::vector<std::string> words = {
        program, "serve", model, "--port", "0", "--renderer", "qwen3", "--max-sequences", "512"};
    words.insert(words.end(), options.begin(), options.end());
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    int ends[2];
    if (::pipe(ends) != 0) std::exit(1);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(ends[1], 2);
      ::close(ends[0]);
      ::execv(program.c_str(), arguments.data());
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

  double cpu_seconds() const { return cpu_of(fmt::format("/proc/{}/stat", pid_)); }
  // Of the thread that serves all connections.
  double io_seconds() const { return cpu_of(fmt::format("/proc/{0}/task/{0}/stat", pid_)); }
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
  static double cpu_of(const std::string& path) {
    std::ifstream file(path);
    std::string text((std::istreambuf_iterator<char>(file)), {});
    std::istringstream fields(text.substr(text.rfind(')') + 2));
    std::string skipped;
    double user = 0, system = 0;
    for (int i = 0; i < 11; ++i) fields >> skipped;
    fields >> user >> system;
    return (user + system) / static_cast<double>(::sysconf(_SC_CLK_TCK));
  }

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

// One connection, and how much of an answer it has.
class Answer {
 public:
  int fd = -1;
  Clock::time_point last;  // when something came
  bool begun = false;      // its first event has come

  void reset() {
    tail_.clear();
    begun = false;
    missing_ = -1;
  }
  bool has_error() const { return tail_.find("\"error\"") != std::string::npos; }
  // True when it is complete.
  bool take(std::string_view bytes, bool streams) {
    begun = begun || bytes.find("data: ") != std::string_view::npos;
    if (streams) {
      tail_ += bytes;
      if (tail_.ends_with("0\r\n\r\n") && tail_.find("[DONE]") != std::string::npos) return true;
      if (tail_.size() > 4096) tail_.erase(0, tail_.size() - 64);
      return false;
    }
    if (missing_ < 0) {
      tail_ += bytes;
      const size_t end = tail_.find("\r\n\r\n"), length = tail_.find("Content-Length: ");
      if (end == std::string::npos) return false;
      missing_ =
          std::atoll(tail_.c_str() + length + 16) - static_cast<int64_t>(tail_.size() - end - 4);
      if (!tail_.starts_with("HTTP/1.1 200")) tail_ += "\"error\"";
    } else {
      missing_ -= static_cast<int64_t>(bytes.size());
    }
    return missing_ <= 0;
  }

 private:
  std::string tail_;      // of what was read: an end may be cut in two
  int64_t missing_ = -1;  // bytes of an answer that is not streamed; -1: not known
};

struct Load {
  int64_t finished = 0, errors = 0, tokens = 0;
  double seconds = 0, cpu = 0, io = 0;
  double gap = 0;  // the longest between two pieces of a stream
};

Load run_clients(const ServerProcess& server, const Kind& kind, const Shape& shape, int clients,
                 double seconds) {
  std::vector<Answer> open(static_cast<size_t>(clients));
  std::vector<pollfd> polled(open.size());
  uint64_t seed = 0;
  const auto start = [&](Answer& answer) {
    answer.reset();
    const std::string text = request_text(kind, shape, ++seed);
    (void)!::send(answer.fd, text.data(), text.size(), MSG_NOSIGNAL);
  };
  for (size_t i = 0; i < open.size(); ++i) {
    open[i].fd = connect_to(server.port);
    polled[i] = {open[i].fd, POLLIN, 0};
    start(open[i]);
  }
  Load load;
  const int64_t tokens = sampled_tokens(server.port);
  const double cpu = server.cpu_seconds(), io = server.io_seconds();
  const auto begin = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  std::vector<char> bytes(1 << 16);
  int64_t running = clients;
  while (running > 0) {
    if (::poll(polled.data(), polled.size(), 60'000) <= 0) {
      fmt::print(stderr, "nothing for a minute\n");
      ++load.errors;
      break;
    }
    const auto now = Clock::now();
    for (size_t i = 0; i < open.size(); ++i) {
      if (polled[i].revents == 0) continue;
      const ssize_t count = ::recv(open[i].fd, bytes.data(), bytes.size(), 0);
      if (count <= 0) {
        ++load.errors, --running;
        polled[i].fd = -1;
        continue;
      }
      if (open[i].begun) {
        load.gap = std::max(load.gap, std::chrono::duration<double>(now - open[i].last).count());
      }
      open[i].last = now;
      const bool complete = open[i].take({bytes.data(), static_cast<size_t>(count)}, kind.streams);
      if (open[i].has_error()) ++load.errors;
      if (!complete) continue;
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
  load.io = server.io_seconds() - io;
  load.tokens = sampled_tokens(server.port) - tokens;
  for (const Answer& answer : open) ::close(answer.fd);
  return load;
}

// CPU seconds per token of the same requests, so many at a time.
double engine_cpu_per_token(const Parameters& weights, const Shape& shape, int streams,
                            int64_t requests) {
  EngineOptions options;
  options.threads = 1;
  options.max_sequences = 512;
  Engine engine(weights, 0, options);
  Request request;
  for (int64_t i = 0; i < shape.prompt; ++i) {
    request.prompt.push_back(static_cast<int32_t>(65 + i % 32));
  }
  request.max_new_tokens = shape.tokens;
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
  return seconds / static_cast<double>(requests * shape.tokens);
}

void measure_load(const std::string& program, const std::string& folder, double seconds,
                  int streams) {
  Parameters weights(config_of_ten_million());
  initialise(weights, 1);
  save_parameters(weights, folder);
  const ServerProcess server(program, folder);
  std::vector<int> others;
  for (int i = 0; i < kIdle; ++i) others.push_back(connect_to(server.port));
  const std::string start = server.memory();
  for (int i = 0; i < kUnread; ++i) {
    others.push_back(connect_to(server.port));
    const std::string text =
        request_text(kStream, {kLoadShape.prompt, 900}, static_cast<uint64_t>(i), 8);
    (void)!::send(others.back(), text.data(), text.size(), MSG_NOSIGNAL);
  }
  const Load load = run_clients(server, kStream, kLoadShape, streams, seconds);
  const int64_t tokens = load.finished * kLoadShape.tokens;
  fmt::print("weights                 {:.1f} million\n",
             static_cast<double>(weights.count()) / 1e6);
  fmt::print("streams                 {} at a time, {} finished, {} errors\n", streams,
             load.finished, load.errors);
  fmt::print("beside them             {} idle connections, {} streams that are not read\n", kIdle,
             kUnread);
  fmt::print("tokens                  {} in {:.1f} s, {:.0f} per second\n", tokens, load.seconds,
             static_cast<double>(tokens) / load.seconds);
  fmt::print("longest gap of a stream {:.0f} ms\n", load.gap * 1e3);
  fmt::print("memory before           {}\nmemory after            {}\n", start, server.memory());
  // Tokens of the streams whose clients do not read count too: the engine samples them until
  // they are cut off.
  const double served = load.cpu / static_cast<double>(load.tokens);
  const double engine = engine_cpu_per_token(weights, kLoadShape, streams,
                                             std::min<int64_t>(load.finished, 4 * streams));
  fmt::print(
      "CPU time per token      {:.2f} us served ({:.2f} of them on the thread of the "
      "connections), {:.2f} us in process: {:.3f}\n",
      served * 1e6, load.io / static_cast<double>(load.tokens) * 1e6, engine * 1e6,
      served / engine);
  for (const int fd : others) ::close(fd);
}

void measure_routes(const std::string& program, const std::string& folder, double seconds,
                    int clients) {
  Parameters weights(tiny_config());
  initialise(weights, 1);
  save_parameters(weights, folder);
  const double engine =
      engine_cpu_per_token(weights, kRouteShape, clients, std::max(clients, 1024));
  fmt::print("{} clients, {} + {} tokens; the engine in process: {:.2f} us of CPU per token\n",
             clients, kRouteShape.prompt, kRouteShape.tokens, engine * 1e6);
  fmt::print("{:34} {:>10} {:>12} {:>18}\n", "", "tokens/s", "CPU us/token", "connections' thread");
  const Kind kinds[] = {
      {"generate", "/inference/v1/generate", "", false},
      {"generate, streamed", "/inference/v1/generate", "", true},
      {"completions", "/v1/completions", "", false},
      kStream,
      {"completions, logprobs", "/v1/completions", R"(, "logprobs": 0)", false},
      {"completions, logprobs, streamed", "/v1/completions", R"(, "logprobs": 0)", true},
      {"completions, top 5, streamed", "/v1/completions", R"(, "logprobs": 5)", true},
      {"chat", "/v1/chat/completions", "", false},
      {"chat, streamed", "/v1/chat/completions", "", true},
      {"chat, logprobs, streamed", "/v1/chat/completions", R"(, "logprobs": true)", true},
  };
  const ServerProcess server(program, folder);
  for (const Kind& kind : kinds) {
    const Load load = run_clients(server, kind, kRouteShape, clients, seconds);
    const auto tokens = static_cast<double>(load.tokens);
    fmt::print("{:34} {:>10.0f} {:>12.2f} {:>18.2f}{}\n", kind.name, tokens / load.seconds,
               load.cpu / tokens * 1e6, load.io / tokens * 1e6,
               load.errors == 0 ? "" : fmt::format("  {} errors", load.errors));
  }
}

void measure_cuda(const std::string& program, const std::string& model, double seconds, int clients,
                  const std::vector<std::string>& more) {
  std::vector<std::string> options = {"--device", "cuda",        "--precision",
                                      "bf16",     "--tokenizer", "byte"};
  options.insert(options.end(), more.begin(), more.end());
  const ServerProcess server(program, model, options);
  fmt::print("{} clients, {} + {} tokens\n", clients, kRouteShape.prompt, kRouteShape.tokens);
  fmt::print("{:34} {:>10} {:>12} {:>18}\n", "", "tokens/s", "CPU us/token", "connections' thread");
  const Kind generate = {"generate", "/inference/v1/generate", "", false};
  run_clients(server, generate, kRouteShape, clients, 1.0);  // graphs are captured
  for (const Kind& kind : {generate, kStream}) {
    const Load load = run_clients(server, kind, kRouteShape, clients, seconds);
    const auto tokens = static_cast<double>(load.tokens);
    fmt::print("{:34} {:>10.0f} {:>12.2f} {:>18.2f}{}\n", kind.name, tokens / load.seconds,
               load.cpu / tokens * 1e6, load.io / tokens * 1e6,
               load.errors == 0 ? "" : fmt::format("  {} errors", load.errors));
  }
}

void measure_prompts(const std::string& program, const std::string& folder, double seconds,
                     const std::string& tokenizer) {
  ModelConfig config = tiny_config();
  config.vocab_size = tokenizer == "byte" ? 320 : 152'000;
  Parameters weights(config);
  initialise(weights, 1);
  save_parameters(weights, folder);
  const ServerProcess server(program, folder, {"--threads", "1", "--tokenizer", tokenizer});
  std::string prompt;
  for (int i = 0; prompt.size() < (1 << 20); ++i) prompt += fmt::format("word{} and more, ", i);
  const std::string huge =
      post_text("/v1/completions", fmt::format(R"({{"prompt": "{}"}})", prompt));
  for (const bool with_prompts : {false, true}) {
    const pid_t sender = with_prompts ? ::fork() : -1;
    if (sender == 0) {
      const int fd = connect_to(server.port);
      char bytes[65536];
      while (::send(fd, huge.data(), huge.size(), MSG_NOSIGNAL) > 0) {
        if (::recv(fd, bytes, sizeof bytes, 0) <= 0) break;
      }
      _exit(0);
    }
    const Load load = run_clients(server, kStream, kRouteShape, 8, seconds);
    fmt::print("{:34} longest gap of a stream {:.1f} ms, {} errors\n",
               with_prompts ? "with prompts of a megabyte" : "alone", load.gap * 1e3, load.errors);
    if (sender > 0) {
      ::kill(sender, SIGKILL);
      ::waitpid(sender, nullptr, 0);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 2 ? argv[2] : "";
  const bool named = mode == "routes" || mode == "prompts" || mode == "cuda";
  if (argc < 2 || (mode == "cuda" && argc < 6)) {
    fmt::print(stderr,
               "serve_benchmark PROGRAM [routes|prompts|cuda] [SECONDS] [STREAMS|TOKENIZER] "
               "[MODEL [OPTION ..]]\n");
    return 2;
  }
  const char* time = argc > (named ? 3 : 2) ? argv[named ? 3 : 2] : nullptr;
  const char* last = argc > (named ? 4 : 3) ? argv[named ? 4 : 3] : nullptr;
  const double seconds = time != nullptr ? std::atof(time) : named ? 5 : 60;
  const rlimit files = {8192, 8192};
  ::setrlimit(RLIMIT_NOFILE, &files);
  const auto folder = std::filesystem::temp_directory_path() / fmt::format("serve-{}", ::getpid());
  if (mode == "prompts") {
    measure_prompts(argv[1], folder, seconds, last != nullptr ? last : "byte");
  } else if (mode == "cuda") {
    measure_cuda(argv[1], argv[5], seconds, std::atoi(last), {argv + 6, argv + argc});
  } else {
    const int clients = last != nullptr ? std::atoi(last) : 256;
    (named ? measure_routes : measure_load)(argv[1], folder, seconds, clients);
  }
  std::filesystem::remove_all(folder);
  return 0;
}
