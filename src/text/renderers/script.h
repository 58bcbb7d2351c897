// A rendered conversation in pieces, before it becomes text or token ids.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "text/renderer.h"

namespace leeway {

// One control token of a family. If the tokenizer lacks it (tags like <tool_response> in older
// vocabularies), it is written as plain text.
struct Control {
  std::string text;
  bool required = false;  // make_renderer refuses a tokenizer without it
  int32_t id = -1;
};

// Pieces in text order. Template text may contain control tokens; message text never does, whatever
// it spells.
class Script {
 public:
  explicit Script(const std::vector<Control>& controls) : controls_(controls) {}

  // Everything written from here on belongs to this message; -1: to no message.
  void at(int message) { message_ = message; }
  // Whether everything written from here on is produced by the model.
  void sampled(bool sampled) { sampled_ = sampled; }

  // Template text: control tokens in it become control tokens.
  void literal(std::string_view text);
  // Message text.
  void words(std::string_view text);

  std::string text() const;
  // Encodes the pieces after what `out` already holds. Plain text between two control tokens is
  // encoded as one string, so that the boundary between authors never changes the tokens; a token
  // then counts as sampled only if all its bytes do, and belongs to the message of its first byte.
  void encode(const Tokenizer& tokenizer, Rendered& out) const;

 private:
  struct Piece {
    std::string text;
    int32_t id;  // of a control token, or -1
    int32_t message;
    bool sampled;
  };

  void add(std::string_view text, int32_t id);
  void encode_segment(const Tokenizer& tokenizer, size_t first, size_t last, Rendered& out) const;
  void push(Rendered& out, int32_t id, int32_t message, bool sampled) const;

  const std::vector<Control>& controls_;
  std::vector<Piece> pieces_;
  int message_ = -1;
  bool sampled_ = false;
};

}  // namespace leeway
