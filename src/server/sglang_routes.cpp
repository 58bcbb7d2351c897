// The routes that SGLang has and others do not.
#include <fmt/format.h>

#include "server/api_error.h"
#include "server/routes.h"
#include "server/sglang_writer.h"
#include "server/text_requests.h"

namespace leeway {
namespace {

constexpr int64_t kUsualTokens = 128;

// `text` or `input_ids`, one or a list.
std::vector<std::vector<int32_t>> read_inputs(const ServedModel& model, const JsonFields& fields,
                                              bool& is_list) {
  std::vector<std::vector<int32_t>> prompts;
  if (fields.has("input_ids")) {
    const rapidjson::Value& value = *fields.find("input_ids");
    is_list = value.IsArray() && !value.Empty() && value[0].IsArray();
    if (!is_list) return {ids_in(value, "input_ids")};
    for (const rapidjson::Value& item : value.GetArray()) {
      prompts.push_back(ids_in(item, "input_ids"));
    }
    return prompts;
  }
  const std::optional<std::vector<std::string>> texts = fields.texts("text");
  if (!texts || texts->empty()) fields.refuse("input_ids", "is missing; text would do as well");
  is_list = fields.find("text")->IsArray();
  for (const std::string& text : *texts) {
    prompts.push_back(plain_prompt(text_of(model), "text", text));
  }
  return prompts;
}

RouteWork sglang_generate(const ServedModel& model, const HttpRequest& request) {
  const rapidjson::Document body = parse_body(request.body);
  const JsonFields fields(body, "");
  const rapidjson::Value empty(rapidjson::kObjectType);
  const JsonFields parameters =
      fields.object("sampling_params").value_or(JsonFields(empty, "sampling_params."));
  const SamplingFields sampling = read_sampling(parameters, {}, "max_new_tokens");
  if (!sampling.stop_texts.empty()) text_of(model);
  SglangOptions options;
  options.prompts = read_inputs(model, fields, options.is_list);
  options.id = fields.text("rid").value_or(random_hex(32));
  const ModelText* text = model.text.text.get();
  options.tokenizer = text == nullptr ? nullptr : text->tokenizer.get();
  options.samples = static_cast<size_t>(sampling.samples);
  options.stop_texts = sampling.stop_texts;
  options.stop_ids =
      stop_ids_of(sampling, text == nullptr ? model.config.eos_token_id : text->end_ids);
  options.logprobs = fields.flag("return_logprob").value_or(false);
  options.scored_from = fields.integer("logprob_start_len", -1, int64_t{1} << 31).value_or(-1);
  if (!options.logprobs) options.scored_from = -1;
  if (fields.text("logprobs_mode") == "processed_logprobs") options.mode = LogprobsMode::processed;
  options.top = read_top(fields, "top_logprobs_num", options.mode).value_or(0);
  if (!options.logprobs) options.top = 0;

  const int64_t limit = sampling.max_tokens.value_or(kUsualTokens);
  Call call;
  call.request_id = options.id;
  call.streams = fields.flag("stream").value_or(false);
  call.stop_texts = sampling.stop_texts;
  for (const std::vector<int32_t>& prompt : options.prompts) {
    check_limit(model, prompt.size(), limit, "max_new_tokens");
    call.requests.push_back(make_request(sampling, prompt, limit, options.stop_ids));
    call.requests.back().top_logprobs = options.top;
  }
  check_requests(model, call.requests, limit);
  ReadCall read;
  read.call = std::move(call);
  if (options.scored_from >= 0) {
    read.scored = options.prompts;
    read.scored_top = options.top;
  }
  auto shared = std::make_shared<SglangOptions>(std::move(options));
  read.writer = [shared](ServerContext&, std::vector<PromptScore> scores) {
    shared->scores = std::move(scores);
    return std::make_unique<SglangWriter>(std::move(*shared));
  };
  return work_of(std::move(read));
}

PauseMode sglang_mode(const std::string& name) {
  if (name == "abort") return PauseMode::abort;
  if (name == "retract") return PauseMode::recompute;
  if (name == "in_place") return PauseMode::keep;
  throw ApiError(400, fmt::format("mode \"{}\": there are abort, retract and in_place", name),
                 "mode");
}

std::string message_json(const std::string& message) {
  JsonWriter json;
  json.begin_object().key("success").value(true).key("status").value("ok");
  return json.key("message").value(message).end_object().text();
}

void pause_generation(ServerContext& context, const Exchange& exchange) {
  const rapidjson::Document body = parse_body(exchange->request().body);
  const PauseMode mode = sglang_mode(JsonFields(body, "").text("mode").value_or("abort"));
  context.engine.pause(mode,
                       answer_when_done(context, exchange, [] { return message_json("paused"); }));
}

void continue_generation(ServerContext& context, const Exchange& exchange) {
  context.engine.resume(
      answer_when_done(context, exchange, [] { return message_json("continued"); }));
}

// {"rid"} or {"abort_all": true}; vLLM's {"request_ids": [..]}, without which all are meant.
void abort_requests(ServerContext& context, const Exchange& exchange) {
  const rapidjson::Document body = parse_body(exchange->request().body);
  const JsonFields fields(body, "");
  const std::optional<std::string> rid = fields.text("rid");
  const std::optional<std::vector<std::string>> list = fields.texts("request_ids");
  if (fields.flag("abort_all").value_or(false) ||
      (exchange->request().path == "/abort_requests" && !list)) {
    context.engine.cancel_all();
  } else if (rid && !rid->empty()) {
    context.calls.abort(*rid);
  } else if (list) {
    for (const std::string& id : *list) context.calls.abort(id);
  } else {
    fields.refuse("rid", "is missing; abort_all ends all requests");
  }
  exchange->respond({.body = message_json("aborted")});
}

// There is no cache of prefixes that outlives a request: nothing stays to be flushed.
void flush_cache(ServerContext&, const Exchange& exchange) {
  exchange->respond({.body = message_json("no prefix outlives its request: nothing to flush")});
}

// Answers once the engine has sampled a token.
class HealthWriter final : public AnswerWriter {
 public:
  std::string whole(const std::vector<SampledSequence>&) override { return "{}"; }
  std::string piece(size_t, const SampledSequence&) override { return ""; }
  std::string ending(size_t, const SampledSequence&) override { return ""; }
  std::string closing(const std::vector<SampledSequence>&) override { return ""; }
};

void health_generate(ServerContext& context, const Exchange& exchange) {
  context.check_ready(503);
  if (context.status.paused) throw ApiError(503, "paused: nothing is sampled until a resume");
  Call call;
  call.exchange = exchange;
  call.request_id = "health-" + random_hex(16);
  call.requests.push_back({.prompt = {0}, .max_new_tokens = 1});
  call.writer = std::make_unique<HealthWriter>();
  context.calls.start(std::move(call));
}

void weight_version(ServerContext&, const Exchange&) {
  throw ApiError(404, "/get_weight_version is gone: /model_info has weight_version");
}

void loads(ServerContext& context, const Exchange& exchange) {
  const EngineStatus& status = context.status;
  const int64_t used = status.blocks - status.free_blocks;
  exchange->respond(
      {.body = fmt::format(R"({{"loads": [{{"dp_rank": 0, "num_running_reqs": {}, )"
                           R"("num_waiting_reqs": {}, "num_used_blocks": {}, )"
                           R"("token_usage": {:.6g}}}]}})",
                           status.running, status.queued, used,
                           status.blocks == 0
                               ? 0.0
                               : static_cast<double>(used) / static_cast<double>(status.blocks))});
}

}  // namespace

void add_sglang_routes(RouteTable& routes) {
  routes.add_reader("POST", "/generate", sglang_generate);
  routes.add("POST", "/pause_generation", pause_generation);
  routes.add("POST", "/continue_generation", continue_generation);
  routes.add("POST", "/abort_request", abort_requests);
  routes.add("POST", "/abort_requests", abort_requests);
  for (const char* method : {"GET", "POST"}) {
    routes.add(method, "/flush_cache", flush_cache);
    routes.add(method, "/reset_prefix_cache", flush_cache);
  }
  routes.add("GET", "/health_generate", health_generate);
  routes.add("GET", "/get_weight_version", weight_version);
  routes.add("GET", "/v1/loads", loads);
}

}  // namespace leeway
