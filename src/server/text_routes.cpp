// Texts to token ids and back.
#include <fmt/format.h>

#include "leeway/error.h"
#include "server/api_error.h"
#include "server/routes.h"
#include "server/text_requests.h"

namespace leeway {
namespace {

RouteWork answer_with(std::string body) {
  return [body = std::move(body)](ServerContext&, const Exchange& exchange) {
    exchange->respond({.body = body});
  };
}

RouteWork tokenize(const ServedModel& model, const HttpRequest& request) {
  const ModelText& text = text_of(model);
  const rapidjson::Document body = parse_body(request.body);
  const JsonFields fields(body, "");
  model.check_model(fields);
  const std::optional<std::string> prompt = fields.text("prompt");
  if (!prompt) fields.refuse("prompt", "is missing: the text");
  std::vector<int32_t> ids = text.tokenizer->encode(*prompt, SpecialTokens::recognise);
  if (fields.flag("add_special_tokens").value_or(true)) {
    ids.insert(ids.begin(), text.begin_ids.begin(), text.begin_ids.end());
  }
  return answer_with(fmt::format(R"({{"count": {}, "max_model_len": {}, "tokens": {}}})",
                                 ids.size(), model.positions, integers_text(ids)));
}

RouteWork detokenize(const ServedModel& model, const HttpRequest& request) {
  const ModelText& text = text_of(model);
  const rapidjson::Document body = parse_body(request.body);
  const JsonFields fields(body, "");
  model.check_model(fields);
  const std::optional<std::vector<int32_t>> ids = fields.ids("tokens");
  if (!ids) fields.refuse("tokens", "is missing: the token ids");
  JsonWriter json;
  json.begin_object().key("prompt").value(text.tokenizer->decode(*ids)).end_object();
  return answer_with(json.text());
}

}  // namespace

void add_text_routes(RouteTable& routes) {
  routes.add_reader("POST", "/tokenize", tokenize);
  routes.add_reader("POST", "/detokenize", detokenize);
}

}  // namespace leeway
