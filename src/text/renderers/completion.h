// Sampled ids, decoded for parsing: what is a control token is known by its id, never by its
// spelling.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/renderer.h"
#include "text/renderers/json_value.h"
#include "text/renderers/script.h"

namespace leeway {

class Completion {
 public:
  // Reads up to the first of `stops`. Ids outside the vocabulary read as U+FFFD.
  Completion(std::span<const int32_t> ids, const Tokenizer& tokenizer,
             const std::vector<Control>& controls, std::span<const int32_t> stops);

  static constexpr size_t kNone = std::string::npos;

  const std::string& text() const { return text_; }
  std::string_view text(size_t begin, size_t end) const {
    return std::string_view(text_).substr(begin, end - begin);
  }
  size_t size() const { return text_.size(); }
  bool closed() const { return closed_; }

  // The byte in [from, to) where the control token next starts, or kNone.
  size_t find(std::string_view control, size_t from = 0, size_t to = kNone) const;
  // The tokens that hold the bytes [begin, end), half open.
  std::pair<size_t, size_t> tokens(size_t begin, size_t end) const;

 private:
  struct Mark {
    size_t at;
    std::string_view text;
  };
  std::string text_;
  std::vector<size_t> token_ends_;  // in bytes
  std::vector<Mark> marks_;         // in order
  bool closed_ = false;
};

// The thinking at the start of a completion, and where what follows it starts.
struct Thinking {
  std::optional<std::string_view> reasoning;  // untrimmed
  std::string_view before;                    // what the model wrote before <think>
  size_t end = 0;
  bool open = false;  // it never ended
};
// `prompt_opens`: the generation prompt ends inside <think>.
Thinking find_thinking(const Completion& completion, bool prompt_opens);

// A stretch between two control tokens.
struct Block {
  size_t begin, inner_begin, inner_end, end;
  bool closed;
};
// All blocks in [from, to); one that another opening or the end of the text cuts off is not closed.
std::vector<Block> find_blocks(const Completion& completion, std::string_view open,
                               std::string_view close, size_t from, size_t to = Completion::kNone);

// The text of [from, end of text) that lies in no block; white space between blocks is dropped.
std::string text_outside(const Completion& completion, const std::vector<Block>& blocks,
                         size_t from);

// A call with its raw text and tokens filled in, to be read further.
ParsedToolCall call_of(const Completion& completion, const Block& block);

// Checks `arguments` as JSON and sets the status.
void set_json_arguments(ParsedToolCall& parsed, std::string_view arguments);

// Reads {"name": .., "KEY": {..}} as the model wrote it.
void read_json_call(ParsedToolCall& parsed, std::string_view json, std::string_view arguments_key);

// The value of one XML-style argument: by the tool's schema where it is known, otherwise a JSON
// value where the text is one, otherwise a string.
JsonValue read_typed(std::string_view text, std::string_view function, std::string_view argument,
                     const std::vector<JsonValue>& tools);

}  // namespace leeway
