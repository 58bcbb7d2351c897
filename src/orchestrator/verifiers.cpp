#include "orchestrator/verifiers.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <new>
#include <utility>
#include <vector>

#include "leeway/error.h"
#include "text/bounded_match.h"

namespace leeway {
namespace {

constexpr size_t kNone = std::string_view::npos;
constexpr double kTolerance = 1e-9;

bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

// The contents of the last closed \boxed{..}.
std::optional<std::string_view> last_box(std::string_view text) {
  constexpr std::string_view kBox = "\\boxed{";
  std::optional<std::string_view> last;
  std::vector<size_t> open;  // where the contents of the braces start; kNone: other braces
  for (size_t i = 0; i < text.size(); ++i) {
    if (text.substr(i).starts_with(kBox)) {
      i += kBox.size() - 1;
      open.push_back(i + 1);
    } else if (text[i] == '\\') {
      ++i;
    } else if (text[i] == '{') {
      open.push_back(kNone);
    } else if (text[i] == '}' && !open.empty()) {
      if (open.back() != kNone) last = text.substr(open.back(), i - open.back());
      open.pop_back();
    }
  }
  return last;
}

// Scans numbers; each function moves `at` past what it reads.
struct NumberScanner {
  std::string_view text;
  size_t at = 0;

  char look(size_t ahead = 0) const { return at + ahead < text.size() ? text[at + ahead] : '\0'; }

  std::string digits() {
    const size_t first = at;
    while (is_digit(look())) ++at;
    return std::string(text.substr(first, at - first));
  }

  // Digits, with commas where all groups after the first have three.
  std::string grouped_digits() {
    std::string number = digits();
    if (number.size() > 3) return number;
    while (look() == ',' && is_digit(look(1)) && is_digit(look(2)) && is_digit(look(3)) &&
           !is_digit(look(4))) {
      number += text.substr(at + 1, 3);
      at += 4;
    }
    return number;
  }

  bool starts_exponent() const {
    if (look() != 'e' && look() != 'E') return false;
    return is_digit(look(1)) || ((look(1) == '+' || look(1) == '-') && is_digit(look(2)));
  }

  // The number at `at`, where there is a digit or a point before a digit.
  std::string number() {
    const bool starts_with_point = look() == '.';
    std::string number = starts_with_point ? "0" : grouped_digits();
    if (look() == '.' && is_digit(look(1))) {
      ++at;
      number += '.';
      number += digits();
    }
    if (starts_exponent()) {
      number += 'e';
      ++at;
      if (look() == '-') number += '-';
      if (look() == '-' || look() == '+') ++at;
      number += digits();
    }
    return number;
  }
};

// Whether a minus sign, not an operator or a hyphen, precedes `at`.
bool is_negative(std::string_view text, size_t at) {
  if (at == 0 || text[at - 1] != '-') return false;
  if (at == 1) return true;
  const char before = text[at - 2];
  return !is_digit(before) && !is_letter(before) && before != ')' && before != ']' &&
         before != '}' && before != '-';
}

std::optional<std::string> last_number(std::string_view text) {
  std::optional<std::string> last;
  for (NumberScanner scanner{text}; scanner.at < text.size();) {
    const size_t start = scanner.at;
    const bool point = scanner.look() == '.' && is_digit(scanner.look(1)) &&
                       (start == 0 || !is_digit(text[start - 1]));
    if (!is_digit(scanner.look()) && !point) {
      ++scanner.at;
      continue;
    }
    last = fmt::format("{}{}", is_negative(text, start) ? "-" : "", scanner.number());
  }
  return last;
}

// The number if it is an integer that fits: 7, 7.00 and 0007 are the same.
std::optional<int64_t> whole_of(std::string_view number) {
  const size_t point = number.find('.');
  if (point != kNone) {
    if (number.find_first_not_of('0', point + 1) != kNone) return std::nullopt;
    number = number.substr(0, point);
  }
  int64_t whole = 0;
  const char* end = number.data() + number.size();
  const auto [stopped, problem] = std::from_chars(number.data(), end, whole);
  if (problem != std::errc() || stopped != end) return std::nullopt;
  return whole;
}

bool same_number(const std::string& a, const std::string& b) {
  const std::optional<int64_t> whole_a = whole_of(a), whole_b = whole_of(b);
  if (whole_a && whole_b) return *whole_a == *whole_b;
  double x = 0.0, y = 0.0;
  if (std::from_chars(a.data(), a.data() + a.size(), x).ec != std::errc() ||
      std::from_chars(b.data(), b.data() + b.size(), y).ec != std::errc()) {
    return a == b;  // beyond the range of a double
  }
  return std::abs(x - y) <= kTolerance * std::max(std::abs(x), std::abs(y));
}

bool is_choice(char c) { return c >= 'A' && c <= 'J'; }
char upper(char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c; }

// Whether `text` has `word` at `at`, ignoring case.
bool has_word(std::string_view text, size_t at, std::string_view upper_word) {
  if (text.size() < at + upper_word.size()) return false;
  return std::equal(upper_word.begin(), upper_word.end(), text.begin() + static_cast<long>(at),
                    [](char wanted, char c) { return wanted == upper(c); });
}

// Whether there is a choice letter at `at` that is a separate word.
bool has_lone_choice(std::string_view text, size_t at) {
  if (at >= text.size() || !is_choice(text[at])) return false;
  const char next = at + 1 < text.size() ? text[at + 1] : '\0';
  return !is_letter(next) && !is_digit(next) && next != '\'' && next != '_';
}

// After "answer": skips ": ", "is", "**", "(" and the like.
size_t skip_to_choice(std::string_view text, size_t at) {
  for (;;) {
    at = std::min(text.find_first_not_of(" \t\r\n:=*\"'`($", at), text.size());
    const char before = at > 0 ? text[at - 1] : ' ';
    const char after = at + 2 < text.size() ? text[at + 2] : ' ';
    if (is_letter(before) || !has_word(text, at, "IS") || is_letter(after)) return at;
    at += 2;
  }
}

// The letter of "{B}" and "{\text{B}}" without their outer braces.
std::optional<char> boxed_choice(std::string_view inner) {
  for (const std::string_view wrap : {"\\text{", "\\textbf{", "\\mathrm{"}) {
    if (inner.starts_with(wrap) && inner.ends_with('}')) {
      inner = inner.substr(wrap.size(), inner.size() - wrap.size() - 1);
    }
  }
  inner = trimmed(inner);
  if (inner.size() == 3 && inner.front() == '(' && inner.back() == ')') inner = inner.substr(1, 1);
  if (inner.size() == 1 && is_choice(inner[0])) return inner[0];
  return std::nullopt;
}

std::optional<char> written_choice(std::string_view text) {
  std::optional<char> last;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '(' && i + 2 < text.size() && is_choice(text[i + 1]) && text[i + 2] == ')') {
      last = text[i + 1];
    } else if (upper(text[i]) == 'A' && has_word(text, i, "ANSWER")) {
      const size_t at = skip_to_choice(text, i + 6);
      if (at > i + 6 && has_lone_choice(text, at)) last = text[at];
    }
  }
  return last;
}

}  // namespace

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kSpace = " \t\r\n\f\v";
  const size_t first = text.find_first_not_of(kSpace);
  if (first == kNone) return {};
  return text.substr(first, text.find_last_not_of(kSpace) - first + 1);
}

const std::string& judged_text(const Reply& reply) { return reply.response.content; }

bool exact_reply(const Reply& reply, std::string_view answer) {
  if (reply.text == answer) return true;
  return reply.response.closed && trimmed(judged_text(reply)) == trimmed(answer);
}

Verdict verify_exact(std::string_view reply, std::string_view answer) {
  const std::string_view text = trimmed(reply);
  return {!text.empty(), !text.empty() && text == trimmed(answer)};
}

std::optional<std::string> final_number(std::string_view text) {
  if (const auto box = last_box(text)) {
    if (auto number = last_number(*box)) return number;
  }
  return last_number(text);
}

Verdict verify_numeric(std::string_view reply, std::string_view answer) {
  const std::optional<std::string> given = final_number(reply);
  if (!given) return {};
  const std::optional<std::string> wanted = final_number(answer);
  return {true, wanted && same_number(*given, *wanted)};
}

std::optional<char> final_choice(std::string_view text) {
  if (const auto box = last_box(text)) {
    if (const auto letter = boxed_choice(*box)) return letter;
  }
  if (const auto letter = written_choice(text)) return letter;
  std::string_view alone = trimmed(text);
  if (alone.ends_with('.') || alone.ends_with(')')) alone.remove_suffix(1);
  if (alone.size() == 1 && is_choice(upper(alone[0]))) return upper(alone[0]);
  return std::nullopt;
}

Verdict verify_choice(std::string_view reply, std::string_view answer) {
  const std::optional<char> given = final_choice(reply);
  return {given.has_value(), given && given == final_choice(answer)};
}

// ---------------------------------------------------------------------------------------------

struct AnswerPattern::Compiled {
  explicit Compiled(pcre2_code* made) : code(made) {}
  ~Compiled() { pcre2_code_free(code); }
  Compiled(const Compiled&) = delete;
  Compiled& operator=(const Compiled&) = delete;

  pcre2_code* code;
};

AnswerPattern::AnswerPattern(std::string_view pattern) {
  // Replies may be cut off inside a character: such bytes match nothing.
  constexpr uint32_t kOptions =
      PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_MATCH_INVALID_UTF;
  int problem = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                   kOptions, &problem, &offset, nullptr);
  if (code == nullptr) {
    PCRE2_UCHAR text[256];
    pcre2_get_error_message(problem, text, sizeof text);
    throw Error(fmt::format("\"{}\" is not a valid regular expression: {} at offset {}", pattern,
                            reinterpret_cast<const char*>(text), offset));
  }
  compiled_ = std::make_shared<Compiled>(code);
}

Verdict AnswerPattern::verify(std::string_view reply) const {
  constexpr size_t kMostSteps = 1'000'000;
  constexpr unsigned kMostHeapKib = 64 * 1024;
  BoundedMatch matcher(kMostSteps, kMostHeapKib);
  const bool matched = matcher.find(compiled_->code, reply, 0, 0) >= 0;
  return {matched, matched};
}

}  // namespace leeway
