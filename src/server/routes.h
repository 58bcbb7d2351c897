// What routes are given, and the table of them. On the server's thread, except where it says
// otherwise.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "server/calls.h"
#include "server/engine_thread.h"
#include "server/http_server.h"
#include "server/json_fields.h"
#include "server/prompt_scores.h"
#include "server/served_adapter.h"
#include "server/server.h"
#include "server/weights.h"

namespace leeway {

// What does not change while a server runs, but for the adapter's name: readable from any thread.
struct ServedModel {
  const ServerOptions& options;
  const ServedText& text;
  const ModelConfig& config;
  const Engine& sampling;  // `check` alone
  int64_t positions = 0;   // of a prompt and its completion together
  const ServedAdapter& adapter;

  // Throws ApiError 404 for another model than the one there is. The model's name and that of its
  // adapter both stand for the current weights: there is one policy at a time.
  void check_model(const JsonFields& body) const;
};

struct ServerContext {
  const ServedModel& model;
  HttpServer& http;
  EngineThread& engine;
  Calls& calls;
  WeightUpdates& weights;
  PromptScores& scores;
  EngineStatus status;  // the latest
  bool draining = false;

  // Throws ApiError 503 while it drains, and another if the engine is dead.
  void check_ready(int status_if_dead = 500) const;
};

using Exchange = std::shared_ptr<HttpExchange>;
// Throws ApiError, or Error for 400, for what it refuses.
using RouteHandler = std::function<void(ServerContext&, const Exchange&)>;
// Reads a request, on any thread, and returns what is to be done for it on the server's. Of the
// exchange it uses the request alone. Throws as a handler does; so may what it returns.
using RouteWork = std::function<void(ServerContext&, const Exchange&)>;
using RouteReader = std::function<RouteWork(const ServedModel&, const HttpRequest&)>;

// One of the two.
struct ServedRoute {
  RouteHandler handler;
  RouteReader reader;
};

class RouteTable {
 public:
  void add(const std::string& method, const std::string& path, RouteHandler handler);
  // For bodies that may be large, and that take time to parse and to tokenize.
  void add_reader(const std::string& method, const std::string& path, RouteReader reader);
  // Throws ApiError 404 and 405.
  const ServedRoute& find(const HttpRequest& request) const;

 private:
  std::map<std::string, std::map<std::string, ServedRoute>> routes_;  // path, method
};

void add_status_routes(RouteTable& routes);   // health, models, what is loaded
void add_control_routes(RouteTable& routes);  // pause, resume, abort
void add_weight_routes(RouteTable& routes);
void add_adapter_routes(RouteTable& routes);
void add_generate_routes(RouteTable& routes);  // token ids in and out, as vLLM
void add_completion_routes(RouteTable& routes);
void add_chat_routes(RouteTable& routes);
void add_sglang_routes(RouteTable& routes);
void add_text_routes(RouteTable& routes);  // tokenize, detokenize
void add_metric_routes(RouteTable& routes);

// Loads weights and answers as all routes that do so: with their version and checksum. Throws
// ApiError. `resume`: go on sampling afterwards.
void start_update(ServerContext& context, const Exchange& exchange, const WeightUpdate& update,
                  bool resume = false);
// The field "weight_version", a number or a text.
std::optional<PolicyVersion> version_in(const JsonFields& fields);

// Runs the function on the server's thread when the engine's thread has done something.
EngineThread::Done answer_when_done(ServerContext& context, const Exchange& exchange,
                                    std::function<std::string()> body);

}  // namespace leeway
