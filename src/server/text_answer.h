// What the writers of text answers share: the text of a choice, its log-probabilities as OpenAI's
// clients read them, and the fields around them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "data/sampling.h"
#include "generate/text_stream.h"
#include "server/prompt_scores.h"
#include "server/sampling_fields.h"
#include "server/token_tail.h"

namespace leeway {

// Which of the two log-probabilities of a token an answer has: before or after temperature and
// filters.
enum class LogprobsMode { raw, processed };

// How tokens are written, whatever the dialect.
struct TokenStyle {
  const Tokenizer* tokenizer = nullptr;  // null: the text of tokens is empty
  bool logprobs = false;
  bool token_ids = false;     // return_token_ids
  bool as_token_ids = false;  // "token_id:17" in place of a token's text
  LogprobsMode mode = LogprobsMode::raw;
  int64_t top = 0;  // most likely tokens at each place

  std::string text_of(int32_t id) const;
  const std::vector<float>& logprobs_of(const SampledSequence& sequence) const {
    return mode == LogprobsMode::raw ? sequence.raw_logprobs : sequence.processed_logprobs;
  }
};

// The flags of a request that say it. Without a tokenizer tokens are named by their ids. Throws
// ApiError 400.
TokenStyle read_token_style(const JsonFields& body, const Tokenizer* tokenizer);

// How many of the most likely tokens a key asks for, if it is there: 0 to kMostTopLogprobs. Throws
// ApiError 400, also where `mode` is not the raw one.
std::optional<int64_t> read_top(const JsonFields& fields, const char* key, LogprobsMode mode);

// The text of one choice while its tokens arrive. The pieces together are the text of the whole.
class ChoiceText {
 public:
  // The tokenizer must outlive it; without one (null) the text is empty.
  ChoiceText(const Tokenizer* tokenizer, std::vector<std::string> stop_texts,
             std::vector<int32_t> stop_ids);

  // The text that new tokens of a running sample complete.
  std::string take(const std::vector<int32_t>& fresh);
  // The rest, when it has ended; a stop id and a stop text are not part of the text.
  std::string end(const SampledSequence& all);
  size_t taken() const { return taken_; }  // tokens

 private:
  std::optional<TextStream> stream_;
  std::vector<int32_t> stop_ids_;
  size_t taken_ = 0;
};

// Counts of an answer.
struct Usage {
  size_t prompt = 0, completion = 0;
};
Usage usage_of(const std::vector<size_t>& prompt_sizes,
               const std::vector<SampledSequence>& choices);
std::string usage_json(const Usage& usage);

// {"versions": [..]}, what Leeway adds to a choice: the version of the weights for each token.
std::string versions_json(const SampledSequence& sequence);

// What begins every object of an answer: id, object, created, model.
struct AnswerHead {
  std::string id;
  std::string model;
  int64_t created = 0;  // seconds since 1970
};
AnswerHead new_head(const std::string& prefix, const std::string& model);
void write_head(JsonWriter& json, const AnswerHead& head, const char* object);
// An event of a stream up to its choices, of which kChunkEnd follows the only one.
std::string chunk_head(const AnswerHead& head, const char* object);
inline constexpr const char* kChunkEnd = "]}\n\n";

// `count` random hexadecimal digits, for ids.
std::string random_hex(size_t count);

// [null, {"17": {"logprob", "decoded_token"}, ..}, ..], as vLLM has prompt_logprobs: the prompt's
// own token first, then the `top` most likely ones with their rank.
std::string prompt_logprobs_json(const TokenStyle& style, const std::vector<int32_t>& ids,
                                 const PromptScore& score, int64_t top);

}  // namespace leeway
