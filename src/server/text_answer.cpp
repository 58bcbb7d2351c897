#include "server/text_answer.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <span>

#include "leeway/error.h"
#include "server/api_error.h"

namespace leeway {

std::string TokenStyle::text_of(int32_t id) const {
  if (as_token_ids) return fmt::format("token_id:{}", id);
  if (tokenizer == nullptr) return "";
  try {
    return tokenizer->decode(std::span(&id, 1));
  } catch (const Error&) {
    return "\xEF\xBF\xBD";  // a row that pads the vocabulary
  }
}

TokenStyle read_token_style(const JsonFields& body, const Tokenizer* tokenizer) {
  TokenStyle style;
  style.tokenizer = tokenizer;
  style.token_ids = body.flag("return_token_ids").value_or(false);
  style.as_token_ids = body.flag("return_tokens_as_token_ids").value_or(tokenizer == nullptr);
  const std::string mode = body.text("logprobs_mode").value_or("raw_logprobs");
  if (mode != "raw_logprobs" && mode != "processed_logprobs") {
    body.refuse("logprobs_mode", "there are raw_logprobs and processed_logprobs");
  }
  if (mode == "processed_logprobs") style.mode = LogprobsMode::processed;
  return style;
}

std::optional<int64_t> read_top(const JsonFields& fields, const char* key, LogprobsMode mode) {
  const std::optional<int64_t> top = fields.integer(key, 0, kMostTopLogprobs);
  if (top.value_or(0) > 0 && mode == LogprobsMode::processed) {
    fields.refuse(key, "the most likely tokens have raw_logprobs alone: leave logprobs_mode out");
  }
  return top;
}

ChoiceText::ChoiceText(const Tokenizer* tokenizer, std::vector<std::string> stop_texts,
                       std::vector<int32_t> stop_ids)
    : stop_ids_(std::move(stop_ids)) {
  if (tokenizer != nullptr) stream_.emplace(*tokenizer, std::move(stop_texts), false);
}

std::string ChoiceText::take(const std::vector<int32_t>& fresh) {
  taken_ += fresh.size();
  std::string text;
  if (!stream_) return text;
  for (const int32_t id : fresh) text += stream_->push(id).text;
  return text;
}

std::string ChoiceText::end(const SampledSequence& all) {
  std::span<const int32_t> rest = std::span(all.ids).subspan(std::min(taken_, all.ids.size()));
  taken_ = all.ids.size();
  if (!stream_) return "";
  // A stop id ends the sequence, and is the last one where a stop text has not.
  const bool by_id = all.finish == Finish::stop && !rest.empty() &&
                     std::find(stop_ids_.begin(), stop_ids_.end(), rest.back()) != stop_ids_.end();
  if (by_id) rest = rest.first(rest.size() - 1);
  std::string text;
  for (const int32_t id : rest) text += stream_->push(id).text;
  return text + stream_->finish().text;
}

Usage usage_of(const std::vector<size_t>& prompt_sizes,
               const std::vector<SampledSequence>& choices) {
  Usage usage;
  for (const size_t size : prompt_sizes) usage.prompt += size;
  for (const SampledSequence& choice : choices) usage.completion += choice.ids.size();
  return usage;
}

std::string usage_json(const Usage& usage) {
  return fmt::format(R"({{"prompt_tokens": {}, "completion_tokens": {}, "total_tokens": {}}})",
                     usage.prompt, usage.completion, usage.prompt + usage.completion);
}

std::string versions_json(const SampledSequence& sequence) {
  return fmt::format(R"({{"versions": {}}})", integers_text(sequence.versions));
}

std::string random_hex(size_t count) {
  std::string text;
  while (text.size() < count) text += fmt::format("{:016x}", random_seed());
  text.resize(count);
  return text;
}

AnswerHead new_head(const std::string& prefix, const std::string& model) {
  return {prefix + random_hex(24), model, static_cast<int64_t>(std::time(nullptr))};
}

void write_head(JsonWriter& json, const AnswerHead& head, const char* object) {
  json.key("id").value(head.id).key("object").value(object);
  json.key("created").raw(std::to_string(head.created)).key("model").value(head.model);
}

std::string chunk_head(const AnswerHead& head, const char* object) {
  JsonWriter json;
  json.begin_object();
  write_head(json, head, object);
  json.key("choices").begin_array();
  return "data: " + json.text();
}

std::string prompt_logprobs_json(const TokenStyle& style, const std::vector<int32_t>& ids,
                                 const PromptScore& score, int64_t top_count) {
  JsonWriter json;
  json.begin_array();
  for (size_t i = 0; i < ids.size(); ++i) {
    if (i == 0) {
      json.null();
      continue;
    }
    const std::span<const TokenLogprob> top = score.top_of(i - 1, top_count);
    const auto write = [&](int32_t id, float logprob) {
      json.key(std::to_string(id)).begin_object().key("logprob").raw(float_text(logprob));
      const auto found = std::find_if(top.begin(), top.end(),
                                      [&](const TokenLogprob& token) { return token.id == id; });
      if (found != top.end()) json.key("rank").raw(std::to_string(found - top.begin() + 1));
      json.key("decoded_token").value(style.text_of(id)).end_object();
    };
    json.begin_object();
    write(ids[i], score.logprobs[i - 1]);
    for (const TokenLogprob& token : top) {
      if (token.id != ids[i]) write(token.id, token.logprob);
    }
    json.end_object();
  }
  return json.end_array().text();
}

}  // namespace leeway
