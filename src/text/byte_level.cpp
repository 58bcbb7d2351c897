#include "text/byte_level.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "leeway/error.h"
#include "text/tokenizer.h"

namespace leeway {
namespace {

constexpr size_t kAlphabetEnd = 0x144;  // one past the last code point of the alphabet

struct Alphabet {
  std::array<uint16_t, 256> code_points{};
  std::array<int16_t, kAlphabetEnd> bytes{};
};

constexpr bool spells_itself(unsigned byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

constexpr Alphabet make_alphabet() {
  Alphabet alphabet;
  alphabet.bytes.fill(-1);
  unsigned next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const unsigned code_point = spells_itself(byte) ? byte : next++;
    alphabet.code_points[byte] = static_cast<uint16_t>(code_point);
    alphabet.bytes[code_point] = static_cast<int16_t>(byte);
  }
  return alphabet;
}

constexpr Alphabet kAlphabet = make_alphabet();

// Ids 0 .. 255 are bytes; control tokens follow.
class ByteTokenizer final : public Tokenizer {
 public:
  explicit ByteTokenizer(std::vector<std::string> control) : control_(std::move(control)) {}

  std::vector<int32_t> encode(std::string_view text, SpecialTokens special) const override {
    std::vector<int32_t> ids;
    ids.reserve(text.size());
    while (!text.empty()) {
      const auto found = special == SpecialTokens::recognise ? longest_at(text) : control_.end();
      if (found == control_.end()) {
        ids.push_back(static_cast<uint8_t>(text[0]));
        text.remove_prefix(1);
      } else {
        ids.push_back(256 + static_cast<int32_t>(found - control_.begin()));
        text.remove_prefix(found->size());
      }
    }
    return ids;
  }

  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      if (id < 0 || id >= vocab_size())
        throw Error(fmt::format("byte tokenizer: no token has the id {}", id));
      if (id < 256) {
        text += static_cast<char>(static_cast<uint8_t>(id));
      } else {
        text += control_[static_cast<size_t>(id - 256)];
      }
    }
    return text;
  }

  std::optional<int32_t> token_id(std::string_view token) const override {
    if (token.size() == 1) return static_cast<uint8_t>(token[0]);
    const auto found = std::find(control_.begin(), control_.end(), token);
    if (found == control_.end()) return std::nullopt;
    return 256 + static_cast<int32_t>(found - control_.begin());
  }
  bool is_special(int32_t id) const override { return id >= 256; }
  int32_t vocab_size() const override { return 256 + static_cast<int32_t>(control_.size()); }

 private:
  std::vector<std::string>::const_iterator longest_at(std::string_view text) const {
    auto best = control_.end();
    for (auto token = control_.begin(); token != control_.end(); ++token) {
      if (!text.starts_with(*token)) continue;
      if (best == control_.end() || token->size() > best->size()) best = token;
    }
    return best;
  }

  std::vector<std::string> control_;
};

}  // namespace

uint32_t byte_level_code_point(uint8_t byte) { return kAlphabet.code_points[byte]; }

std::optional<std::string> byte_level_bytes(std::string_view spelling) {
  std::string bytes;
  for (size_t at = 0; at < spelling.size();) {
    const Utf8Unit unit = next_utf8(spelling.substr(at));
    if (unit.kind != Utf8Kind::valid || unit.code_point >= kAlphabetEnd) return std::nullopt;
    const int16_t byte = kAlphabet.bytes[unit.code_point];
    if (byte < 0) return std::nullopt;
    bytes += static_cast<char>(static_cast<uint8_t>(byte));
    at += unit.length;
  }
  return bytes;
}

std::unique_ptr<Tokenizer> make_byte_tokenizer(std::vector<std::string> control) {
  return std::make_unique<ByteTokenizer>(std::move(control));
}

}  // namespace leeway
