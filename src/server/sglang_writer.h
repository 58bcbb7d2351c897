// Answers of SGLang's /generate.
#pragma once

#include <string>
#include <vector>

#include "server/calls.h"
#include "server/text_answer.h"

namespace leeway {

struct SglangOptions {
  std::string id;
  const Tokenizer* tokenizer = nullptr;  // null: ids alone, and the text is empty
  std::vector<std::vector<int32_t>> prompts;
  size_t samples = 1;  // of each prompt
  std::vector<std::string> stop_texts;
  std::vector<int32_t> stop_ids;
  bool is_list = false;  // the request has a list of prompts, so the answer is one
  bool logprobs = false;
  int64_t top = 0;  // most likely tokens at each place, with logprobs
  LogprobsMode mode = LogprobsMode::raw;
  int64_t scored_from = -1;  // of the prompts' tokens; -1: none
  std::vector<PromptScore> scores;
};

class SglangWriter final : public AnswerWriter {
 public:
  explicit SglangWriter(SglangOptions options);

  std::string whole(const std::vector<SampledSequence>& choices) override;
  std::string piece(size_t choice, const SampledSequence& fresh) override;
  std::string ending(size_t choice, const SampledSequence& all) override;
  std::string closing(const std::vector<SampledSequence>& choices) override;

 private:
  // A choice while it streams: SGLang sends all that there is each time.
  struct Streamed {
    SampledSequence all;
    std::string text;
  };

  std::string object(size_t choice, const SampledSequence& sequence, const std::string& text,
                     bool ended) const;
  std::string finish_json(const SampledSequence& sequence) const;

  const SglangOptions options_;
  std::vector<ChoiceText> texts_;   // [choices]; empty without a tokenizer
  std::vector<Streamed> streamed_;  // [choices]
};

}  // namespace leeway
