// Pausing and going on.
#include <fmt/format.h>

#include "server/api_error.h"
#include "server/routes.h"

namespace leeway {
namespace {

PauseMode mode_named(const std::string& name) {
  if (name == "keep") return PauseMode::keep;
  if (name == "abort") return PauseMode::abort;
  if (name == "wait") return PauseMode::wait;
  throw ApiError(400, fmt::format("mode \"{}\": there are keep, abort and wait", name), "mode");
}

void pause(ServerContext& context, const Exchange& exchange) {
  const rapidjson::Document body = parse_body(exchange->request().body);
  const JsonFields fields(body, "");
  std::optional<std::string> mode = exchange->request().query_value("mode");
  if (!mode) mode = fields.text("mode");
  context.engine.pause(mode_named(mode.value_or("abort")), answer_when_done(context, exchange, [] {
                         return std::string(R"({"status": "paused", "is_paused": true})");
                       }));
}

void resume(ServerContext& context, const Exchange& exchange) {
  context.engine.resume(answer_when_done(context, exchange, [] {
    return std::string(R"({"status": "resumed", "is_paused": false})");
  }));
}

void is_paused(ServerContext& context, const Exchange& exchange) {
  exchange->respond({.body = fmt::format(R"({{"is_paused": {}}})", context.status.paused)});
}

}  // namespace

void add_control_routes(RouteTable& routes) {
  routes.add("POST", "/pause", pause);
  routes.add("POST", "/resume", resume);
  routes.add("GET", "/is_paused", is_paused);
}

}  // namespace leeway
