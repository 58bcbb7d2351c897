#include "text/renderers/script.h"

namespace leeway {

void Script::add(std::string_view text, int32_t id) {
  if (text.empty()) return;
  pieces_.push_back({std::string(text), id, message_, sampled_});
}

void Script::words(std::string_view text) { add(text, -1); }

void Script::literal(std::string_view text) {
  while (!text.empty()) {
    const Control* next = nullptr;
    size_t at = text.size();
    for (const Control& control : controls_) {
      const size_t found = control.id < 0 ? std::string_view::npos : text.find(control.text);
      if (found < at) at = found, next = &control;
    }
    words(text.substr(0, at));
    text.remove_prefix(at);
    if (!next) return;
    add(next->text, next->id);
    text.remove_prefix(next->text.size());
  }
}

std::string Script::text() const {
  std::string text;
  for (const Piece& piece : pieces_) text += piece.text;
  return text;
}

void Script::push(Rendered& out, int32_t id, int32_t message, bool sampled) const {
  out.ids.push_back(id);
  out.message_index.push_back(message);
  out.sampled.push_back(sampled);
  // The model produces only assistant messages, so everything sampled is trained.
  out.loss_mask.push_back(sampled);
}

void Script::encode(const Tokenizer& tokenizer, Rendered& out) const {
  for (size_t i = 0; i < pieces_.size();) {
    if (pieces_[i].id >= 0) {
      push(out, pieces_[i].id, pieces_[i].message, pieces_[i].sampled);
      ++i;
      continue;
    }
    const size_t first = i;
    while (i < pieces_.size() && pieces_[i].id < 0) ++i;
    encode_segment(tokenizer, first, i, out);
  }
  out.text += text();
}

void Script::encode_segment(const Tokenizer& tokenizer, size_t first, size_t last,
                            Rendered& out) const {
  std::string segment;
  for (size_t i = first; i < last; ++i) segment += pieces_[i].text;
  const std::vector<int32_t> ids = tokenizer.encode(segment, SpecialTokens::as_text);
  const bool rewritten = tokenizer.decode(ids) != segment;

  // Piece ends are counted in bytes of the decoded tokens, since a tokenizer that normalizes its
  // input (NFC) changes lengths.
  std::vector<size_t> ends;
  size_t end = 0;
  for (size_t i = first; i < last; ++i) {
    end += rewritten
               ? tokenizer.decode(tokenizer.encode(pieces_[i].text, SpecialTokens::as_text)).size()
               : pieces_[i].text.size();
    ends.push_back(end);
  }

  size_t piece = 0, position = 0;
  for (const int32_t id : ids) {
    const size_t token_end = position + tokenizer.decode({&id, 1}).size();
    while (piece + 1 < ends.size() && ends[piece] <= position) ++piece;
    bool sampled = pieces_[first + piece].sampled;
    for (size_t next = piece; next + 1 < ends.size() && ends[next] < token_end; ++next) {
      sampled = sampled && pieces_[first + next + 1].sampled;
    }
    push(out, id, pieces_[first + piece].message, sampled);
    position = token_end;
  }
}

}  // namespace leeway
