#include "server/completion_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "leeway/error.h"

namespace leeway {
namespace {

std::string prompt_text(const TokenStyle& style, const std::vector<int32_t>& ids) {
  if (style.tokenizer == nullptr) return "";
  try {
    return style.tokenizer->decode(ids);
  } catch (const Error&) {
    std::string text;
    for (const int32_t id : ids) text += style.text_of(id);
    return text;
  }
}

}  // namespace

CompletionWriter::CompletionWriter(CompletionOptions options)
    : options_(std::move(options)), chunk_head_(chunk_head(options_.head, "text_completion")) {
  const size_t choices = options_.prompts.size() * options_.samples;
  for (size_t i = 0; i < choices; ++i) {
    texts_.emplace_back(options_.style.tokenizer, options_.stop_texts, options_.stop_ids);
  }
  offsets_.resize(choices);
  opened_.resize(choices);
}

// {"tokens", "token_logprobs", "top_logprobs", "text_offset"}: of the prompt too where it is
// echoed.
void CompletionWriter::write_logprobs(JsonWriter& json, size_t choice,
                                      const SampledSequence& tokens, bool with_prompt) {
  if (!options_.style.logprobs) {
    json.null();
    return;
  }
  struct Entry {
    std::string name, logprob;  // null: the first token of a prompt
    std::span<const TokenLogprob> top;
  };
  const TokenStyle& style = options_.style;
  std::vector<Entry> entries;
  if (with_prompt) {
    const size_t prompt = choice / options_.samples;
    const std::vector<int32_t>& ids = options_.prompts[prompt];
    const PromptScore& score = options_.scores[prompt];
    for (size_t i = 0; i < ids.size(); ++i) {
      entries.push_back({style.text_of(ids[i]), "null", {}});
      if (i == 0) continue;
      entries.back().logprob = float_text(score.logprobs[i - 1]);
      entries.back().top = score.top_of(i - 1, style.top);
    }
  }
  const std::vector<float>& values = style.logprobs_of(tokens);
  for (size_t i = 0; i < tokens.ids.size(); ++i) {
    entries.push_back({style.text_of(tokens.ids[i]), float_text(values[i]), top_of(tokens, i)});
  }
  json.begin_object().key("tokens").begin_array();
  for (const Entry& entry : entries) json.value(entry.name);
  json.end_array().key("token_logprobs").begin_array();
  for (const Entry& entry : entries) json.raw(entry.logprob);
  json.end_array().key("top_logprobs").begin_array();
  for (const Entry& entry : entries) {
    if (entry.logprob == "null") {
      json.null();
      continue;
    }
    // By text, of which the most likely token has the value; and always with the token that is
    // there.
    std::vector<std::string> written;
    json.begin_object();
    for (const TokenLogprob& token : entry.top) {
      std::string name = style.text_of(token.id);
      if (std::find(written.begin(), written.end(), name) != written.end()) continue;
      json.key(name).raw(float_text(token.logprob));
      written.push_back(std::move(name));
    }
    if (std::find(written.begin(), written.end(), entry.name) == written.end()) {
      json.key(entry.name).raw(entry.logprob);
    }
    json.end_object();
  }
  json.end_array().key("text_offset").begin_array();
  for (const Entry& entry : entries) {
    json.raw(std::to_string(offsets_[choice]));
    offsets_[choice] += entry.name.size();
  }
  json.end_array().end_object();
}

void CompletionWriter::write_choice(JsonWriter& json, size_t choice, const std::string& text,
                                    const SampledSequence& tokens, const char* finish,
                                    bool with_prompt) {
  const std::vector<int32_t>& prompt = options_.prompts[choice / options_.samples];
  const bool echoes = with_prompt && options_.echo;
  json.begin_object().key("index").raw(std::to_string(choice));
  json.key("text").value(echoes ? prompt_text(options_.style, prompt) + text : text);
  json.key("logprobs");
  write_logprobs(json, choice, tokens, echoes);
  json.key("finish_reason");
  finish == nullptr ? json.null() : json.value(finish);
  json.key("stop_reason").null();
  if (options_.style.token_ids) {
    json.key("token_ids").raw(integers_text(tokens.ids));
    if (with_prompt) json.key("prompt_token_ids").raw(integers_text(prompt));
  }
  if (with_prompt && options_.prompt_top) {
    json.key("prompt_logprobs")
        .raw(prompt_logprobs_json(options_.style, prompt,
                                  options_.scores[choice / options_.samples],
                                  *options_.prompt_top));
  }
  json.key("leeway").raw(versions_json(tokens)).end_object();
}

std::string CompletionWriter::whole(const std::vector<SampledSequence>& choices) {
  JsonWriter json;
  json.begin_object();
  write_head(json, options_.head, "text_completion");
  json.key("choices").begin_array();
  for (size_t i = 0; i < choices.size(); ++i) {
    const std::string text = texts_[i].end(choices[i]);
    write_choice(json, i, text, choices[i], finish_text(choices[i].finish), true);
  }
  std::vector<size_t> sizes;
  for (const auto& prompt : options_.prompts) sizes.push_back(prompt.size());
  json.end_array().key("usage").raw(usage_json(usage_of(sizes, choices)));
  return json.end_object().text();
}

std::string CompletionWriter::chunk(size_t choice, const std::string& text,
                                    const SampledSequence& tokens, const char* finish) {
  const bool first = !opened_[choice];
  opened_[choice] = true;
  JsonWriter json;
  write_choice(json, choice, text, tokens, finish, first);
  return chunk_head_ + json.text() + kChunkEnd;
}

std::string CompletionWriter::piece(size_t choice, const SampledSequence& fresh) {
  return chunk(choice, texts_[choice].take(fresh.ids), fresh, nullptr);
}

std::string CompletionWriter::ending(size_t choice, const SampledSequence& all) {
  const SampledSequence rest = tokens_from(all, texts_[choice].taken());
  const std::string text = texts_[choice].end(all);
  return chunk(choice, text, rest, finish_text(all.finish));
}

std::string CompletionWriter::closing(const std::vector<SampledSequence>& choices) {
  std::string text;
  if (options_.usage_in_stream) {
    std::vector<size_t> sizes;
    for (const auto& prompt : options_.prompts) sizes.push_back(prompt.size());
    JsonWriter json;
    json.begin_object();
    write_head(json, options_.head, "text_completion");
    json.key("choices").begin_array().end_array();
    json.key("usage").raw(usage_json(usage_of(sizes, choices)));
    text = event_text(json.end_object().text());
  }
  return text + "data: [DONE]\n\n";
}

}  // namespace leeway
