// Regular-expression search whose work is bounded for a whole text, not only for each match.
//
// PCRE2 counts steps anew at every position where a match might start, so its own limit lets a
// hostile pattern take time proportional to the limit times the length of the text.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

struct pcre2_real_code_8;

namespace leeway {

// One search of one text, on one thread.
class BoundedMatch {
 public:
  // Besides a fixed number of steps at each position, which suffices for the patterns of real
  // models, all matches in the text together may take `steps` more, and `heap_kib` of memory each.
  BoundedMatch(size_t steps, unsigned heap_kib);
  ~BoundedMatch();
  BoundedMatch(const BoundedMatch&) = delete;
  BoundedMatch& operator=(const BoundedMatch&) = delete;

  // Looks for a match at or after `from`, which is the start of a character. Returns what
  // pcre2_match does: not negative for a match, whose bounds are `begin()` and `end()`; otherwise
  // PCRE2_ERROR_NOMATCH, PCRE2_ERROR_MATCHLIMIT if the steps are used up, or another error.
  int find(const pcre2_real_code_8* code, std::string_view text, size_t from, unsigned options);
  size_t begin() const;
  size_t end() const;

 private:
  int match(const pcre2_real_code_8* code, std::string_view text, size_t from, unsigned options,
            size_t limit);

  struct Parts;
  std::unique_ptr<Parts> parts_;
  size_t steps_;  // remaining
};

}  // namespace leeway
