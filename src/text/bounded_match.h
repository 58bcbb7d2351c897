// Searches by regular expression whose work is bounded for a whole text, not only for each match.
//
// PCRE2 counts steps anew at every place where a match might begin, so that its limit alone lets a
// hostile pattern take as many times as long as its text has characters.
#pragma once

#include <cstddef>
#include <memory>
#include <string_view>

struct pcre2_real_code_8;

namespace leeway {

// One search of one text, on one thread.
class BoundedMatch {
 public:
  // Beside a fixed number of steps at each place, which suffices for the patterns of real models,
  // all matches in the text may take `steps` together, and `heap_kib` of memory each.
  BoundedMatch(size_t steps, unsigned heap_kib);
  ~BoundedMatch();
  BoundedMatch(const BoundedMatch&) = delete;
  BoundedMatch& operator=(const BoundedMatch&) = delete;

  // Looks for a match at or after `from`, which is the start of a character. The result is that of
  // pcre2_match: a match whose ends are `begin()` and `end()` if it is not negative, else
  // PCRE2_ERROR_NOMATCH, PCRE2_ERROR_MATCHLIMIT where the steps are used up, or another problem.
  int find(const pcre2_real_code_8* code, std::string_view text, size_t from, unsigned options);
  size_t begin() const;
  size_t end() const;

 private:
  int match(const pcre2_real_code_8* code, std::string_view text, size_t from, unsigned options,
            size_t limit);

  struct Parts;
  std::unique_ptr<Parts> parts_;
  size_t steps_;  // left
};

}  // namespace leeway
