#include "server/sglang_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <span>

namespace leeway {
namespace {

// [[logprob, id, null], ..]: the text of tokens is not repeated.
std::string triples(const std::vector<int32_t>& ids, const std::vector<float>& values) {
  fmt::memory_buffer out;
  out.push_back('[');
  for (size_t i = 0; i < ids.size(); ++i) {
    fmt::format_to(std::back_inserter(out), "{}[{}, {}, null]", i == 0 ? "" : ",",
                   float_text(values[i]), ids[i]);
  }
  out.push_back(']');
  return fmt::to_string(out);
}

std::string triples(std::span<const TokenLogprob> top) {
  fmt::memory_buffer out;
  out.push_back('[');
  for (size_t i = 0; i < top.size(); ++i) {
    fmt::format_to(std::back_inserter(out), "{}[{}, {}, null]", i == 0 ? "" : ",",
                   float_text(top[i].logprob), top[i].id);
  }
  out.push_back(']');
  return fmt::to_string(out);
}

}  // namespace

SglangWriter::SglangWriter(SglangOptions options) : options_(std::move(options)) {
  const size_t choices = options_.prompts.size() * options_.samples;
  streamed_.resize(choices);
  for (size_t i = 0; i < choices && options_.tokenizer != nullptr; ++i) {
    texts_.emplace_back(options_.tokenizer, options_.stop_texts, options_.stop_ids);
  }
}

std::string SglangWriter::finish_json(const SampledSequence& sequence) const {
  if (sequence.finish == Finish::length) {
    return fmt::format(R"({{"type": "length", "length": {}}})", sequence.ids.size());
  }
  if (sequence.finish != Finish::stop) return R"({"type": "abort", "message": "aborted"})";
  const auto& ids = options_.stop_ids;
  const bool by_id =
      !sequence.ids.empty() && std::find(ids.begin(), ids.end(), sequence.ids.back()) != ids.end();
  if (!by_id) return R"({"type": "stop"})";
  return fmt::format(R"({{"type": "stop", "matched": {}}})", sequence.ids.back());
}

std::string SglangWriter::object(size_t choice, const SampledSequence& sequence,
                                 const std::string& text, bool ended) const {
  const size_t number = choice / options_.samples;
  const std::vector<int32_t>& prompt = options_.prompts[number];
  JsonWriter json;
  json.begin_object().key("text").value(text);
  json.key("output_ids").raw(integers_text(sequence.ids)).key("meta_info").begin_object();
  json.key("id").value(options_.id).key("finish_reason");
  ended ? json.raw(finish_json(sequence)) : json.null();
  json.key("prompt_tokens").raw(std::to_string(prompt.size()));
  json.key("completion_tokens").raw(std::to_string(sequence.ids.size()));
  json.key("cached_tokens").raw("0").key("weight_version");
  json.value(sequence.versions.empty() ? "" : std::to_string(sequence.versions.back()));
  if (options_.logprobs) {
    const bool raw = options_.mode == LogprobsMode::raw;
    json.key("output_token_logprobs")
        .raw(triples(sequence.ids, raw ? sequence.raw_logprobs : sequence.processed_logprobs));
    if (options_.top > 0) {
      json.key("output_top_logprobs").begin_array();
      for (size_t i = 0; i < sequence.ids.size(); ++i) json.raw(triples(top_of(sequence, i)));
      json.end_array();
    }
  }
  if (options_.scored_from >= 0) {
    const size_t from = std::min(static_cast<size_t>(options_.scored_from), prompt.size());
    json.key("input_token_logprobs").begin_array();
    for (size_t i = from; i < prompt.size(); ++i) {
      json.raw(fmt::format("[{}, {}, null]",
                           i == 0 ? "null" : float_text(options_.scores[number].logprobs[i - 1]),
                           prompt[i]));
    }
    json.end_array();
    if (options_.top > 0) {
      json.key("input_top_logprobs").begin_array();
      for (size_t i = from; i < prompt.size(); ++i) {
        i == 0 ? json.null()
               : json.raw(triples(options_.scores[number].top_of(i - 1, options_.top)));
      }
      json.end_array();
    }
  }
  json.end_object().key("leeway").raw(versions_json(sequence));
  if (options_.prompts.size() * options_.samples > 1) {
    json.key("index").raw(std::to_string(choice));
  }
  return json.end_object().text();
}

std::string SglangWriter::whole(const std::vector<SampledSequence>& choices) {
  std::string list;
  for (size_t i = 0; i < choices.size(); ++i) {
    if (i > 0) list += ", ";
    list += object(i, choices[i], texts_.empty() ? "" : texts_[i].end(choices[i]), true);
  }
  return options_.is_list || options_.samples > 1 ? "[" + list + "]" : list;
}

std::string SglangWriter::piece(size_t choice, const SampledSequence& fresh) {
  Streamed& now = streamed_[choice];
  append_tokens(now.all, fresh);
  if (!texts_.empty()) now.text += texts_[choice].take(fresh.ids);
  return event_text(object(choice, now.all, now.text, false));
}

std::string SglangWriter::ending(size_t choice, const SampledSequence& all) {
  Streamed& now = streamed_[choice];
  if (!texts_.empty()) now.text += texts_[choice].end(all);
  return event_text(object(choice, all, now.text, true));
}

std::string SglangWriter::closing(const std::vector<SampledSequence>&) {
  return "data: [DONE]\n\n";
}

}  // namespace leeway
