// `leeway serve`: the engine over HTTP, in the dialects of OpenAI's clients, vLLM and SGLang.
//
//   HTTP (http_server.h) -> routes -> Calls -> EngineThread -> Engine
//
// One thread reads and writes sockets, JSON and text; one parses and tokenizes requests that are
// long; one runs the engine; one loads weights. They talk by posted functions, so that a slow
// client, a long prompt or a large file holds up neither a step nor a stream.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "engine/engine.h"
#include "model/shared_weights.h"
#include "server/http_server.h"
#include "server/served_text.h"

namespace leeway {

struct ServerOptions {
  std::string folder;   // of the model
  std::string name;     // as requests and /v1/models call it
  std::string adapter;  // folder of the first weights' adapter, which is its name too; empty: none
  HttpOptions http;
  EngineOptions engine;
  std::string weights_root;  // weights are loaded from below this folder; empty: from nowhere
  // Weights are also copied from the memory of this GPU, for whoever has the key. Needs an api_key
  // and a host that is this machine alone.
  std::optional<WeightSharing> sharing;
  std::string api_key;          // wanted as a bearer token; empty: none is
  int64_t max_requests = 1024;  // at a time, those that wait included
  double drain_seconds = 30;    // after that, requests end with what they have
  // Called once if the engine fails, on the thread in `run`. The server goes on: /health answers
  // 503 and requests 500, both with the reason.
  std::function<void(const std::string& reason)> on_failure;
};

class Server {
 public:
  // Listens when it returns. Throws Error for an address, a folder or options that cannot be used.
  Server(ServerOptions options, std::shared_ptr<const PolicySnapshot> weights, ServedText text);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  std::string url() const;
  int port() const;
  // Answers until it has drained.
  void run();
  // After `run`: why the engine failed; empty: it did not.
  const std::string& failure() const;
  // From any thread: no new requests; `run` returns when those there are have been answered.
  void drain();
  // A descriptor to which a signal handler writes eight bytes that are not zero, to drain.
  int drain_fd() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace leeway
