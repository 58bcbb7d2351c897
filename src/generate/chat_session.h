// A conversation with a model, kept as tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "generate/generation.h"

namespace leeway {

struct ChatReply {
  Generated generated;
  bool context_full = false;  // it ended because no position is left
};

// What the model has said goes into the next prompt token for token where the renderer's bridge
// allows it; otherwise the conversation is rendered again from its messages. Used by one thread.
class ChatSession {
 public:
  // `text` must have a renderer; it and the engine must outlive the session. `positions`:
  // most_positions(). The limit of new tokens gives way to what fits. Reply number n, the first is
  // 0, uses `seed` + n.
  ChatSession(Engine& engine, const ModelText& text, int64_t positions, GenerationSettings settings,
              uint64_t seed);

  // The reply to a user's message. A reply that `events.stop` ended stays in the conversation with
  // the tokens it has; one without any token is forgotten together with its message. Throws Error
  // if the conversation leaves no room for a reply, or if the engine fails; the message is
  // forgotten then too.
  ChatReply send(const std::string& message, const GenerationEvents& events);
  // Another reply to the last message, in place of the one it has. Throws Error if there is none.
  ChatReply regenerate(const GenerationEvents& events);

  // Begins a new conversation; the system message stays, or becomes this one (empty: none).
  void reset();
  void set_system(const std::string& message);

  // Asks the chat format for replies without thinking, from the next message on.
  void disable_thinking() { options_.enable_thinking = false; }

  const std::vector<Message>& messages() const { return messages_; }

 private:
  std::vector<int32_t> next_prompt(const Message& message) const;
  ChatReply sample(const std::vector<int32_t>& prompt, const GenerationEvents& events);
  Message message_of(const std::vector<int32_t>& completion) const;

  Engine& engine_;
  const ModelText& text_;
  const int64_t positions_;
  GenerationSettings settings_;
  RenderOptions options_;
  uint64_t next_seed_;
  std::string system_;
  std::vector<Message> messages_;  // system, user, assistant, user, assistant, ..
  // Of the last reply; empty before the first.
  std::vector<int32_t> prompt_, completion_;
};

}  // namespace leeway
