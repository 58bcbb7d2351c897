// What the routes of texts share: which text there is, limits, stop tokens and scored prompts.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "generate/folder_settings.h"
#include "server/routes.h"
#include "server/sampling_fields.h"

namespace leeway {

// Throws ApiError 400 where the model's folder has no tokenizer, or no chat format.
const ModelText& text_of(const ServedModel& model);
const ModelText& chat_of(const ServedModel& model);

// What generation_config.json says, else the engine's defaults.
SamplingSettings folder_sampling(const GenerationConfig& folder);

// The request's stop ids, and the model's end tokens unless ignore_eos is true.
std::vector<int32_t> stop_ids_of(const SamplingFields& sampling, const std::vector<int32_t>& ends);

Request make_request(const SamplingFields& sampling, std::vector<int32_t> prompt, int64_t limit,
                     std::vector<int32_t> stop_ids);

// Throws ApiError 400 if a prompt of so many tokens and `limit` new ones do not fit; nothing is
// clamped. `key` is the request's name of the limit.
void check_limit(const ServedModel& model, size_t prompt, int64_t limit, const char* key);

// Throws ApiError 400 for what the engine would refuse; `limit` 0: of the prompts alone.
void check_requests(const ServedModel& model, const std::vector<Request>& requests, int64_t limit);

// stream_options.include_usage.
bool wants_usage(const JsonFields& fields);

// A request for samples that has been read.
struct ReadCall {
  Call call;  // without exchange and writer
  // Prompts whose tokens are scored first, with so many of the most likely ones; empty: none.
  std::vector<std::vector<int32_t>> scored;
  int64_t scored_top = 0;
  bool samples = true;  // false: the scores and the prompt are all that is answered
  std::function<std::unique_ptr<AnswerWriter>(ServerContext&, std::vector<PromptScore>)> writer;
};

// Scores, and gives the call to the engine.
RouteWork work_of(ReadCall read);

}  // namespace leeway
