// Bad requests and bad clients: each is answered or closed, and the others are served.

#include <fmt/format.h>

#include <atomic>
#include <functional>
#include <stdexcept>
#include <tuple>

#include "base/rng.h"
#include "engine/cpu_backend.h"
#include "server/test_support.h"

namespace leeway {
namespace {

using namespace testing;

bool is_error(const HttpReply& reply) {
  const rapidjson::Document body = parsed_json(reply.body);
  return body.IsObject() && body.HasMember("error") && body["error"].IsObject() &&
         body["error"].HasMember("message") && body["error"].HasMember("type") &&
         body["error"].HasMember("param") && body["error"].HasMember("code");
}

// Every route that takes a body, and one that it accepts.
const std::vector<std::pair<std::string, std::string>> kGood = {
    {"/inference/v1/generate",
     R"({"token_ids": [1, 2, 3], "sampling_params": {"temperature": 0.5, "top_p": 0.9, "top_k": 4,)"
     R"( "min_p": 0.01, "seed": 3, "n": 2, "max_tokens": 3, "stop_token_ids": [7], "logprobs": 3,)"
     R"( "prompt_logprobs": 2}, "stream": false, "stream_options": {"include_usage": true}})"},
    {"/generate",
     R"({"input_ids": [[1, 2], [3]], "sampling_params": {"max_new_tokens": 2, "stop": ["x"]},)"
     R"( "return_logprob": true, "logprob_start_len": 0, "top_logprobs_num": 2, "rid": "a", "stream": false})"},
    {"/v1/completions",
     R"({"model": "small", "prompt": ["ab", "c"], "max_tokens": 3, "echo": true, "logprobs": 2,)"
     R"( "stop": "q", "n": 2, "stream": false, "return_token_ids": true})"},
    {"/v1/chat/completions",
     R"({"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type":)"
     R"( "text", "text": "hi"}]}], "max_tokens": 4, "tools": [{"type": "function", "function":)"
     R"( {"name": "f", "parameters": {}}}], "logprobs": true, "top_logprobs": 3, "stop": ["x"]})"},
    {"/tokenize", R"({"prompt": "abc", "add_special_tokens": true})"},
    {"/detokenize", R"({"tokens": [97, 98]})"},
    {"/pause_generation", R"({"mode": "in_place"})"},
    {"/continue_generation", "{}"},
    {"/update_weights", R"({"weight_dir": "/nowhere", "weight_version": 3})"},
    {"/abort_request", R"({"rid": "x", "abort_all": false})"},
};

TEST(ServerTrouble, BadValuesAre400WithAMessage) {
  const RunningServer running;
  TestClient client = running.client();
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"/inference/v1/generate", ""},
      {"/inference/v1/generate", "[1]"},
      {"/inference/v1/generate", "{"},
      {"/inference/v1/generate", R"({"token_ids": []})"},
      {"/inference/v1/generate", R"({"token_ids": "abc"})"},
      {"/inference/v1/generate", R"({"token_ids": [-1]})"},
      {"/inference/v1/generate", R"({"token_ids": [300]})"},
      {"/inference/v1/generate", R"({"token_ids": [1.5]})"},
      {"/inference/v1/generate", R"({"token_ids": [99999999999]})"},
      {"/inference/v1/generate", R"({"token_ids": [1], "sampling_params": 3})"},
      {"/v1/completions", R"({"prompt": ""})"},
      {"/v1/completions", R"({"prompt": []})"},
      {"/v1/completions", R"({"prompt": [[]]})"},
      {"/v1/completions", R"({"prompt": [1, "a"]})"},
      {"/v1/completions", R"({"prompt": 5})"},
      {"/v1/completions", R"({"prompt": "a", "logprobs": 21})"},
      {"/v1/completions", R"({"prompt": "a", "max_tokens": 0})"},
      {"/v1/completions", R"({"prompt": "a", "stop": [""]})"},
      {"/v1/completions", R"({"prompt": "a", "stop": [1]})"},
      {"/v1/completions", R"({"prompt": "a", "stream": "yes"})"},
      {"/v1/completions", R"({"prompt": "a", "logit_bias": {"1": 5}})"},
      {"/v1/completions", R"({"prompt": "a", "presence_penalty": 0.5})"},
      {"/v1/completions", R"({"prompt": "a", "logprobs_mode": "odd"})"},
      {"/v1/completions", "{\"prompt\": \"\xff\xfe\"}"},
      {"/v1/chat/completions", "{}"},
      {"/v1/chat/completions", R"({"messages": []})"},
      {"/v1/chat/completions", R"({"messages": [{"role": "king", "content": "a"}]})"},
      {"/v1/chat/completions", R"({"messages": [3]})"},
      {"/v1/chat/completions",
       R"({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})"},
      {"/v1/chat/completions",
       R"({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 21, "logprobs": true})"},
      {"/v1/chat/completions", R"({"messages": [{"role": "user", "content": "a"}], "tools": {}})"},
      {"/v1/chat/completions",
       R"({"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"})"},
      {"/v1/chat/completions",
       R"({"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json"}})"},
      {"/generate", "{}"},
      {"/generate", R"({"input_ids": [1], "top_logprobs_num": 21})"},
      {"/tokenize", "{}"},
      {"/detokenize", R"({"tokens": [99999]})"},
  };
  for (const auto& [path, body] : bad) {
    const HttpReply reply = client.post(path, body);
    EXPECT_EQ(reply.status, 400) << path << " " << body << " -> " << reply.body;
    EXPECT_TRUE(is_error(reply)) << reply.body;
  }
  const std::string settings[] = {R"("temperature": -1)",
                                  R"("temperature": "hot")",
                                  R"("temperature": NaN)",
                                  R"("temperature": 1e999)",
                                  R"("top_p": 0)",
                                  R"("top_p": 1.5)",
                                  R"("top_k": -2)",
                                  R"("top_k": 1.5)",
                                  R"("min_p": 2)",
                                  R"("n": 0)",
                                  R"("n": -1)",
                                  R"("n": 100000)",
                                  R"("max_tokens": -1)",
                                  R"("max_tokens": 511)",
                                  R"("max_tokens": 9223372036854775808)",
                                  R"("seed": -1)",
                                  R"("seed": 1.5)",
                                  R"("seed": 18446744073709551616)",
                                  R"("stop_token_ids": [300])",
                                  R"("stop_token_ids": 3)"};
  for (const std::string& setting : settings) {
    for (const auto& [path, body] : std::vector<std::pair<std::string, std::string>>{
             {"/inference/v1/generate",
              R"({"token_ids": [1, 2], "sampling_params": {)" + setting + "}}"},
             {"/v1/completions", R"({"prompt": "ab", )" + setting + "}"},
             {"/v1/chat/completions",
              R"({"messages": [{"role": "user", "content": "a"}], )" + setting + "}"}}) {
      const HttpReply reply = client.post(path, body);
      EXPECT_EQ(reply.status, 400) << body << " -> " << reply.body;
      EXPECT_TRUE(is_error(reply)) << reply.body;
    }
  }
  const HttpReply unknown = client.post("/v1/completions", R"({"model": "gpt-9", "prompt": "a"})");
  EXPECT_EQ(unknown.status, 404);
  EXPECT_TRUE(is_error(unknown));
  EXPECT_EQ(client.get("/health").status, 200);
}

// Bodies that were good once: 200 or an error in OpenAI's form, and the server lives.
TEST(ServerTrouble, SurvivesDamagedBodies) {
  const RunningServer running;
  TestClient client = running.client();
  for (const auto& [path, body] : kGood) {
    const int status = client.post(path, body).status;
    EXPECT_TRUE(status == 200 || path == "/update_weights") << path << " " << status;
  }
  Rng rng(7);
  const std::vector<std::string> pieces = {"null", "-1",   "1e308",   "\"\"",
                                           "[]",   "{}",   "true",    "0.1",
                                           "[[]]", "\xc3", "\\u0000", "99999999999"};
  int accepted = 0;
  for (int round = 0; round < 1500; ++round) {
    const auto& [path, good] = kGood[rng.below(kGood.size())];
    std::string body = good;
    for (uint64_t edits = 1 + rng.below(4); edits > 0; --edits) {
      const size_t at = rng.below(body.size() + 1);
      switch (rng.below(4)) {
        case 0: body.insert(at, pieces[rng.below(pieces.size())]); break;
        case 1: body.erase(at, rng.below(10)); break;
        case 2:
          if (at < body.size()) body[at] = static_cast<char>(rng.below(256));
          break;
        default: {
          // A value in place of another: what follows a colon up to the next comma.
          const size_t colon = body.find(':', at);
          if (colon == std::string::npos) break;
          const size_t end = body.find_first_of(",}", colon);
          if (end == std::string::npos) break;
          body.replace(colon + 1, end - colon - 1, pieces[rng.below(pieces.size())]);
        }
      }
    }
    const HttpReply reply = client.post(path, body);
    ASSERT_TRUE(reply.status == 200 || (reply.status >= 400 && reply.status < 500))
        << path << " " << body << " -> " << reply.status << " " << reply.body;
    accepted += reply.status == 200 ? 1 : 0;
    if (reply.status != 200) {
      ASSERT_TRUE(is_error(reply)) << body << " -> " << reply.body;
    }
    if (path == "/pause_generation") client.post("/continue_generation", "");
  }
  EXPECT_GT(accepted, 0);
  EXPECT_EQ(client.get("/health_generate").status, 200);
}

// Long bodies are read on another thread, and are answered as short ones are.
TEST(ServerTrouble, LongBodiesAreAnsweredAlike) {
  const RunningServer running;
  TestClient client = running.client();
  const std::string padding = R"({"padding": ")" + std::string(100'000, 'x') + "\"";
  const auto padded = [&](const std::string& body) {
    return body == "{}" ? padding + "}" : padding + ", " + body.substr(1);
  };
  for (const auto& [path, body] : kGood) {
    const HttpReply reply = client.post(path, body), again = client.post(path, padded(body));
    EXPECT_EQ(again.status, reply.status) << path << " " << again.body;
    EXPECT_EQ(is_error(again), is_error(reply)) << again.body;
  }
  for (const auto& [path, body] : std::vector<std::pair<std::string, std::string>>{
           {"/inference/v1/generate", R"({"token_ids": [-1]})"},
           {"/v1/completions", R"({"prompt": 5})"},
           {"/v1/chat/completions", R"({"messages": []})"},
           {"/generate", "{}"},
           {"/tokenize", "{}"}}) {
    const HttpReply reply = client.post(path, padded(body));
    EXPECT_EQ(reply.status, 400) << path << " " << reply.body;
    EXPECT_TRUE(is_error(reply)) << reply.body;
  }
  // A stream, and clients that leave while their body is read.
  const auto events = events_of(client.post(
      "/inference/v1/generate", padded(R"({"token_ids": [1], "stream": true, "sampling_params": )"
                                       R"({"max_tokens": 5}})")));
  EXPECT_FALSE(events.empty());
  const std::string body = padded(R"({"prompt": "ab", "max_tokens": 5})");
  for (int i = 0; i < 20; ++i) {
    running.client().send(fmt::format(
        "POST /v1/completions HTTP/1.1\r\nContent-Length: {}\r\n\r\n{}", body.size(), body));
  }
  EXPECT_EQ(client.post("/v1/completions", body).status, 200);
  EXPECT_TRUE(soon([&] { return metric(client, "leeway_connections") == 1; }));
  EXPECT_TRUE(soon([&] { return metric(client, "leeway_requests") == 0; }));
}

TEST(ServerTrouble, BadHttpIsAnsweredAndTheConnectionClosed) {
  ServerOptions options = small_options();
  options.http.limits.body_bytes = 1000;
  const RunningServer running(options);
  const std::vector<std::pair<std::string, int>> cases = {
      {"nonsense\r\n\r\n", 400},
      {"GET / HTTP/9\r\n\r\n", 400},
      {"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400},
      {"POST /v1/completions HTTP/1.1\r\nContent-Length: 1001\r\n\r\n", 413},
      {"GET / HTTP/1.1\r\nA: " + std::string(50'000, 'x') + "\r\n\r\n", 431}};
  for (const auto& [bytes, status] : cases) {
    TestClient client = running.client();
    client.send(bytes);
    const HttpReply reply = client.reply();
    EXPECT_EQ(reply.status, status) << bytes.substr(0, 60);
    EXPECT_TRUE(is_error(reply)) << reply.body;
    EXPECT_FALSE(client.read_some()) << "the connection ends";
  }
  Rng rng(3);
  for (int round = 0; round < 200; ++round) {
    TestClient client = running.client();
    std::string bytes;
    for (uint64_t i = rng.below(300); i > 0; --i) bytes += static_cast<char>(rng.below(256));
    client.send(bytes + "\r\n\r\n");
    ::shutdown(client.socket(), SHUT_WR);
    while (client.read_some()) {
    }
  }
  TestClient client = running.client();
  EXPECT_EQ(client.get("/health").status, 200);
}

TEST(ServerTrouble, RequestsMayBePipelinedAndKeptAlive) {
  const RunningServer running;
  TestClient client = running.client();
  std::string bytes;
  for (int i = 0; i < 50; ++i) bytes += "GET /health HTTP/1.1\r\n\r\n";
  client.send(bytes);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(client.reply().status, 200);
  client.send("HEAD /health HTTP/1.1\r\n\r\n");
  ASSERT_TRUE(client.read_until("\r\n\r\n"));
  client.unread().clear();
  client.send("GET /health HTTP/1.0\r\n\r\n");
  EXPECT_EQ(client.reply().status, 200);
  EXPECT_FALSE(client.read_some()) << "HTTP/1.0 ends after one answer";
}

TEST(ServerTrouble, WhoEndsItsSideStillGetsTheAnswer) {
  const RunningServer running;
  for (int i = 0; i < 20; ++i) {
    TestClient client = running.client();
    client.send("GET /metrics HTTP/1.1\r\n\r\n");
    ::shutdown(client.socket(), SHUT_WR);
    EXPECT_EQ(client.reply().status, 200);
    EXPECT_FALSE(client.read_some());
  }
}

// A request that never ends is cut off, whatever it sends, and so is a connection without one.
TEST(ServerTrouble, SlowAndIdleClientsAreClosed) {
  ServerOptions options = small_options();
  options.http.request_seconds = 0.2;
  options.http.idle_seconds = 0.2;
  const RunningServer running(options);
  TestClient idle = running.client(), slow = running.client(), body = running.client();
  slow.send("GET /health HTTP/1.1\r\nA: ");
  body.send("POST /tokenize HTTP/1.1\r\nContent-Length: 10\r\n\r\n{");
  EXPECT_FALSE(idle.read_some());
  while (slow.send("a")) {
    pollfd ready = {slow.socket(), POLLIN, 0};
    if (::poll(&ready, 1, 5) > 0) break;
  }
  EXPECT_EQ(slow.reply().status, 408);
  EXPECT_EQ(body.reply().status, 408);
}

TEST(ServerTrouble, ConnectionsAndRequestsHaveALimit) {
  ServerOptions options = small_options();
  options.http.connections = 3;
  options.max_requests = 1;
  const RunningServer running(options);
  TestClient first = running.client(), second = running.client();
  EXPECT_EQ(first.post("/pause?mode=keep", "").status, 200);
  {
    TestClient third = running.client();
    EXPECT_EQ(third.get("/health").status, 200);
    TestClient fourth = running.client();
    EXPECT_FALSE(fourth.read_some()) << "one too many";
    const std::string body = R"({"token_ids": [1]})";
    third.send(fmt::format("POST /inference/v1/generate HTTP/1.1\r\nContent-Length: {}\r\n\r\n{}",
                           body.size(), body));
    ASSERT_TRUE(soon([&] { return metric(first, "leeway_requests") == 1; }));
    const HttpReply refused = second.post("/inference/v1/generate", body);
    EXPECT_EQ(refused.status, 429);
    EXPECT_TRUE(is_error(refused));
  }
  // The third is gone: its request is cancelled although nothing is sampled.
  EXPECT_TRUE(soon([&] { return metric(first, "leeway_requests") == 0; }));
}

TEST(ServerTrouble, AClientThatLeavesEndsItsRequest) {
  const RunningServer running;
  TestClient watcher = running.client();
  // Paused, so that it does not end by itself.
  EXPECT_EQ(watcher.post("/pause?mode=keep", "").status, 200);
  for (const bool stream : {false, true}) {
    {
      TestClient client = running.client();
      const std::string body = fmt::format(
          R"({{"prompt": "ab", "max_tokens": 500, "n": 4, "ignore_eos": true, "stream": {}}})",
          stream);
      client.send(fmt::format("POST /v1/completions HTTP/1.1\r\nContent-Length: {}\r\n\r\n{}",
                              body.size(), body));
      ASSERT_TRUE(soon([&] { return metric(watcher, "leeway_requests") == 1; }));
    }
    EXPECT_TRUE(soon([&] { return metric(watcher, "leeway_requests") == 0; }));
  }
}

// A stream whose client does not read is cut off when its buffer is full; others go on.
TEST(ServerTrouble, AStreamThatNobodyReadsIsCutOff) {
  ServerOptions options = small_options();
  options.http.stream_bytes = 20'000;
  const RunningServer running(options, byte_served_text(), byte_weights(1, 8192));
  TestClient watcher = running.client();
  TestClient client = running.client();
  const int small = 4096;
  ::setsockopt(client.socket(), SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
  // More bytes for each token than the system's own buffers have room for.
  const std::string body =
      R"({"prompt": "ab", "max_tokens": 8000, "n": 4, "ignore_eos": true, "logprobs": 20, )"
      R"("stream": true})";
  client.send(fmt::format("POST /v1/completions HTTP/1.1\r\nContent-Length: {}\r\n\r\n{}",
                          body.size(), body));
  // Not a request that runs: it may be cut off between two looks.
  ASSERT_TRUE(soon([&] { return metric(watcher, "vllm:generation_tokens_total") > 0; }));
  EXPECT_TRUE(soon([&] { return metric(watcher, "leeway_requests") == 0; }));
  EXPECT_LT(metric(watcher, "vllm:generation_tokens_total"), 32'000);
}

TEST(ServerTrouble, ManyIdleConnectionsCostNothing) {
  const RunningServer running;
  std::vector<std::unique_ptr<TestClient>> idle;
  for (int i = 0; i < 400; ++i) idle.push_back(std::make_unique<TestClient>(running.server.port()));
  TestClient client = running.client();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(client.get("/health").status, 200);
  EXPECT_EQ(metric(client, "leeway_connections"), 401);
  idle.clear();
  EXPECT_TRUE(soon([&] { return metric(client, "leeway_connections") == 1; }));
}

// The CPU's passes, each after a function of the test.
class WatchedBackend final : public SamplingBackend {
 public:
  WatchedBackend(std::unique_ptr<SamplingBackend> inner, std::function<void()> before_pass)
      : inner_(std::move(inner)), before_pass_(std::move(before_pass)) {}
  int64_t blocks() const override { return inner_->blocks(); }
  int64_t block_bytes() const override { return inner_->block_bytes(); }
  void load(const PolicySnapshot& weights) override { inner_->load(weights); }
  void run(const StepRows& pass, std::vector<Drawn>& drawn) override {
    before_pass_();
    inner_->run(pass, drawn);
  }
  void copy_blocks(std::span<const BlockCopy> copies) override { inner_->copy_blocks(copies); }

 private:
  std::unique_ptr<SamplingBackend> inner_;
  std::function<void()> before_pass_;
};

ServerOptions watched(std::function<void()> before_pass) {
  ServerOptions options = small_options();
  options.engine.backend = [before_pass](const ModelConfig& config, const EngineOptions& given,
                                         int64_t most_blocks) {
    return std::make_unique<WatchedBackend>(make_cpu_backend(config, given, most_blocks),
                                            before_pass);
  };
  return options;
}

TEST(ServerTrouble, ADeadEngineIsSaidToAll) {
  std::atomic<bool> alive = true;
  std::vector<std::string> reasons;
  ServerOptions options = watched([&] {
    if (!alive) throw std::runtime_error("the device is gone");
  });
  options.on_failure = [&](const std::string& reason) { reasons.push_back(reason); };
  RunningServer running(options);
  TestClient client = running.client(), streamed = running.client(), watcher = running.client();
  const std::string body = R"({"prompt": "a", "max_tokens": 400, "ignore_eos": true, "n": 8)";
  const auto request = [](const std::string& text) {
    return fmt::format("POST /v1/completions HTTP/1.1\r\nContent-Length: {}\r\n\r\n{}", text.size(),
                       text);
  };
  client.send(request(body + "}"));
  streamed.send(request(body + R"(, "stream": true})"));
  ASSERT_TRUE(soon([&] { return metric(watcher, "leeway_requests") == 2; }));
  alive = false;
  const HttpReply whole = client.reply();
  EXPECT_EQ(whole.status, 500) << whole.body;
  EXPECT_NE(whole.body.find("the device is gone"), std::string::npos) << whole.body;
  const HttpReply stream = streamed.reply();
  EXPECT_NE(stream.body.find("the device is gone"), std::string::npos) << stream.body;
  for (const auto& [method, path, sent, status] :
       std::vector<std::tuple<std::string, std::string, std::string, int>>{
           {"GET", "/health", "", 503},
           {"GET", "/health_generate", "", 503},
           {"GET", "/liveness", "", 200},
           {"POST", "/v1/completions", R"({"prompt": "a"})", 500},
           {"POST", "/inference/v1/generate", R"({"token_ids": [1]})", 500}}) {
    const HttpReply reply = client.call(method, path, sent);
    EXPECT_EQ(reply.status, status) << path;
    if (status == 200) continue;
    EXPECT_TRUE(is_error(reply)) << reply.body;
    EXPECT_NE(reply.body.find("the device is gone"), std::string::npos) << reply.body;
  }
  EXPECT_EQ(metric(client, "leeway_engine_alive"), 0);
  running.end();
  EXPECT_EQ(reasons, std::vector<std::string>{"the device is gone"});
  EXPECT_EQ(running.server.failure(), "the device is gone");
}

// By the engine's own count: after the client is gone, what ran for it is not sampled any more.
TEST(ServerTrouble, WhatRunsForAClientThatLeavesIsCancelled) {
  std::atomic<int64_t> allowed = 0, passes = 0;
  ServerOptions options = watched([&] {
    const int64_t number = ++passes;
    EXPECT_TRUE(soon([&] { return allowed >= number; }));
  });
  const RunningServer running(options);
  TestClient watcher = running.client();
  constexpr int kSamples = 5;
  double sampled = 0, aborted = 0;
  for (const bool streams : {false, true}) {
    {
      TestClient client = running.client();
      const std::string body = fmt::format(
          R"({{"prompt": "a", "max_tokens": 400, "ignore_eos": true, "n": {}, "stream": {}}})",
          kSamples, streams);
      allowed += 3;
      client.send(fmt::format("POST /v1/completions HTTP/1.1\r\nContent-Length: {}\r\n\r\n{}",
                              body.size(), body));
      sampled += 3 * kSamples;
      ASSERT_TRUE(soon([&] {
        return metric(watcher, "leeway_sampled_tokens_total") == sampled &&
               metric(watcher, "vllm:num_requests_running") == kSamples;
      }));
      // The next pass has begun, so that the client does not leave between two of them.
      ASSERT_TRUE(soon([&] { return passes > allowed; }));
    }
    // The pass that runs meanwhile is the last.
    ASSERT_TRUE(soon([&] { return metric(watcher, "leeway_connections") == 1; }));
    allowed += 100;
    ASSERT_TRUE(soon([&] { return metric(watcher, "leeway_requests") == 0; }));
    sampled += kSamples, aborted += kSamples;
    EXPECT_EQ(metric(watcher, "leeway_sampled_tokens_total"), sampled);
    EXPECT_EQ(metric(watcher, "vllm:num_requests_running"), 0);
    EXPECT_EQ(metric(watcher, "vllm:kv_cache_usage_perc"), 0);
    EXPECT_EQ(metric_where(watcher, "vllm:request_success_total", "abort"), aborted);
    allowed = passes.load();
  }
  allowed += 1'000'000;
}

}  // namespace
}  // namespace leeway
