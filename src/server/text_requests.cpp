#include "server/text_requests.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "leeway/error.h"
#include "server/api_error.h"

namespace leeway {

const ModelText& text_of(const ServedModel& model) {
  if (!model.text.text) throw ApiError(400, model.text.why_no_text);
  return *model.text.text;
}

const ModelText& chat_of(const ServedModel& model) {
  if (!model.text.chat) throw ApiError(400, model.text.why_no_chat);
  return *model.text.chat;
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

void check_limit(const ServedModel& model, size_t prompt, int64_t limit, const char* key) {
  const auto used = static_cast<int64_t>(prompt);
  if (used > model.positions || limit > model.positions - used) {
    throw ApiError(400,
                   fmt::format("a prompt of {} tokens and {} {} do not fit: there are {} positions",
                               used, key, limit, model.positions),
                   key);
  }
}

void check_requests(const ServedModel& model, const std::vector<Request>& requests, int64_t limit) {
  for (Request request : requests) {
    request.max_new_tokens = std::max<int64_t>(limit, 1);
    // Of a prompt that is only scored the last token needs no position after it, and is checked
    // here.
    const int32_t last = request.prompt.empty() ? 0 : request.prompt.back();
    if (limit == 0 && (last < 0 || last >= model.config.vocab_size)) {
      throw ApiError(400, fmt::format("prompt: the id {} is not one of the model's 0 to {}", last,
                                      model.config.vocab_size - 1));
    }
    if (limit == 0 && request.prompt.size() > 1) request.prompt.pop_back();
    try {
      model.sampling.check(request);
    } catch (const Error& error) {
      throw ApiError(400, error.what());
    }
  }
}

bool wants_usage(const JsonFields& fields) {
  const std::optional<JsonFields> options = fields.object("stream_options");
  return options && options->flag("include_usage").value_or(false);
}

namespace {

void begin(ServerContext& context, ReadCall& read, std::vector<PromptScore> scores) {
  std::unique_ptr<AnswerWriter> writer = read.writer(context, std::move(scores));
  if (read.samples) {
    read.call.writer = std::move(writer);
    return context.calls.start(std::move(read.call));
  }
  std::vector<SampledSequence> none;
  for (const Request& request : read.call.requests) {
    none.resize(none.size() + static_cast<size_t>(request.samples));
  }
  for (SampledSequence& choice : none) choice.finish = Finish::length;
  read.call.exchange->respond({.body = writer->whole(none)});
}

}  // namespace

RouteWork work_of(ReadCall read) {
  // What is posted must be copyable.
  auto shared = std::make_shared<ReadCall>(std::move(read));
  return [shared](ServerContext& context, const Exchange& exchange) {
    shared->call.exchange = exchange;
    if (shared->scored.empty()) return begin(context, *shared, {});
    context.scores.start(
        context.weights.shared(), std::move(shared->scored), shared->scored_top,
        [&context, shared](const std::vector<PromptScore>& scores, const std::string& failure) {
          const Exchange answered = shared->call.exchange;
          try {
            if (!failure.empty()) throw ApiError(500, failure);
            begin(context, *shared, scores);
          } catch (const ApiError& error) {
            answered->respond({.status = error.status(),
                               .body = error_json(error.status(), error.what(), error.param())});
          }
        });
  };
}

}  // namespace leeway
