// Texts to token ids and back.
#include <fmt/format.h>

#include "leeway/error.h"
#include "server/api_error.h"
#include "server/routes.h"
#include "server/text_requests.h"

namespace leeway {
namespace {

void tokenize(ServerContext& context, const Exchange& exchange) {
  const ModelText& text = text_of(context);
  const rapidjson::Document body = parse_body(exchange->request().body);
  const JsonFields fields(body, "");
  context.check_model(fields);
  const std::optional<std::string> prompt = fields.text("prompt");
  if (!prompt) fields.refuse("prompt", "is missing: the text");
  std::vector<int32_t> ids = text.tokenizer->encode(*prompt, SpecialTokens::recognise);
  if (fields.flag("add_special_tokens").value_or(true)) {
    ids.insert(ids.begin(), text.begin_ids.begin(), text.begin_ids.end());
  }
  exchange->respond({.body = fmt::format(R"({{"count": {}, "max_model_len": {}, "tokens": {}}})",
                                         ids.size(), context.positions, integers_text(ids))});
}

void detokenize(ServerContext& context, const Exchange& exchange) {
  const ModelText& text = text_of(context);
  const rapidjson::Document body = parse_body(exchange->request().body);
  const JsonFields fields(body, "");
  context.check_model(fields);
  const std::optional<std::vector<int32_t>> ids = fields.ids("tokens");
  if (!ids) fields.refuse("tokens", "is missing: the token ids");
  JsonWriter json;
  json.begin_object().key("prompt").value(text.tokenizer->decode(*ids)).end_object();
  exchange->respond({.body = json.text()});
}

}  // namespace

void add_text_routes(RouteTable& routes) {
  routes.add("POST", "/tokenize", tokenize);
  routes.add("POST", "/detokenize", detokenize);
}

}  // namespace leeway
