// Translates between an environment's messages and the policy's tokens.
//
// With a renderer, messages are rendered in its family's chat format. Without one, the first
// message's content is the prompt, byte for byte, and a reply is plain text, which is enough for
// single-turn tasks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "orchestrator/environment.h"
#include "text/renderer.h"
#include "text/tokenizer.h"
#include "text/trajectory.h"

namespace leeway {

// Immutable and thread-safe. The tokenizer and renderer must outlive it.
class Conversation {
 public:
  // `renderer` may be null. `stop`: text whose last token ends a reply, in addition to the
  // renderer's stop tokens and `eos`. Throws Error if nothing would end a reply.
  Conversation(const Tokenizer& tokenizer, const Renderer* renderer, const std::string& stop,
               std::span<const int32_t> eos);

  bool has_renderer() const { return renderer_ != nullptr; }
  const Tokenizer& tokenizer() const { return tokenizer_; }
  const std::vector<int32_t>& stop_ids() const { return stop_ids_; }

  std::vector<int32_t> first_prompt(const Example& example) const;
  // The prompt after any messages. Without a renderer: one message, the user's. Throws Error for
  // messages that cannot be rendered.
  std::vector<int32_t> prompt_of(const std::vector<Message>& messages,
                                 const RenderOptions& options) const;
  // Without a renderer, the content is the text, without a special token that ended the reply.
  Reply read(std::span<const int32_t> completion, bool truncated, const Example& example) const;
  Reply read(std::span<const int32_t> completion, bool truncated,
             const RenderOptions& options) const;

  // The prompt after `messages` follow a turn. `history` contains everything so far, including the
  // reply and `messages`. Extends the sampled tokens where that is provably correct; otherwise
  // renders the history again (which starts a new training sample). Throws Error without a
  // renderer.
  std::vector<int32_t> next_prompt(std::span<const int32_t> prompt,
                                   std::span<const int32_t> completion,
                                   const std::vector<Message>& history,
                                   const std::vector<Message>& messages,
                                   const Example& example) const;
  std::vector<int32_t> next_prompt(std::span<const int32_t> prompt,
                                   std::span<const int32_t> completion,
                                   const std::vector<Message>& history,
                                   const std::vector<Message>& messages,
                                   const RenderOptions& options) const;

  // Prompt and demonstration as one training sample, with loss on what the policy would sample;
  // only ids and loss_mask are filled. Without a renderer, a demonstration that does not end with a
  // stop token gets the first of them. Throws Error for several messages without a renderer.
  Sample demonstration(const Example& example) const;

 private:
  bool ends_reply(int32_t id) const;

  const Tokenizer& tokenizer_;
  const Renderer* renderer_;
  std::vector<int32_t> stop_ids_;
};

// What a renderer reads of an example besides its messages.
RenderOptions options_of(const Example& example, bool generate);

// A reply as an assistant message.
Message message_of(const Reply& reply);

}  // namespace leeway
