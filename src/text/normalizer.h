// Splits text at added tokens and normalizes the rest.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace leeway {

// NFC of valid UTF-8, in linear time apart from sorting runs of marks.
std::string to_nfc(std::string_view text);

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool single_word = false;  // not beside a letter or digit
  bool lstrip = false;       // includes the white space before it
  bool rstrip = false;       // includes the white space after it
  bool normalized = false;   // matched in the normalized text
  bool special = false;
};

class AddedTokens {
 public:
  // One section of the text: an added token (id >= 0) or ordinary, normalized text (id -1).
  using Section = std::function<void(std::string_view text, int32_t id)>;

  AddedTokens(std::vector<AddedToken> tokens, bool nfc);

  // Splits valid UTF-8 at the added tokens: the leftmost match, and among those the longest. A
  // special token that is not to be recognized stays part of the surrounding text.
  void split(std::string_view text, bool recognise_special, const Section& section) const;

  const std::vector<AddedToken>& tokens() const { return tokens_; }

 private:
  // All spellings of one stage, as a trie over bytes.
  class Trie {
   public:
    void add(std::string_view spelling, int32_t token);
    bool may_start(char c) const { return starts_[static_cast<uint8_t>(c)]; }
    // The longest spelling the text starts with: its token, or -1, and its length.
    std::pair<int32_t, size_t> longest(std::string_view text) const;

   private:
    struct Node {
      int32_t token = -1;
      std::vector<std::pair<char, uint32_t>> children;
    };
    uint32_t child_of(uint32_t node, char c) const;  // 0: none
    std::vector<Node> nodes_ = std::vector<Node>(1);
    std::array<bool, 256> starts_{};
  };

  void split_by(const Trie& trie, std::string_view text, bool recognise_special,
                const Section& section) const;

  std::vector<AddedToken> tokens_;
  Trie raw_, normalized_;
  bool nfc_;
};

}  // namespace leeway
