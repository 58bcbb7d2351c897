// From text to sections: added tokens are cut out, the rest is brought to the model's normal form.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace leeway {

// Unicode normal form C of valid UTF-8, in time linear but for sorting runs of marks.
std::string to_nfc(std::string_view text);

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool single_word = false;  // not beside a letter or digit
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // takes the white space after it along
  bool normalized = false;   // looked for in the normalised text
  bool special = false;
};

class AddedTokens {
 public:
  // One stretch of the text: an added token (id >= 0) or ordinary, normalised text (id -1).
  using Section = std::function<void(std::string_view text, int32_t id)>;

  AddedTokens(std::vector<AddedToken> tokens, bool nfc);

  // Cuts valid UTF-8 at the added tokens: of all matches the leftmost, of these the longest. A
  // special token that is not to be recognised stays part of the text around it.
  void split(std::string_view text, bool recognise_special, const Section& section) const;

  const std::vector<AddedToken>& tokens() const { return tokens_; }

 private:
  // All spellings of one stage, by their bytes.
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
