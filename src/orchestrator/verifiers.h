// Checks whether a reply contains the right answer. Pure functions of two texts; no model is
// involved.
//
// `found` says that there is something to compare: an answer of the expected kind. All functions
// are thread-safe, accept any bytes, and take time proportional to the text (patterns are bounded
// separately).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "orchestrator/environment.h"

namespace leeway {

struct Verdict {
  bool found = false;
  bool right = false;  // only if found
};

// The text without leading and trailing spaces, tabs and line ends.
std::string_view trimmed(std::string_view text);

// The part of a reply that is judged: without thinking and tool calls if a renderer separated them.
const std::string& judged_text(const Reply& reply);

// For answers that end their line ("beqx\n"): the reply must be exactly the answer, byte for byte;
// or, if a renderer's stop token closed it, the content must be the answer, ignoring surrounding
// white space.
bool exact_reply(const Reply& reply, std::string_view answer);

// The trimmed texts are equal. Found: anything at all.
Verdict verify_exact(std::string_view reply, std::string_view answer);

// The last number of the reply equals the last number of the answer: whole numbers of up to 18
// digits exactly, others within a relative 1e-9.
Verdict verify_numeric(std::string_view reply, std::string_view answer);

// The last number, as in "-1,234.50" or "6.02e23", without separators and plus sign. A number in
// the last closed \boxed{..} takes precedence. A minus after a letter, a digit or a closing bracket
// is an operator. Fractions are not parsed: "1/2" ends in the number 2.
std::optional<std::string> final_number(std::string_view text);

// The last choice of the reply is that of the answer.
Verdict verify_choice(std::string_view reply, std::string_view answer);

// The last letter A to J that is written as a choice: "(B)", "Answer: B", "the answer is **B**",
// "\boxed{B}"; or a text that is the letter alone, with a full stop or bracket after it: "B.",
// "b)".
std::optional<char> final_choice(std::string_view text);

// A PCRE2 pattern (UTF-8, Unicode properties) that is searched for in replies. Immutable.
class AnswerPattern {
 public:
  // Throws Error with the problem in the pattern and its position.
  explicit AnswerPattern(std::string_view pattern);
  // Found and right if it matches. A search that backtracks beyond a fixed number of steps is
  // abandoned: nothing was found.
  Verdict verify(std::string_view reply) const;

 private:
  struct Compiled;
  std::shared_ptr<const Compiled> compiled_;
};

}  // namespace leeway
