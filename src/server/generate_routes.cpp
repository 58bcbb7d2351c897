// Token ids in and out, as vLLM's /inference/v1/generate has them.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <iterator>
#include <span>

#include "server/api_error.h"
#include "server/routes.h"
#include "server/sampling_fields.h"
#include "server/text_answer.h"
#include "server/text_requests.h"

namespace leeway {
namespace {

// `finish` null: it goes on. A choice of a stream has the tokens that are new.
void write_choice(fmt::memory_buffer& out, size_t index, const SampledSequence& tokens,
                  const char* finish) {
  const auto to = std::back_inserter(out);
  fmt::format_to(to, R"({{"index": {}, "token_ids": [{}], "logprobs": {{"content": [)", index,
                 fmt::join(tokens.ids, ","));
  for (size_t i = 0; i < tokens.ids.size(); ++i) {
    fmt::format_to(to, R"({}{{"token_id": {}, "logprob": {})", i == 0 ? "" : ",", tokens.ids[i],
                   float_text(tokens.raw_logprobs[i]));
    const std::span<const TokenLogprob> top = top_of(tokens, i);
    if (!top.empty()) {
      fmt::format_to(to, R"(, "top_logprobs": [)");
      for (const TokenLogprob& token : top) {
        fmt::format_to(to, R"({}{{"token": "token_id:{}", "token_id": {}, "logprob": {}}})",
                       &token == top.data() ? "" : ",", token.id, token.id,
                       float_text(token.logprob));
      }
      out.push_back(']');
    }
    out.push_back('}');
  }
  const std::string reason = finish == nullptr ? "null" : fmt::format("\"{}\"", finish);
  fmt::format_to(
      to, R"(]}}, "finish_reason": {}, "leeway": {{"versions": [{}], "processed_logprobs": {}}}}})",
      reason, fmt::join(tokens.versions, ","), floats_text(tokens.processed_logprobs));
}

class InferenceWriter final : public AnswerWriter {
 public:
  struct Options {
    std::string request_id;
    size_t prompt_tokens = 0;
    size_t samples = 1;
    bool usage_in_stream = false;
    std::string prompt_logprobs = "null";  // JSON
  };
  InferenceWriter(ServerContext& context, Options options)
      : context_(context), options_(std::move(options)), sent_(options_.samples) {
    JsonWriter id;
    id.value(options_.request_id);
    id_ = id.text();
  }

  std::string whole(const std::vector<SampledSequence>& choices) override {
    fmt::memory_buffer out;
    fmt::format_to(std::back_inserter(out), R"({{"request_id": {}, "choices": [)", id_);
    for (size_t i = 0; i < choices.size(); ++i) {
      if (i > 0) out.push_back(',');
      write_choice(out, i, choices[i], finish_text(choices[i].finish));
    }
    fmt::format_to(std::back_inserter(out),
                   R"(], "prompt_logprobs": {}, "leeway": {{"version": {}}}}})",
                   options_.prompt_logprobs, context_.status.version);
    return fmt::to_string(out);
  }
  std::string piece(size_t choice, const SampledSequence& fresh) override {
    sent_[choice] += fresh.ids.size();
    return chunk(choice, fresh, nullptr);
  }
  std::string ending(size_t choice, const SampledSequence& all) override {
    return chunk(choice, tokens_from(all, sent_[choice]), finish_text(all.finish));
  }
  std::string closing(const std::vector<SampledSequence>& choices) override {
    std::string text;
    if (options_.usage_in_stream) {
      text = event_text(fmt::format(R"({{"request_id": {}, "choices": [], "usage": {}}})", id_,
                                    usage_json(usage_of({options_.prompt_tokens}, choices))));
    }
    return text + "data: [DONE]\n\n";
  }

 private:
  std::string chunk(size_t choice, const SampledSequence& tokens, const char* finish) const {
    fmt::memory_buffer out;
    fmt::format_to(std::back_inserter(out), R"(data: {{"request_id": {}, "choices": [)", id_);
    write_choice(out, choice, tokens, finish);
    fmt::format_to(std::back_inserter(out), "]}}\n\n");
    return fmt::to_string(out);
  }

  ServerContext& context_;
  const Options options_;
  std::string id_;            // JSON
  std::vector<size_t> sent_;  // [samples] tokens
};

RouteWork inference_generate(const ServedModel& model, const HttpRequest& http) {
  const rapidjson::Document body = parse_body(http.body);
  const JsonFields fields(body, "");
  model.check_model(fields);
  const rapidjson::Value empty(rapidjson::kObjectType);
  const JsonFields parameters =
      fields.object("sampling_params").value_or(JsonFields(empty, "sampling_params."));
  const SamplingFields sampling = read_sampling(parameters, {}, "max_tokens");
  // vLLM counts the sampled token as one of them, which is always there.
  const int64_t top = read_top(parameters, "logprobs", LogprobsMode::raw).value_or(0);
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
    const auto& ends = model.text.text ? model.text.text->end_ids : model.config.eos_token_id;
    request.stop_ids.insert(request.stop_ids.end(), ends.begin(), ends.end());
  }
  request.seed = sampling.seed ? *sampling.seed : random_seed();
  request.top_logprobs = top > 1 ? top : 0;
  Call call;
  call.request_id = fields.text("request_id").value_or("");
  call.streams = fields.flag("stream").value_or(false);
  const std::optional<int64_t> scored = read_top(parameters, "prompt_logprobs", LogprobsMode::raw);
  if (scored && call.streams) parameters.refuse("prompt_logprobs", "does not go with stream");
  InferenceWriter::Options options;
  options.request_id = call.request_id;
  options.prompt_tokens = request.prompt.size();
  options.samples = static_cast<size_t>(sampling.samples);
  options.usage_in_stream = wants_usage(fields);
  ReadCall read;
  if (scored) {
    read.scored = {request.prompt};
    read.scored_top = *scored;
  }
  call.requests.push_back(std::move(request));
  check_requests(model, call.requests, call.requests.front().max_new_tokens);
  read.call = std::move(call);
  TokenStyle style;
  if (model.text.text) style.tokenizer = model.text.text->tokenizer.get();
  read.writer = [options, style, ids = scored ? read.scored.front() : std::vector<int32_t>(),
                 count = scored.value_or(0)](ServerContext& context,
                                             std::vector<PromptScore> scores) {
    InferenceWriter::Options all = options;
    if (!scores.empty()) {
      all.prompt_logprobs = prompt_logprobs_json(style, ids, scores.front(), count);
    }
    return std::make_unique<InferenceWriter>(context, std::move(all));
  };
  return work_of(std::move(read));
}

}  // namespace

void add_generate_routes(RouteTable& routes) {
  routes.add_reader("POST", "/inference/v1/generate", inference_generate);
}

}  // namespace leeway
