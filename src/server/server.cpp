#include "server/server.h"

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>

#include "generate/generation.h"
#include "leeway/error.h"
#include "server/api_error.h"
#include "server/routes.h"

namespace leeway {
namespace {

// Bodies below this are read in less time than it takes to hand them over and back.
constexpr size_t kSmallBody = 16 << 10;

// In a time that does not depend on where two keys differ.
bool same_key(std::string_view given, std::string_view key) {
  unsigned difference = given.size() == key.size() ? 0 : 1;
  for (size_t i = 0; i < given.size(); ++i) {
    difference |= static_cast<unsigned char>(given[i]) ^
                  static_cast<unsigned char>(key[key.empty() ? 0 : i % key.size()]);
  }
  return difference == 0;
}

bool is_authorized(const HttpRequest& request, const std::string& key) {
  if (key.empty() || request.path == "/health" || request.path == "/metrics") return true;
  const std::string* header = request.header("authorization");
  constexpr std::string_view kScheme = "Bearer ";
  if (header == nullptr || !header->starts_with(kScheme)) return false;
  return same_key(std::string_view(*header).substr(kScheme.size()), key);
}

// A handle of memory is of use to processes of this machine alone, and only its owner may send one.
ServerOptions checked(ServerOptions options) {
  if (!options.sharing) return options;
  if (options.api_key.empty()) {
    throw Error("--device-weights needs a key: --api-key-file, or the variable LEEWAY_API_KEY");
  }
  if (!is_loopback(options.http.host)) {
    throw Error(fmt::format(
        "--device-weights is for processes of this machine, and --host {} is open to others: use "
        "127.0.0.1",
        options.http.host));
  }
  return options;
}

RouteTable all_routes() {
  RouteTable routes;
  add_status_routes(routes);
  add_control_routes(routes);
  add_weight_routes(routes);
  add_adapter_routes(routes);
  add_generate_routes(routes);
  add_completion_routes(routes);
  add_chat_routes(routes);
  add_sglang_routes(routes);
  add_text_routes(routes);
  add_metric_routes(routes);
  return routes;
}

}  // namespace

void ServedModel::check_model(const JsonFields& body) const {
  const std::optional<std::string> wanted = body.text("model");
  if (!wanted || wanted->empty() || *wanted == options.name || *wanted == options.folder) return;
  const std::string name = adapter.now().name;
  if (*wanted == name) return;
  throw ApiError(404,
                 fmt::format("there is no model \"{}\" here, only \"{}\"{}", *wanted, options.name,
                             name.empty() ? "" : fmt::format(" and its adapter \"{}\"", name)),
                 "model");
}

void ServerContext::check_ready(int status_if_dead) const {
  if (!status.failure.empty()) {
    throw ApiError(status_if_dead, "the engine has failed: " + status.failure);
  }
  if (draining) throw ApiError(503, "the server is shutting down");
}

void RouteTable::add(const std::string& method, const std::string& path, RouteHandler handler) {
  routes_[path][method].handler = std::move(handler);
}

void RouteTable::add_reader(const std::string& method, const std::string& path,
                            RouteReader reader) {
  routes_[path][method].reader = std::move(reader);
}

const ServedRoute& RouteTable::find(const HttpRequest& request) const {
  const auto path = routes_.find(request.path);
  if (path == routes_.end()) {
    throw ApiError(404, fmt::format("there is no route {}", request.path));
  }
  const auto method = path->second.find(request.method == "HEAD" ? "GET" : request.method);
  if (method == path->second.end()) {
    throw ApiError(405, fmt::format("{} is for {}, not for {}", request.path,
                                    path->second.begin()->first, request.method));
  }
  return method->second;
}

EngineThread::Done answer_when_done(ServerContext& context, const Exchange& exchange,
                                    std::function<std::string()> body) {
  return [&context, exchange, body = std::move(body)](const std::string& failure) {
    context.http.post([exchange, body, failure] {
      if (failure.empty()) {
        exchange->respond({.body = body()});
      } else {
        exchange->respond({.status = 500, .body = error_json(500, failure)});
      }
    });
  };
}

struct Server::Impl {
  const ServerOptions options;
  const ServedText text;
  const ModelConfig config;
  const RouteTable routes = all_routes();

  // Updates of the engine's thread that the server's has not taken yet, so that a server that is
  // busy finds one message and not many.
  std::mutex mutex;
  std::vector<EngineUpdate> updates;
  EngineStatus status;
  bool has_report = false;

  HttpServer http;
  EngineThread engine;
  Calls calls;
  ServedAdapter adapter;
  WeightUpdates weights;
  PromptScores scores;
  const ServedModel model;
  ServerContext context;

  std::chrono::steady_clock::time_point drain_by;
  bool aborted = false;

  int64_t readings = 0;  // requests that `reader` has
  Worker reader;         // the first to end: it uses the others

  Impl(ServerOptions given, std::shared_ptr<const PolicySnapshot> snapshot, ServedText served)
      : options(checked(std::move(given))),
        text(std::move(served)),
        config(snapshot->config()),
        http(
            options.http, [this](Exchange exchange) { handle(exchange); },
            [](int code, const std::string& message) { return error_json(code, message); }),
        engine(snapshot, options.engine, text.text ? text.text->tokenizer.get() : nullptr,
               [this](std::vector<EngineUpdate> fresh, const EngineStatus& now) {
                 report(std::move(fresh), now);
               }),
        calls(engine, options.max_requests),
        adapter({options.adapter, options.adapter}),
        weights(engine, snapshot, adapter, options.weights_root,
                options.sharing ? &*options.sharing : nullptr,
                [this](std::function<void()> function) { http.post(std::move(function)); }),
        scores([this](std::function<void()> function) { http.post(std::move(function)); },
               options.engine.threads),
        model{options, text, config, engine.engine(), most_positions(engine.engine(), config),
              adapter},
        context{model, http, engine, calls, weights, scores} {
    context.status.version = snapshot->version();
    context.status.blocks = context.status.free_blocks = engine.engine().blocks();
    http.on_signal([this] { drain(); });
  }

  void report(std::vector<EngineUpdate> fresh, const EngineStatus& now);
  void take_report();
  template <class Function>
  void guarded(const Exchange& exchange, const Function& function);
  void handle(const Exchange& exchange);
  void read_beside(const RouteReader& read, const Exchange& exchange);
  void drain();
};

void Server::Impl::report(std::vector<EngineUpdate> fresh, const EngineStatus& now) {
  bool first = false;
  {
    const std::lock_guard lock(mutex);
    first = !std::exchange(has_report, true);
    std::move(fresh.begin(), fresh.end(), std::back_inserter(updates));
    status = now;
  }
  if (first) http.post([this] { take_report(); });
}

void Server::Impl::take_report() {
  std::vector<EngineUpdate> taken;
  bool dies = false;
  {
    const std::lock_guard lock(mutex);
    has_report = false;
    std::swap(taken, updates);
    dies = context.status.failure.empty() && !status.failure.empty();
    context.status = status;
  }
  if (dies && options.on_failure) options.on_failure(context.status.failure);
  calls.take(std::move(taken));
}

// Answers with what the function throws.
template <class Function>
void Server::Impl::guarded(const Exchange& exchange, const Function& function) {
  const auto refuse = [&](int code, const std::string& message, const std::string& param) {
    HttpAnswer answer{.status = code, .body = error_json(code, message, param)};
    if (code == 401) answer.headers.emplace_back("WWW-Authenticate", "Bearer");
    exchange->respond(answer);
  };
  try {
    function();
  } catch (const ApiError& error) {
    refuse(error.status(), error.what(), error.param());
  } catch (const Error& error) {
    refuse(400, error.what(), "");
  } catch (const std::exception& error) {
    if (!exchange->streams()) refuse(500, error.what(), "");
  }
}

void Server::Impl::handle(const Exchange& exchange) {
  guarded(exchange, [&] {
    const HttpRequest& request = exchange->request();
    if (!is_authorized(request, options.api_key)) {
      throw ApiError(401, "the key is missing or wrong: send it as Authorization: Bearer KEY");
    }
    const ServedRoute& route = routes.find(request);
    if (route.handler) return route.handler(context, exchange);
    context.check_ready();
    if (request.body.size() < kSmallBody) return route.reader(model, request)(context, exchange);
    read_beside(route.reader, exchange);
  });
}

// Long bodies take long to parse and to tokenize, and streams must not wait for that.
void Server::Impl::read_beside(const RouteReader& read, const Exchange& exchange) {
  ++readings;
  reader.post([this, &read, exchange] {
    RouteWork work;
    std::exception_ptr problem;
    try {
      work = read(model, exchange->request());
    } catch (...) {
      problem = std::current_exception();
    }
    http.post([this, exchange, work = std::move(work), problem] {
      --readings;
      guarded(exchange, [&] {
        if (problem) std::rethrow_exception(problem);
        work(context, exchange);
      });
    });
  });
}

void Server::Impl::drain() {
  if (std::exchange(context.draining, true)) return;
  http.drain();
  drain_by = std::chrono::steady_clock::now() +
             std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                 std::chrono::duration<double>(options.drain_seconds));
  http.every(0.01, [this] {
    if (calls.empty() && !scores.busy() && readings == 0) {
      http.stop(options.http.write_seconds);
      return false;
    }
    // What is paused does not end by itself.
    const bool late = std::chrono::steady_clock::now() >= drain_by || context.status.paused;
    if (late && !std::exchange(aborted, true)) engine.cancel_all();
    return true;
  });
}

Server::Server(ServerOptions options, std::shared_ptr<const PolicySnapshot> weights,
               ServedText text)
    : impl_(std::make_unique<Impl>(std::move(options), std::move(weights), std::move(text))) {}

Server::~Server() = default;

std::string Server::url() const { return impl_->http.url(); }
int Server::port() const { return impl_->http.port(); }
void Server::run() { impl_->http.run(); }
const std::string& Server::failure() const { return impl_->context.status.failure; }
void Server::drain() {
  impl_->http.post([this] { impl_->drain(); });
}
int Server::drain_fd() const { return impl_->http.signal_fd(); }

}  // namespace leeway
