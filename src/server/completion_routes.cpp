// /v1/completions: a text or token ids, continued.
#include <fmt/format.h>

#include "generate/generation.h"
#include "server/api_error.h"
#include "server/completion_writer.h"
#include "server/routes.h"
#include "server/text_requests.h"

namespace leeway {
namespace {

constexpr size_t kMostPrompts = 1024;

// A text, a list of texts, token ids, or a list of lists of token ids.
std::vector<std::vector<int32_t>> read_prompts(const ModelText& text, const JsonFields& fields) {
  const rapidjson::Value* value = fields.find("prompt");
  if (value == nullptr) fields.refuse("prompt", "is missing: a text or token ids");
  std::vector<std::vector<int32_t>> prompts;
  const auto add_text = [&](const rapidjson::Value& item) {
    prompts.push_back(
        plain_prompt(text, "prompt", std::string_view(item.GetString(), item.GetStringLength())));
  };
  if (value->IsString()) {
    add_text(*value);
  } else if (value->IsArray() && !value->Empty() && (*value)[0].IsNumber()) {
    prompts.push_back(ids_in(*value, "prompt"));
  } else if (value->IsArray() && !value->Empty() && value->Size() <= kMostPrompts) {
    for (const rapidjson::Value& item : value->GetArray()) {
      item.IsString() ? add_text(item) : prompts.push_back(ids_in(item, "prompt"));
    }
  } else {
    fields.refuse(
        "prompt",
        fmt::format("must be a text, token ids, or a list of at most {} of them", kMostPrompts));
  }
  for (const auto& prompt : prompts) {
    if (prompt.empty()) fields.refuse("prompt", "is empty: at least one token is needed");
  }
  return prompts;
}

void start_call(ServerContext& context, Call call, CompletionOptions options) {
  call.writer = std::make_unique<CompletionWriter>(std::move(options));
  context.calls.start(std::move(call));
}

void completions(ServerContext& context, const Exchange& exchange) {
  context.check_ready();
  const ModelText& text = text_of(context);
  const rapidjson::Document body = parse_body(exchange->request().body);
  const JsonFields fields(body, "");
  context.check_model(fields);
  if (fields.has("suffix")) fields.refuse("suffix", "is not supported");
  const SamplingFields sampling =
      read_sampling(fields, folder_sampling(text.generation), "max_tokens", 0);

  CompletionOptions options;
  options.head = new_head("cmpl-", context.options.name);
  options.style = read_token_style(fields, *text.tokenizer);
  const std::optional<int64_t> logprobs = read_top(fields, "logprobs", options.style.mode);
  options.style.logprobs = logprobs.has_value();
  options.style.top = logprobs.value_or(0);
  options.echo = fields.flag("echo").value_or(false);
  options.prompts = read_prompts(text, fields);
  options.samples = static_cast<size_t>(sampling.samples);
  options.stop_texts = sampling.stop_texts;
  options.stop_ids = stop_ids_of(sampling, text.end_ids);
  Call call;
  call.exchange = exchange;
  call.request_id = fields.text("request_id").value_or(options.head.id);
  call.streams = fields.flag("stream").value_or(false);
  call.stop_texts = sampling.stop_texts;
  options.usage_in_stream = wants_usage(fields);
  const std::optional<int64_t> scored = read_top(fields, "prompt_logprobs", LogprobsMode::raw);
  options.prompt_top = scored;
  if (scored && call.streams) fields.refuse("prompt_logprobs", "does not go with stream");

  const int64_t limit = sampling.max_tokens.value_or(16);
  if (limit == 0 && !options.echo && !scored) {
    fields.refuse("max_tokens", "is 0: nothing would be answered; with echo the prompt is");
  }
  for (const std::vector<int32_t>& prompt : options.prompts) {
    check_limit(context, prompt.size(), limit, "max_tokens");
    call.requests.push_back(make_request(sampling, prompt, limit, options.stop_ids));
    call.requests.back().top_logprobs = options.style.top;
  }
  check_requests(context, call.requests, limit);
  if (!scored && !(options.echo && options.style.logprobs)) {
    if (limit > 0) return start_call(context, std::move(call), std::move(options));
    std::vector<SampledSequence> none(options.prompts.size() * options.samples);
    for (SampledSequence& choice : none) choice.finish = Finish::length;
    return exchange->respond({.body = CompletionWriter(std::move(options)).whole(none)});
  }
  // The prompts are scored first; what is shared with that function must be copyable.
  auto shared_call = std::make_shared<Call>(std::move(call));
  auto shared = std::make_shared<CompletionOptions>(std::move(options));
  const int64_t top = std::max(scored.value_or(0), shared->echo ? shared->style.top : 0);
  score_then(context, exchange, shared->prompts, top,
             [&context, shared_call, shared, limit](std::vector<PromptScore> scores) {
               shared->scores = std::move(scores);
               if (limit > 0)
                 return start_call(context, std::move(*shared_call), std::move(*shared));
               std::vector<SampledSequence> none(shared->prompts.size() * shared->samples);
               for (SampledSequence& choice : none) choice.finish = Finish::length;
               const Exchange answered = shared_call->exchange;
               answered->respond({.body = CompletionWriter(std::move(*shared)).whole(none)});
             });
}

}  // namespace

void add_completion_routes(RouteTable& routes) {
  routes.add("POST", "/v1/completions", completions);
}

}  // namespace leeway
