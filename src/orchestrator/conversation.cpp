#include "orchestrator/conversation.h"

#include <fmt/format.h>

#include <algorithm>

#include "leeway/error.h"

namespace leeway {

RenderOptions options_of(const Example& example, bool generate) {
  RenderOptions options;
  options.tools_json = example.tools_json;
  options.add_generation_prompt = generate;
  return options;
}

Message message_of(const Reply& reply) {
  Message message;
  message.role = Role::assistant;
  message.content = reply.response.content;
  message.reasoning = reply.response.reasoning;
  for (const ParsedToolCall& call : reply.response.tool_calls) {
    if (call.status == ToolCallStatus::ok) message.tool_calls.push_back(call.call);
  }
  return message;
}

Conversation::Conversation(const Tokenizer& tokenizer, const Renderer* renderer,
                           const std::string& stop, std::span<const int32_t> eos)
    : tokenizer_(tokenizer), renderer_(renderer), stop_ids_(eos.begin(), eos.end()) {
  const auto add = [&](int32_t id) {
    if (!ends_reply(id)) stop_ids_.push_back(id);
  };
  if (renderer_ != nullptr) {
    for (int32_t id : renderer_->stop_token_ids()) add(id);
  }
  if (!stop.empty()) add(tokenizer_.encode(stop, SpecialTokens::recognise).back());
  if (stop_ids_.empty()) {
    throw Error(
        "nothing ends a reply: set rollout.stop (\"\\n\"), a renderer, or a model whose "
        "config.json has an eos_token_id");
  }
}

bool Conversation::ends_reply(int32_t id) const {
  return std::find(stop_ids_.begin(), stop_ids_.end(), id) != stop_ids_.end();
}

std::vector<int32_t> Conversation::first_prompt(const Example& example) const {
  LEEWAY_CHECK(!example.messages.empty(), "an example must start with a message");
  if (renderer_ != nullptr) {
    return renderer_->render(example.messages, options_of(example, true)).ids;
  }
  return tokenizer_.encode(example.messages.front().content, SpecialTokens::as_text);
}

std::vector<int32_t> Conversation::prompt_of(const std::vector<Message>& messages,
                                             const RenderOptions& options) const {
  if (renderer_ != nullptr) return renderer_->render(messages, options).ids;
  if (messages.size() != 1 || messages.front().role != Role::user || !options.tools_json.empty()) {
    throw Error(
        "messages other than one of the user, and tools, require orchestrator.renderer.name");
  }
  return tokenizer_.encode(messages.front().content, SpecialTokens::as_text);
}

Reply Conversation::read(std::span<const int32_t> completion, bool truncated,
                         const Example& example) const {
  return read(completion, truncated, options_of(example, true));
}

Reply Conversation::read(std::span<const int32_t> completion, bool truncated,
                         const RenderOptions& options) const {
  Reply reply;
  reply.text = tokenizer_.decode(completion);
  reply.truncated = truncated;
  if (renderer_ != nullptr) {
    reply.response = renderer_->parse_response(completion, options);
  } else {
    const bool close = !completion.empty() && ends_reply(completion.back()) &&
                       tokenizer_.is_special(completion.back());
    reply.response.content =
        close ? tokenizer_.decode(completion.first(completion.size() - 1)) : reply.text;
  }
  return reply;
}

std::vector<int32_t> Conversation::next_prompt(std::span<const int32_t> prompt,
                                               std::span<const int32_t> completion,
                                               const std::vector<Message>& history,
                                               const std::vector<Message>& messages,
                                               const Example& example) const {
  return next_prompt(prompt, completion, history, messages, options_of(example, true));
}

std::vector<int32_t> Conversation::next_prompt(std::span<const int32_t> prompt,
                                               std::span<const int32_t> completion,
                                               const std::vector<Message>& history,
                                               const std::vector<Message>& messages,
                                               const RenderOptions& options) const {
  if (renderer_ == nullptr) {
    throw Error("the environment replied with messages, which requires orchestrator.renderer.name");
  }
  if (auto bridged = renderer_->bridge_to_next_turn(prompt, completion, messages, options)) {
    return std::move(bridged->ids);
  }
  return renderer_->render(history, options).ids;
}

Sample Conversation::demonstration(const Example& example) const {
  LEEWAY_CHECK(!example.demonstration.empty(), "the example must have a demonstration");
  Sample sample;
  if (renderer_ != nullptr) {
    std::vector<Message> messages = example.messages;
    messages.insert(messages.end(), example.demonstration.begin(), example.demonstration.end());
    Rendered rendered = renderer_->render(messages, options_of(example, false));
    sample.ids = std::move(rendered.ids);
    sample.loss_mask = std::move(rendered.loss_mask);
  } else {
    if (example.messages.size() > 1 || example.demonstration.size() > 1) {
      throw Error(
          fmt::format("demonstration {}: a conversation of {} messages needs a chat format; give "
                      "orchestrator.renderer.name",
                      example.index, example.messages.size() + example.demonstration.size()));
    }
    sample.ids = first_prompt(example);
    std::vector<int32_t> answer =
        tokenizer_.encode(example.demonstration.front().content, SpecialTokens::as_text);
    if (answer.empty() || !ends_reply(answer.back())) answer.push_back(stop_ids_.front());
    sample.loss_mask.assign(sample.ids.size(), 0);
    sample.ids.insert(sample.ids.end(), answer.begin(), answer.end());
    sample.loss_mask.resize(sample.ids.size(), 1);
  }
  return sample;
}

}  // namespace leeway
