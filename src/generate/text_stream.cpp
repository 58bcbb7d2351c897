#include "generate/text_stream.h"

#include <algorithm>
#include <span>
#include <utility>

#include "leeway/error.h"

namespace leeway {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// The longest end of `text` with which `stop` begins.
size_t begun_stop(std::string_view text, std::string_view stop) {
  for (size_t size = std::min(text.size(), stop.size() - 1); size > 0; --size) {
    if (text.ends_with(stop.substr(0, size))) return size;
  }
  return 0;
}

}  // namespace

TextStream::TextStream(const Tokenizer& tokenizer, std::vector<std::string> stop_texts,
                       bool thinking)
    : tokenizer_(tokenizer),
      decoder_(tokenizer),
      stop_texts_(std::move(stop_texts)),
      think_open_(tokenizer.token_id("<think>")),
      think_close_(tokenizer.token_id("</think>")),
      thinking_(thinking) {
  for (const std::string& stop : stop_texts_) {
    LEEWAY_CHECK(!stop.empty(), "an empty stop text would stop everywhere");
  }
}

TextPiece TextStream::push(int32_t id) {
  if (stopped_) return {};
  if (id == think_open_) thinking_ = true;
  const bool thinking = thinking_;
  if (id == think_close_) thinking_ = false;
  try {
    held_ += decoder_.push(id);
  } catch (const Error&) {
    // Models have more ids than their tokenizers: rows that pad the vocabulary.
    held_ += decoder_.finish() + std::string(kReplacement);
  }
  return take(false, thinking);
}

TextPiece TextStream::finish() {
  if (!stopped_) held_ += decoder_.finish();
  return take(true, thinking_);
}

TextPiece TextStream::take(bool at_end, bool thinking) {
  size_t ready = held_.size(), begun = 0;
  for (const std::string& stop : stop_texts_) {
    const size_t at = held_.find(stop);
    stopped_ = stopped_ || at != std::string::npos;
    ready = std::min(ready, at);
    begun = std::max(begun, begun_stop(held_, stop));
  }
  if (!stopped_ && !at_end) ready = held_.size() - begun;
  TextPiece piece{held_.substr(0, ready), thinking};
  held_.erase(0, stopped_ ? held_.size() : ready);
  text_ += piece.text;
  return piece;
}

bool ends_in_thinking(const Tokenizer& tokenizer, const std::vector<int32_t>& prompt) {
  const std::optional<int32_t> open = tokenizer.token_id("<think>");
  if (!open) return false;
  for (size_t i = prompt.size(); i > 0; --i) {
    if (prompt[i - 1] == *open) return true;
    const std::string text = tokenizer.decode(std::span(&prompt[i - 1], 1));
    if (text.find_first_not_of(" \t\r\n") != std::string::npos) return false;
  }
  return false;
}

}  // namespace leeway
