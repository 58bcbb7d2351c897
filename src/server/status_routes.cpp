// What a server says about itself.
#include <fmt/format.h>

#include "server/api_error.h"
#include "server/routes.h"

namespace leeway {
namespace {

void health(ServerContext& context, const Exchange& exchange) {
  context.check_ready(503);
  exchange->respond({.body = "{}"});
}

void models(ServerContext& context, const Exchange& exchange) {
  JsonWriter json;
  json.begin_object().key("object").value("list").key("data").begin_array().begin_object();
  json.key("id").value(context.model.options.name).key("object").value("model");
  json.key("created").raw("0").key("owned_by").value("leeway");
  json.key("root").value(context.model.options.folder);
  json.key("max_model_len").raw(std::to_string(context.model.positions));
  json.end_object();
  if (const AdapterName adapter = context.model.adapter.now(); !adapter.name.empty()) {
    json.begin_object().key("id").value(adapter.name).key("object").value("model");
    json.key("created").raw("0").key("owned_by").value("leeway");
    json.key("root").value(adapter.folder).key("parent").value(context.model.options.name);
    json.key("max_model_len").raw(std::to_string(context.model.positions)).end_object();
  }
  json.end_array().end_object();
  exchange->respond({.body = json.text()});
}

void model_info(ServerContext& context, const Exchange& exchange) {
  const PolicySnapshot& weights = context.weights.current();
  JsonWriter json;
  json.begin_object().key("model_path").value(context.model.options.folder);
  json.key("tokenizer_path").value(context.model.text.text ? context.model.options.folder : "");
  json.key("is_generation").value(true);
  json.key("weight_version").value(std::to_string(weights.version()));
  json.key("leeway").begin_object();
  json.key("version").raw(std::to_string(weights.version()));
  json.key("checksum").value(fmt::format("{:08x}", weights.checksum()));
  json.key("vocab_size").raw(std::to_string(context.model.config.vocab_size));
  json.key("max_model_len").raw(std::to_string(context.model.positions));
  json.key("precision").value(name_of(context.model.options.engine.precision));
  json.key("paused").value(context.status.paused);
  json.key("adapter").value(context.model.adapter.now().name);
  if (const auto& sharing = context.model.options.sharing) {
    json.key("device").value(sharing->device);
  }
  json.key("dialect").raw("1").end_object().end_object();
  exchange->respond({.body = json.text()});
}

}  // namespace

void add_status_routes(RouteTable& routes) {
  routes.add("GET", "/health", health);
  routes.add("GET", "/liveness",
             [](ServerContext&, const Exchange& exchange) { exchange->respond({.body = "{}"}); });
  routes.add("GET", "/v1/models", models);
  routes.add("GET", "/model_info", model_info);
  routes.add("GET", "/get_model_info", model_info);
}

}  // namespace leeway
