#include "server/chat_writer.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/utf8.h"

namespace leeway {
namespace {

// A long reply is read again after every 64th part of it, so that reading stays a small share of
// sampling.
constexpr size_t kReadings = 64;

// Removes what follows the first stop text, and it.
void cut_at_stop(std::string& text, const std::vector<std::string>& stop_texts) {
  size_t end = text.size();
  for (const std::string& stop : stop_texts) end = std::min(end, text.find(stop));
  text.resize(end);
}

// Where text can be sent although more follows: not inside a character, nor where a stop text may
// have begun.
size_t safe_size(const std::string& text, const std::vector<std::string>& stop_texts) {
  size_t longest = 1;
  for (const std::string& stop : stop_texts) longest = std::max(longest, stop.size());
  const size_t size = text.size() - std::min(text.size(), longest - 1);
  return valid_utf8_prefix(std::string_view(text).substr(0, size));
}

void write_logprobs(JsonWriter& json, const TokenStyle& style, const SampledSequence& tokens) {
  if (!style.logprobs) {
    json.null();
    return;
  }
  const std::vector<float>& values = style.logprobs_of(tokens);
  json.begin_object().key("content").begin_array();
  for (size_t i = 0; i < tokens.ids.size(); ++i) {
    const auto write = [&](int32_t id, float logprob) {
      const std::string text = style.text_of(id);
      json.begin_object().key("token").value(text).key("logprob").raw(float_text(logprob));
      json.key("bytes").begin_array();
      for (const char c : text) json.raw(std::to_string(static_cast<unsigned char>(c)));
      json.end_array();
    };
    write(tokens.ids[i], values[i]);
    json.key("top_logprobs").begin_array();
    for (const TokenLogprob& token : top_of(tokens, i)) {
      write(token.id, token.logprob);
      json.end_object();
    }
    json.end_array().end_object();
  }
  json.end_array().key("refusal").null().end_object();
}

void write_calls(JsonWriter& json, const std::vector<ToolCall>& calls, bool numbered) {
  json.begin_array();
  for (size_t i = 0; i < calls.size(); ++i) {
    json.begin_object();
    if (numbered) json.key("index").raw(std::to_string(i));
    json.key("id").value(calls[i].id.empty() ? "call_" + random_hex(16) : calls[i].id);
    json.key("type").value("function").key("function").begin_object();
    json.key("name").value(calls[i].name);
    json.key("arguments").value(calls[i].arguments.empty() ? "{}" : calls[i].arguments);
    json.end_object().end_object();
  }
  json.end_array();
}

const char* chat_finish(const SampledSequence& sequence, const ChatReplyText& reply) {
  const bool calls = sequence.finish == Finish::stop && !reply.calls.empty();
  return calls ? "tool_calls" : finish_text(sequence.finish);
}

}  // namespace

ChatReplyText read_reply(const ChatOptions& options, const std::vector<int32_t>& ids) {
  const ParsedResponse parsed = options.renderer->parse_response(ids, options.render);
  ChatReplyText reply;
  reply.content = parsed.content;
  reply.reasoning = parsed.reasoning.value_or("");
  for (const ParsedToolCall& call : parsed.tool_calls) {
    if (call.status == ToolCallStatus::ok && options.has_tools) {
      reply.calls.push_back(call.call);
    } else {
      reply.content += call.raw;
    }
  }
  cut_at_stop(reply.reasoning, options.stop_texts);
  cut_at_stop(reply.content, options.stop_texts);
  return reply;
}

ChatWriter::ChatWriter(ChatOptions options)
    : options_(std::move(options)),
      chunk_head_(chunk_head(options_.head, "chat.completion.chunk")) {
  sent_.resize(options_.samples);
}

std::string ChatWriter::whole(const std::vector<SampledSequence>& choices) {
  JsonWriter json;
  json.begin_object();
  write_head(json, options_.head, "chat.completion");
  json.key("choices").begin_array();
  for (size_t i = 0; i < choices.size(); ++i) {
    const ChatReplyText reply = read_reply(options_, choices[i].ids);
    json.begin_object().key("index").raw(std::to_string(i)).key("message").begin_object();
    json.key("role").value("assistant").key("content");
    reply.content.empty() && !reply.calls.empty() ? json.null() : json.value(reply.content);
    json.key("refusal").null().key("reasoning_content");
    reply.reasoning.empty() ? json.null() : json.value(reply.reasoning);
    if (!reply.calls.empty()) {
      json.key("tool_calls");
      write_calls(json, reply.calls, false);
    }
    json.end_object().key("logprobs");
    write_logprobs(json, options_.style, choices[i]);
    json.key("finish_reason").value(chat_finish(choices[i], reply));
    if (options_.style.token_ids) json.key("token_ids").raw(integers_text(choices[i].ids));
    json.key("leeway").raw(versions_json(choices[i])).end_object();
  }
  json.end_array();
  json.key("usage").raw(usage_json(usage_of({options_.prompt.size()}, choices)));
  if (options_.style.token_ids) {
    json.key("prompt_token_ids").raw(integers_text(options_.prompt));
  }
  if (options_.prompt_top) {
    json.key("prompt_logprobs")
        .raw(prompt_logprobs_json(options_.style, options_.prompt, options_.score,
                                  *options_.prompt_top));
  }
  return json.end_object().text();
}

std::string ChatWriter::chunk(size_t choice, const std::string& delta,
                              const SampledSequence& tokens, const char* finish) {
  JsonWriter json;
  json.begin_object().key("index").raw(std::to_string(choice));
  json.key("delta").raw(delta).key("logprobs");
  write_logprobs(json, options_.style, tokens);
  json.key("finish_reason");
  finish == nullptr ? json.null() : json.value(finish);
  if (options_.style.token_ids) json.key("token_ids").raw(integers_text(tokens.ids));
  json.key("leeway").raw(versions_json(tokens)).end_object();
  return chunk_head_ + json.text() + kChunkEnd;
}

std::string ChatWriter::opening() {
  std::string text;
  for (size_t i = 0; i < options_.samples; ++i) {
    text += chunk(i, R"({"role": "assistant", "content": ""})", {}, nullptr);
  }
  return text;
}

// What is new in the reply. Content waits for the end where it may still become a tool call.
std::string ChatWriter::delta_of(Sent& sent, const ChatReplyText& reply, bool at_end) const {
  JsonWriter json;
  json.begin_object();
  const auto add = [&](const char* key, const std::string& now, std::string& before) {
    const size_t size = at_end ? now.size() : safe_size(now, options_.stop_texts);
    if (size <= before.size() || !now.starts_with(before)) return;
    json.key(key).value(std::string_view(now).substr(before.size(), size - before.size()));
    before = now.substr(0, size);
  };
  add("reasoning_content", reply.reasoning, sent.reasoning);
  if (at_end || !options_.has_tools) add("content", reply.content, sent.content);
  if (at_end && !reply.calls.empty()) {
    json.key("tool_calls");
    write_calls(json, reply.calls, true);
  }
  return json.end_object().text();
}

std::string ChatWriter::piece(size_t choice, const SampledSequence& fresh) {
  Sent& sent = sent_[choice];
  sent.ids.insert(sent.ids.end(), fresh.ids.begin(), fresh.ids.end());
  append_tokens(sent.waiting, fresh);
  if ((sent.ids.size() - sent.read) * kReadings < sent.ids.size()) return "";
  sent.read = sent.ids.size();
  const std::string delta = delta_of(sent, read_reply(options_, sent.ids), false);
  const SampledSequence tokens = std::exchange(sent.waiting, {});
  return chunk(choice, delta, tokens, nullptr);
}

std::string ChatWriter::ending(size_t choice, const SampledSequence& all) {
  Sent& sent = sent_[choice];
  const ChatReplyText reply = read_reply(options_, all.ids);
  const SampledSequence rest = tokens_from(all, sent.ids.size() - sent.waiting.ids.size());
  return chunk(choice, delta_of(sent, reply, true), rest, chat_finish(all, reply));
}

std::string ChatWriter::closing(const std::vector<SampledSequence>& choices) {
  std::string text;
  if (options_.usage_in_stream) {
    JsonWriter json;
    json.begin_object();
    write_head(json, options_.head, "chat.completion.chunk");
    json.key("choices").begin_array().end_array();
    json.key("usage").raw(usage_json(usage_of({options_.prompt.size()}, choices)));
    text = event_text(json.end_object().text());
  }
  return text + "data: [DONE]\n\n";
}

}  // namespace leeway
