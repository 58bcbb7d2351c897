#include "server/text_requests.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "leeway/error.h"
#include "server/api_error.h"

namespace leeway {

const ModelText& text_of(const ServerContext& context) {
  if (!context.text.text) throw ApiError(400, context.text.why_no_text);
  return *context.text.text;
}

const ModelText& chat_of(const ServerContext& context) {
  if (!context.text.chat) throw ApiError(400, context.text.why_no_chat);
  return *context.text.chat;
}

SamplingSettings folder_sampling(const GenerationConfig& folder) {
  SamplingSettings settings;
  settings.temperature = folder.temperature.value_or(settings.temperature);
  settings.top_p = folder.top_p.value_or(settings.top_p);
  settings.min_p = folder.min_p.value_or(settings.min_p);
  settings.top_k = folder.top_k.value_or(settings.top_k);
  return settings;
}

std::vector<int32_t> stop_ids_of(const SamplingFields& sampling, const std::vector<int32_t>& ends) {
  std::vector<int32_t> ids = sampling.stop_ids;
  if (!sampling.ignore_eos.value_or(false)) ids.insert(ids.end(), ends.begin(), ends.end());
  return ids;
}

Request make_request(const SamplingFields& sampling, std::vector<int32_t> prompt, int64_t limit,
                     std::vector<int32_t> stop_ids) {
  Request request;
  request.prompt = std::move(prompt);
  request.samples = sampling.samples;
  request.max_new_tokens = limit;
  request.sampling = sampling.settings;
  request.stop_ids = std::move(stop_ids);
  request.seed = sampling.seed ? *sampling.seed : random_seed();
  return request;
}

void check_limit(const ServerContext& context, size_t prompt, int64_t limit, const char* key) {
  const auto used = static_cast<int64_t>(prompt);
  if (used > context.positions || limit > context.positions - used) {
    throw ApiError(400,
                   fmt::format("a prompt of {} tokens and {} {} do not fit: there are {} positions",
                               used, key, limit, context.positions),
                   key);
  }
}

void check_requests(const ServerContext& context, const std::vector<Request>& requests,
                    int64_t limit) {
  for (Request request : requests) {
    request.max_new_tokens = std::max<int64_t>(limit, 1);
    // Of a prompt that is only scored the last token needs no position after it, and is checked
    // here.
    const int32_t last = request.prompt.empty() ? 0 : request.prompt.back();
    if (limit == 0 && (last < 0 || last >= context.config.vocab_size)) {
      throw ApiError(400, fmt::format("prompt: the id {} is not one of the model's 0 to {}", last,
                                      context.config.vocab_size - 1));
    }
    if (limit == 0 && request.prompt.size() > 1) request.prompt.pop_back();
    try {
      context.engine.engine().check(request);
    } catch (const Error& error) {
      throw ApiError(400, error.what());
    }
  }
}

bool wants_usage(const JsonFields& fields) {
  const std::optional<JsonFields> options = fields.object("stream_options");
  return options && options->flag("include_usage").value_or(false);
}

void score_then(ServerContext& context, const Exchange& exchange,
                std::vector<std::vector<int32_t>> prompts, int64_t top,
                std::function<void(std::vector<PromptScore>)> then) {
  context.scores.start(
      context.weights.shared(), std::move(prompts), top,
      [exchange, then = std::move(then)](const std::vector<PromptScore>& scores,
                                         const std::string& failure) {
        if (!failure.empty()) {
          return exchange->respond({.status = 500, .body = error_json(500, failure)});
        }
        try {
          then(scores);
        } catch (const ApiError& error) {
          exchange->respond({.status = error.status(),
                             .body = error_json(error.status(), error.what(), error.param())});
        }
      });
}

}  // namespace leeway
