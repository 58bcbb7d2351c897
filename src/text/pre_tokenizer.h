// Splits text into the pieces within which tokens are merged.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace leeway {

enum class SplitBehavior { isolated, removed, merged_with_previous, merged_with_next, contiguous };

struct SplitRule {
  std::string pattern;  // as the file spells it, in Oniguruma's dialect
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;  // the pattern matches what lies between the pieces
};

// The pattern of GPT-2, which the first byte-level models use.
extern const char* const kGpt2Pattern;

// A pattern that matches exactly this text.
std::string escape_pattern(std::string_view text);

// Translates the pattern to PCRE2's dialect. `where` names the pattern in errors: constructs that
// the two dialects read differently are refused.
std::string to_pcre2(const std::string& where, std::string_view pattern);

class PreTokenizer {
 public:
  PreTokenizer();
  ~PreTokenizer();
  PreTokenizer(PreTokenizer&&) noexcept;

  // Steps apply in the order they are added, each to every piece from the step before.
  void add_split(const std::string& where, const SplitRule& rule);
  void add_prefix_space();

  // The pieces of valid UTF-8, none of them empty. They point into the text or into `storage`.
  std::vector<std::string_view> split(std::string_view text,
                                      std::deque<std::string>& storage) const;

 private:
  struct Step;
  std::vector<std::unique_ptr<Step>> steps_;
};

}  // namespace leeway
