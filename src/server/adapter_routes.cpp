// Adapters over the model that is served, by the names that vLLM and SGLang have for it.
#include <fmt/format.h>

#include "server/api_error.h"
#include "server/routes.h"

namespace leeway {
namespace {

std::string name_in(const JsonFields& fields) {
  const std::optional<std::string> name = fields.text("lora_name");
  if (!name || name->empty()) fields.refuse("lora_name", "is missing: the adapter's name");
  return *name;
}

void load_adapter_of(ServerContext& context, const Exchange& exchange) {
  const rapidjson::Document body = parse_body(exchange->request().body);
  const JsonFields fields(body, "");
  const std::string name = name_in(fields);
  const std::optional<std::string> folder = fields.text("lora_path");
  if (!folder || folder->empty()) fields.refuse("lora_path", "is missing: the adapter's folder");
  if (name == context.model.options.name) {
    fields.refuse("lora_name", "is the model's own name; call the adapter something else");
  }
  start_update(context, exchange,
               {.folder = *folder,
                .version = version_in(fields),
                .adapter_name = name,
                .must_be_adapter = true});
}

void unload_adapter_of(ServerContext& context, const Exchange& exchange) {
  const rapidjson::Document body = parse_body(exchange->request().body);
  const JsonFields fields(body, "");
  const std::string name = name_in(fields), now = context.model.adapter.now().name;
  if (name != now) {
    throw ApiError(404,
                   fmt::format("there is no adapter \"{}\" here{}", name,
                               now.empty() ? "" : fmt::format(", only \"{}\"", now)),
                   "lora_name");
  }
  start_update(context, exchange, {.folder = "", .version = version_in(fields)});
}

}  // namespace

void add_adapter_routes(RouteTable& routes) {
  for (const char* prefix : {"", "/v1"}) {
    routes.add("POST", fmt::format("{}/load_lora_adapter", prefix), load_adapter_of);
    routes.add("POST", fmt::format("{}/unload_lora_adapter", prefix), unload_adapter_of);
  }
}

}  // namespace leeway
