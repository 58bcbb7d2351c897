// Answers of /v1/completions.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "server/calls.h"
#include "server/text_answer.h"

namespace leeway {

struct CompletionOptions {
  AnswerHead head;
  TokenStyle style;
  std::vector<std::vector<int32_t>> prompts;
  size_t samples = 1;  // of each prompt
  std::vector<std::string> stop_texts;
  std::vector<int32_t> stop_ids;
  bool echo = false;
  bool usage_in_stream = false;
  std::optional<int64_t> prompt_top;  // prompt_logprobs: that many most likely tokens
  std::vector<PromptScore> scores;    // of each prompt, for echo with logprobs and prompt_logprobs
};

class CompletionWriter final : public AnswerWriter {
 public:
  explicit CompletionWriter(CompletionOptions options);

  std::string whole(const std::vector<SampledSequence>& choices) override;
  std::string piece(size_t choice, const SampledSequence& fresh) override;
  std::string ending(size_t choice, const SampledSequence& all) override;
  std::string closing(const std::vector<SampledSequence>& choices) override;

 private:
  void write_choice(JsonWriter& json, size_t choice, const std::string& text,
                    const SampledSequence& tokens, const char* finish, bool with_prompt);
  void write_logprobs(JsonWriter& json, size_t choice, const SampledSequence& tokens,
                      bool with_prompt);
  std::string chunk(size_t choice, const std::string& text, const SampledSequence& tokens,
                    const char* finish);

  const CompletionOptions options_;
  const std::string chunk_head_;   // what all chunks of a stream begin with
  std::vector<ChoiceText> texts_;  // [choices]
  std::vector<size_t> offsets_;    // [choices] characters written so far
  std::vector<bool> opened_;       // [choices] its prompt has been sent
};

}  // namespace leeway
