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
std::vector<std::vector<int32_t>> read_prompts(const ServedModel& model, const JsonFields& fields) {
  const rapidjson::Value* value = fields.find("prompt");
  if (value == nullptr) fields.refuse("prompt", "is missing: a text or token ids");
  std::vector<std::vector<int32_t>> prompts;
  const auto add_text = [&](const rapidjson::Value& item) {
    const std::string_view prompt(item.GetString(), item.GetStringLength());
    prompts.push_back(plain_prompt(text_of(model), "prompt", prompt));
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

RouteWork completions(const ServedModel& model, const HttpRequest& request) {
  const ModelText* const text = model.text.text.get();  // null: token ids alone
  const rapidjson::Document body = parse_body(request.body);
  const JsonFields fields(body, "");
  model.check_model(fields);
  if (fields.has("suffix")) fields.refuse("suffix", "is not supported");
  const SamplingFields sampling = read_sampling(
      fields, text ? folder_sampling(text->generation) : SamplingSettings(), "max_tokens", 0);
  if (!text && !sampling.stop_texts.empty()) fields.refuse("stop", model.text.why_no_text);

  CompletionOptions options;
  options.head = new_head("cmpl-", model.options.name);
  options.style = read_token_style(fields, text ? text->tokenizer.get() : nullptr);
  const std::optional<int64_t> logprobs = read_top(fields, "logprobs", options.style.mode);
  options.style.logprobs = logprobs.has_value();
  options.style.top = logprobs.value_or(0);
  options.echo = fields.flag("echo").value_or(false);
  options.prompts = read_prompts(model, fields);
  options.samples = static_cast<size_t>(sampling.samples);
  options.stop_texts = sampling.stop_texts;
  options.stop_ids = stop_ids_of(sampling, text ? text->end_ids : model.config.eos_token_id);
  Call call;
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
    check_limit(model, prompt.size(), limit, "max_tokens");
    call.requests.push_back(make_request(sampling, prompt, limit, options.stop_ids));
    call.requests.back().top_logprobs = options.style.top;
  }
  check_requests(model, call.requests, limit);
  ReadCall read;
  read.call = std::move(call);
  read.samples = limit > 0;
  if (scored || (options.echo && options.style.logprobs)) {
    read.scored = options.prompts;
    read.scored_top = std::max(scored.value_or(0), options.echo ? options.style.top : 0);
  }
  auto shared = std::make_shared<CompletionOptions>(std::move(options));
  read.writer = [shared](ServerContext&, std::vector<PromptScore> scores) {
    shared->scores = std::move(scores);
    return std::make_unique<CompletionWriter>(std::move(*shared));
  };
  return work_of(std::move(read));
}

}  // namespace

void add_completion_routes(RouteTable& routes) {
  routes.add_reader("POST", "/v1/completions", completions);
}

}  // namespace leeway
