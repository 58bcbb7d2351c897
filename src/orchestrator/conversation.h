// Between an environment's messages and the policy's tokens.
//
// With a renderer, messages are rendered as its family does it. Without one, the first message's
// content is the prompt, byte for byte, and a reply is text: enough for tasks of one turn.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "orchestrator/environment.h"
#include "text/renderer.h"
#include "text/tokenizer.h"
#include "text/trajectory.h"

namespace leeway {

// Immutable; may be used by several threads. The tokenizer and renderer must outlive it.
class Conversation {
 public:
  // `renderer` may be null. `stop`: text whose last token ends a reply, beside the renderer's stop
  // tokens and `eos`. Throws Error if then nothing ends a reply.
  Conversation(const Tokenizer& tokenizer, const Renderer* renderer, const std::string& stop,
               std::span<const int32_t> eos);

  bool has_renderer() const { return renderer_ != nullptr; }
  const Tokenizer& tokenizer() const { return tokenizer_; }
  const std::vector<int32_t>& stop_ids() const { return stop_ids_; }

  std::vector<int32_t> first_prompt(const Example& example) const;
  // Without a renderer, the content is the text, but for a special token that ended the reply.
  Reply read(std::span<const int32_t> completion, bool truncated, const Example& example) const;

  // The prompt after `messages` follow a turn. `history` holds everything said so far, the reply
  // and `messages` among it. Extends the sampled tokens where that is provable, and renders the
  // history again otherwise (a new training sample then begins). Throws Error without a renderer.
  std::vector<int32_t> next_prompt(std::span<const int32_t> prompt,
                                   std::span<const int32_t> completion,
                                   const std::vector<Message>& history,
                                   const std::vector<Message>& messages,
                                   const Example& example) const;

  // Prompt and demonstration as one training sample, with loss on what the policy would sample:
  // ids and loss_mask alone are filled. Without a renderer, a demonstration that no stop token ends
  // gets the first of them. Throws Error for several messages without a renderer.
  Sample demonstration(const Example& example) const;

 private:
  bool ends_reply(int32_t id) const;

  const Tokenizer& tokenizer_;
  const Renderer* renderer_;
  std::vector<int32_t> stop_ids_;
};

// The assistant's message that a reply amounts to.
Message message_of(const Reply& reply);

}  // namespace leeway
