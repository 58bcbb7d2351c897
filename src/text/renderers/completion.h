// Sampled ids, decoded for parsing. Control tokens are recognized by id, never by spelling.
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
  // Reads up to the first of `stops`. Ids outside the vocabulary decode to U+FFFD.
  Completion(std::span<const int32_t> ids, const Tokenizer& tokenizer,
             const std::vector<Control>& controls, std::span<const int32_t> stops);

  static constexpr size_t kNone = std::string::npos;

  const std::string& text() const { return text_; }
  std::string_view text(size_t begin, size_t end) const {
    return std::string_view(text_).substr(begin, end - begin);
  }
  size_t size() const { return text_.size(); }
  bool closed() const { return closed_; }

  // The byte in [from, to) where the control token next occurs, or kNone.
  size_t find(std::string_view control, size_t from = 0, size_t to = kNone) const;
  // The half-open range of tokens that cover the bytes [begin, end).
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

// The thinking at the start of a completion, and where the rest starts.
struct Thinking {
  std::optional<std::string_view> reasoning;  // untrimmed
  std::string_view before;                    // what the model wrote before <think>
  size_t end = 0;
  bool open = false;  // not closed
};
// `prompt_opens`: the generation prompt ends inside <think>.
Thinking find_thinking(const Completion& completion, bool prompt_opens);

// The text between two control tokens.
struct Block {
  size_t begin, inner_begin, inner_end, end;
  bool closed;
};
// All blocks in [from, to); a block cut off by another opening token or by the end of the text is
// not closed.
std::vector<Block> find_blocks(const Completion& completion, std::string_view open,
                               std::string_view close, size_t from, size_t to = Completion::kNone);

// The text of [from, end of text) outside all blocks; white space between blocks is dropped.
std::string text_outside(const Completion& completion, const std::vector<Block>& blocks,
                         size_t from);

// A call with its raw text and token range filled in.
ParsedToolCall call_of(const Completion& completion, const Block& block);

// Checks `arguments` as JSON and sets the status.
void set_json_arguments(ParsedToolCall& parsed, std::string_view arguments);

// Parses {"name": .., "KEY": {..}} as the model wrote it.
void read_json_call(ParsedToolCall& parsed, std::string_view json, std::string_view arguments_key);

// The value of one XML-style argument: by the tool's schema if known, otherwise parsed as JSON if
// possible, otherwise a string.
JsonValue read_typed(std::string_view text, std::string_view function, std::string_view argument,
                     const std::vector<JsonValue>& tools);

}  // namespace leeway
