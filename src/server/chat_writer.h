// Answers of /v1/chat/completions: content, thinking and tool calls, as the renderer reads them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "server/calls.h"
#include "server/text_answer.h"
#include "text/renderer.h"

namespace leeway {

struct ChatOptions {
  AnswerHead head;
  TokenStyle style;
  const Renderer* renderer = nullptr;  // must outlive the writer
  RenderOptions render;
  std::vector<int32_t> prompt;
  size_t samples = 1;
  std::vector<std::string> stop_texts;
  bool has_tools = false;
  bool usage_in_stream = false;
  std::optional<int64_t> prompt_top;  // prompt_logprobs: that many most likely tokens
  PromptScore score;                  // for prompt_logprobs
};

// A reply that can be shown.
struct ChatReplyText {
  std::string reasoning, content;
  std::vector<ToolCall> calls;
};

// What the tokens say, cut at a stop text; blocks that are no proper calls stay in the content.
ChatReplyText read_reply(const ChatOptions& options, const std::vector<int32_t>& ids);

class ChatWriter final : public AnswerWriter {
 public:
  explicit ChatWriter(ChatOptions options);

  std::string whole(const std::vector<SampledSequence>& choices) override;
  std::string opening() override;
  std::string piece(size_t choice, const SampledSequence& fresh) override;
  std::string ending(size_t choice, const SampledSequence& all) override;
  std::string closing(const std::vector<SampledSequence>& choices) override;

 private:
  // What of a choice has been sent.
  struct Sent {
    std::vector<int32_t> ids;  // read so far
    SampledSequence waiting;   // tokens whose log-probabilities have not been sent
    size_t read = 0;           // tokens at the last reading
    std::string reasoning, content;
  };

  std::string chunk(size_t choice, const std::string& delta, const SampledSequence& tokens,
                    const char* finish);
  std::string delta_of(Sent& sent, const ChatReplyText& reply, bool at_end) const;

  const ChatOptions options_;
  const std::string chunk_head_;  // what all chunks of a stream begin with
  std::vector<Sent> sent_;        // [choices]
};

}  // namespace leeway
