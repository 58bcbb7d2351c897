// The text of a completion while its tokens arrive.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace leeway {

// A piece of a reply that can be shown.
struct TextPiece {
  std::string text;       // whole characters
  bool thinking = false;  // between <think> and </think>, the two included
};

// Turns tokens into text, piece by piece. The pieces together are the same text whenever they are
// taken: always valid UTF-8, and without a stop text and what follows it. Text that may become a
// stop text is held back until that is known.
class TextStream {
 public:
  // `stop_texts`: none of them empty. `thinking`: the prompt ends inside thinking. The tokenizer
  // must outlive the stream.
  TextStream(const Tokenizer& tokenizer, std::vector<std::string> stop_texts, bool thinking);

  // Ids that the tokenizer does not have become U+FFFD. After a stop text nothing is taken.
  TextPiece push(int32_t id);
  // What was held back, at the end of the completion.
  TextPiece finish();

  bool stopped() const { return stopped_; }          // at a stop text
  const std::string& text() const { return text_; }  // all pieces so far

 private:
  TextPiece take(bool at_end, bool thinking);

  const Tokenizer& tokenizer_;
  IncrementalDecoder decoder_;
  std::vector<std::string> stop_texts_;
  std::optional<int32_t> think_open_, think_close_;
  bool thinking_, stopped_ = false;
  std::string held_, text_;
};

// Whether a prompt ends inside thinking: its last token but white space is <think>.
bool ends_in_thinking(const Tokenizer& tokenizer, const std::vector<int32_t>& prompt);

}  // namespace leeway
