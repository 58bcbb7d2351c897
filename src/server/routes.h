// What routes are given, and the table of them. All of it on the server's thread.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "server/calls.h"
#include "server/engine_thread.h"
#include "server/http_server.h"
#include "server/json_fields.h"
#include "server/prompt_scores.h"
#include "server/server.h"
#include "server/weights.h"

namespace leeway {

struct ServerContext {
  const ServerOptions& options;
  const ServedText& text;
  const ModelConfig& config;
  HttpServer& http;
  EngineThread& engine;
  Calls& calls;
  WeightUpdates& weights;
  PromptScores& scores;
  EngineStatus status;  // the latest
  bool draining = false;
  int64_t positions = 0;  // of a prompt and its completion together

  // Throws ApiError 404 for another model than the one there is.
  void check_model(const JsonFields& body) const;
  // Throws ApiError 503 while it drains, and another if the engine is dead.
  void check_ready(int status_if_dead = 500) const;
};

using Exchange = std::shared_ptr<HttpExchange>;
// Throws ApiError, or Error for 400, for what it refuses.
using RouteHandler = std::function<void(ServerContext&, const Exchange&)>;

class RouteTable {
 public:
  void add(const std::string& method, const std::string& path, RouteHandler handler);
  // Throws ApiError 404 and 405.
  const RouteHandler& find(const HttpRequest& request) const;

 private:
  std::map<std::string, std::map<std::string, RouteHandler>> routes_;  // path, method
};

void add_status_routes(RouteTable& routes);   // health, models, what is loaded
void add_control_routes(RouteTable& routes);  // pause, resume, abort
void add_weight_routes(RouteTable& routes);
void add_generate_routes(RouteTable& routes);  // token ids in and out, as vLLM
void add_completion_routes(RouteTable& routes);
void add_chat_routes(RouteTable& routes);
void add_sglang_routes(RouteTable& routes);
void add_text_routes(RouteTable& routes);  // tokenize, detokenize
void add_metric_routes(RouteTable& routes);

// Runs the function on the server's thread when the engine's thread has done something.
EngineThread::Done answer_when_done(ServerContext& context, const Exchange& exchange,
                                    std::function<std::string()> body);

}  // namespace leeway
