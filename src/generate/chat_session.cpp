#include "generate/chat_session.h"

#include <fmt/format.h>

#include <utility>

#include "leeway/error.h"

namespace leeway {

ChatSession::ChatSession(Engine& engine, const ModelText& text, int64_t positions,
                         GenerationSettings settings, uint64_t seed)
    : engine_(engine),
      text_(text),
      positions_(positions),
      settings_(std::move(settings)),
      next_seed_(seed) {
  LEEWAY_CHECK(text_.renderer != nullptr, "a conversation needs a renderer");
  settings_.limit_is_given = false;
  options_.add_generation_prompt = true;
}

void ChatSession::reset() {
  messages_.clear();
  prompt_.clear();
  completion_.clear();
  if (!system_.empty()) messages_.push_back({.role = Role::system, .content = system_});
}

void ChatSession::set_system(const std::string& message) {
  system_ = message;
  reset();
}

std::vector<int32_t> ChatSession::next_prompt(const Message& message) const {
  if (!prompt_.empty()) {
    auto bridged = text_.renderer->bridge_to_next_turn(prompt_, completion_, {message}, options_);
    if (bridged) return std::move(bridged->ids);
  }
  std::vector<Message> messages = messages_;
  messages.push_back(message);
  return text_.renderer->render(messages, options_).ids;
}

ChatReply ChatSession::sample(const std::vector<int32_t>& prompt, const GenerationEvents& events) {
  check_model_ids(text_, prompt);
  const auto used = static_cast<int64_t>(prompt.size());
  if (used >= positions_) {
    throw Error(
        fmt::format("the context is full: the conversation has {} tokens, and there are {} "
                    "positions; /reset begins a new one",
                    used, positions_));
  }
  ChatReply reply;
  reply.generated = std::move(generate(engine_, *text_.tokenizer, positions_,
                                       {.ids = prompt, .seed = next_seed_++}, settings_, events)
                                  .front());
  const SampledSequence& sequence = reply.generated.sequence;
  reply.context_full = sequence.finish == Finish::length &&
                       used + static_cast<int64_t>(sequence.ids.size()) >= positions_;
  return reply;
}

Message ChatSession::message_of(const std::vector<int32_t>& completion) const {
  const ParsedResponse response = text_.renderer->parse_response(completion, options_);
  Message message{.role = Role::assistant, .content = response.content};
  message.reasoning = response.reasoning;
  for (const ParsedToolCall& call : response.tool_calls) {
    if (call.status == ToolCallStatus::ok) message.tool_calls.push_back(call.call);
  }
  return message;
}

ChatReply ChatSession::send(const std::string& message, const GenerationEvents& events) {
  const Message said{.role = Role::user, .content = message};
  std::vector<int32_t> prompt = next_prompt(said);
  ChatReply reply = sample(prompt, events);
  if (reply.generated.sequence.ids.empty()) return reply;
  prompt_ = std::move(prompt);
  completion_ = reply.generated.sequence.ids;
  messages_.push_back(said);
  messages_.push_back(message_of(completion_));
  return reply;
}

ChatReply ChatSession::regenerate(const GenerationEvents& events) {
  if (prompt_.empty()) throw Error("there is no reply yet that could be made again");
  ChatReply reply = sample(prompt_, events);
  if (reply.generated.sequence.ids.empty()) return reply;
  completion_ = reply.generated.sequence.ids;
  messages_.back() = message_of(completion_);
  return reply;
}

}  // namespace leeway
