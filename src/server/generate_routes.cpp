// Token ids in and out, as vLLM's /inference/v1/generate has them.
#include <fmt/format.h>

#include <iterator>

#include "server/api_error.h"
#include "server/routes.h"
#include "server/sampling_fields.h"
#include "server/text_answer.h"
#include "server/text_requests.h"

namespace leeway {
namespace {

std::string choice_json(size_t index, const SampledSequence& sequence) {
  fmt::memory_buffer out;
  const auto to = std::back_inserter(out);
  fmt::format_to(to, R"({{"index": {}, "token_ids": {}, "logprobs": {{"content": [)", index,
                 integers_text(sequence.ids));
  for (size_t i = 0; i < sequence.ids.size(); ++i) {
    fmt::format_to(to, R"({}{{"token_id": {}, "logprob": {}}})", i == 0 ? "" : ",", sequence.ids[i],
                   float_text(sequence.raw_logprobs[i]));
  }
  fmt::format_to(
      to, R"(]}}, "finish_reason": "{}", "leeway": {{"versions": {}, "processed_logprobs": {}}}}})",
      finish_text(sequence.finish), integers_text(sequence.versions),
      floats_text(sequence.processed_logprobs));
  return fmt::to_string(out);
}

class InferenceWriter final : public AnswerWriter {
 public:
  InferenceWriter(ServerContext& context, std::string request_id, std::string prompt_logprobs)
      : context_(context),
        request_id_(std::move(request_id)),
        prompt_logprobs_(std::move(prompt_logprobs)) {}

  std::string whole(const std::vector<SampledSequence>& choices) override {
    std::string list;
    for (size_t i = 0; i < choices.size(); ++i) {
      if (i > 0) list += ", ";
      list += choice_json(i, choices[i]);
    }
    JsonWriter id;
    id.value(request_id_);
    return fmt::format(
        R"({{"request_id": {}, "choices": [{}], "prompt_logprobs": {}, "leeway": {{"version": {}}}}})",
        id.text(), list, prompt_logprobs_, context_.status.version);
  }
  std::string piece(size_t, const SampledSequence&) override { return ""; }
  std::string ending(size_t, const SampledSequence&) override { return ""; }
  std::string closing(const std::vector<SampledSequence>&) override { return ""; }

 private:
  ServerContext& context_;
  std::string request_id_;
  std::string prompt_logprobs_;  // JSON
};

void inference_generate(ServerContext& context, const Exchange& exchange) {
  context.check_ready();
  const rapidjson::Document body = parse_body(exchange->request().body);
  const JsonFields fields(body, "");
  context.check_model(fields);
  if (fields.flag("stream").value_or(false)) {
    fields.refuse("stream", "this route answers whole; /v1/completions streams");
  }
  const rapidjson::Value empty(rapidjson::kObjectType);
  const JsonFields parameters =
      fields.object("sampling_params").value_or(JsonFields(empty, "sampling_params."));
  const SamplingFields sampling = read_sampling(parameters, {}, "max_tokens");
  parameters.integer("logprobs", 0, 1);
  if (!sampling.stop_texts.empty()) {
    parameters.refuse("stop", "this route has token ids alone; use stop_token_ids");
  }
  Request request;
  std::optional<std::vector<int32_t>> prompt = fields.ids("token_ids");
  if (!prompt) fields.refuse("token_ids", "is missing: the prompt's token ids");
  request.prompt = std::move(*prompt);
  request.samples = sampling.samples;
  request.max_new_tokens = sampling.max_tokens.value_or(16);
  request.sampling = sampling.settings;
  request.stop_ids = sampling.stop_ids;
  // Ids alone end a sequence here unless the client asks for the model's end tokens too.
  if (sampling.ignore_eos == false) {
    const auto& ends = context.text.text ? context.text.text->end_ids : context.config.eos_token_id;
    request.stop_ids.insert(request.stop_ids.end(), ends.begin(), ends.end());
  }
  request.seed = sampling.seed ? *sampling.seed : random_seed();
  Call call;
  call.exchange = exchange;
  call.request_id = fields.text("request_id").value_or("");
  const std::vector<int32_t> ids = request.prompt;
  call.requests.push_back(std::move(request));
  if (!parameters.integer("prompt_logprobs", 0, 1)) {
    call.writer = std::make_unique<InferenceWriter>(context, call.request_id, "null");
    return context.calls.start(std::move(call));
  }
  check_requests(context, call.requests, call.requests.front().max_new_tokens);
  auto shared = std::make_shared<Call>(std::move(call));
  score_then(context, exchange, {ids},
             [&context, shared, ids](std::vector<std::vector<float>> scores) {
               TokenStyle style;
               if (context.text.text) style.tokenizer = context.text.text->tokenizer.get();
               shared->writer = std::make_unique<InferenceWriter>(
                   context, shared->request_id, prompt_logprobs_json(style, ids, scores.front()));
               context.calls.start(std::move(*shared));
             });
}

}  // namespace

void add_generate_routes(RouteTable& routes) {
  routes.add("POST", "/inference/v1/generate", inference_generate);
}

}  // namespace leeway
