#include "orchestrator/expression.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <optional>

#include "leeway/error.h"

namespace leeway {
namespace {

constexpr size_t kLongest = 2000;  // bytes; more than kMostTerms numbers of 2^53 take
constexpr int kDeepest = 100;      // parentheses and signs within one another
constexpr int64_t kMostTerms = 100;
constexpr double kLargestValue = 0x1p53;

struct Value {
  std::optional<int64_t> whole;  // else `real` holds it
  double real = 0.0;

  double as_real() const { return whole ? static_cast<double>(*whole) : real; }
};

Value of_whole(int64_t number) { return {.whole = number}; }
Value of_real(double number) { return {.real = number}; }

struct Problem {
  std::string text;
};

Value apply(char op, const Value& a, const Value& b) {
  if (op == '/' && b.as_real() == 0.0) throw Problem{"division by zero"};
  if (a.whole && b.whole) {
    int64_t result = 0;
    if (op == '+' && !__builtin_add_overflow(*a.whole, *b.whole, &result)) return of_whole(result);
    if (op == '-' && !__builtin_sub_overflow(*a.whole, *b.whole, &result)) return of_whole(result);
    if (op == '*' && !__builtin_mul_overflow(*a.whole, *b.whole, &result)) return of_whole(result);
    // The only quotient that does not fit has the divisor -1.
    const bool fits = *b.whole != -1 || *a.whole != INT64_MIN;
    if (op == '/' && fits && *a.whole % *b.whole == 0) return of_whole(*a.whole / *b.whole);
  }
  const double x = a.as_real(), y = b.as_real();
  const double result = op == '+' ? x + y : op == '-' ? x - y : op == '*' ? x * y : x / y;
  if (!std::isfinite(result)) throw Problem{"the value is too large"};
  return of_real(result);
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Value run() {
    const Value value = sum(0);
    if (peek() != '\0' || at_ < text_.size()) unexpected();
    return value;
  }

 private:
  // The next character that is not a space; NUL at the end.
  char peek() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t')) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  [[noreturn]] void unexpected() {
    if (at_ >= text_.size()) throw Problem{"the expression ends too early"};
    const char c = text_[at_];
    const bool printable = c > ' ' && c <= '~';
    throw Problem{fmt::format("unexpected {} at position {}",
                              printable ? fmt::format("'{}'", c) : "character", at_ + 1)};
  }

  Value sum(int depth) {
    Value value = product(depth);
    for (char op = peek(); op == '+' || op == '-'; op = peek()) {
      ++at_;
      value = apply(op, value, product(depth));
    }
    return value;
  }

  Value product(int depth) {
    Value value = factor(depth);
    for (char op = peek(); op == '*' || op == '/'; op = peek()) {
      ++at_;
      value = apply(op, value, factor(depth));
    }
    return value;
  }

  Value factor(int depth) {
    if (depth > kDeepest) throw Problem{"parentheses or signs are nested too deeply"};
    const char c = peek();
    if (c == '+' || c == '-') {
      ++at_;
      const Value value = factor(depth + 1);
      return c == '+' ? value : apply('-', of_whole(0), value);
    }
    if (c == '(') {
      ++at_;
      const Value value = sum(depth + 1);
      if (peek() != ')') unexpected();
      ++at_;
      return value;
    }
    return number();
  }

  Value number() {
    const size_t end = std::min(text_.find_first_not_of("0123456789.", at_), text_.size());
    const char *first = text_.data() + at_, *last = text_.data() + end;
    const auto dots = std::count(first, last, '.');
    if (end - at_ == static_cast<size_t>(dots)) unexpected();
    if (dots > 1) throw Problem{fmt::format("a number with two points at position {}", at_ + 1)};
    at_ = end;
    int64_t whole = 0;
    if (dots == 0 && std::from_chars(first, last, whole).ec == std::errc()) return of_whole(whole);
    double real = 0.0;
    if (std::from_chars(first, last, real, std::chars_format::fixed).ec != std::errc()) {
      throw Problem{"a number has too many digits"};
    }
    return of_real(real);
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

Evaluation evaluate_expression(std::string_view text) {
  if (text.size() > kLongest) {
    return {false, fmt::format("the expression is longer than {} characters", kLongest)};
  }
  try {
    const Value value = Parser(text).run();
    // Adding 0 turns a negative zero into a plain zero.
    return {true,
            value.whole ? fmt::format("{}", *value.whole) : fmt::format("{}", value.real + 0.0)};
  } catch (const Problem& problem) {
    return {false, problem.text};
  }
}

std::string random_expression(Rng& rng, const EnvironmentTable& table) {
  std::string text;
  for (int64_t i = 0; i < table.terms; ++i) {
    if (i > 0) text += table.operators[rng.below(table.operators.size())];
    text += fmt::format("{}", rng.below(static_cast<uint64_t>(table.max_operand) + 1));
  }
  return text;
}

void check_expression_keys(const EnvironmentTable& table) {
  const std::string& operators = table.operators;
  for (size_t i = 0; i < operators.size(); ++i) {
    if (std::string_view("+-*").find(operators[i]) == std::string_view::npos ||
        operators.find(operators[i]) != i) {
      throw Error(
          fmt::format("operators = \"{}\": must consist of + - *, each at most once", operators));
    }
  }
  if (operators.empty()) throw Error("operators is empty: give some of + - *");
  if (table.terms < 1 || table.terms > kMostTerms) {
    throw Error(fmt::format("terms = {}: it must be from 1 to {}", table.terms, kMostTerms));
  }
  if (table.max_operand < 0) {
    throw Error(fmt::format("max_operand = {}: it must not be negative", table.max_operand));
  }
  // A sum of products of 2 or more is at most the product of all.
  const auto operand = static_cast<double>(table.max_operand);
  const auto terms = static_cast<double>(table.terms);
  const bool multiplies = operators.find('*') != std::string::npos;
  const double largest = std::max(terms * operand, multiplies ? std::pow(operand, terms) : 0.0);
  if (largest > kLargestValue) {
    throw Error(fmt::format("{} make values beyond 2^53: lower max_operand or terms",
                            expression_keys(table)));
  }
}

std::string expression_keys(const EnvironmentTable& table) {
  return fmt::format("max_operand = {}, terms = {} and operators = \"{}\"", table.max_operand,
                     table.terms, table.operators);
}

}  // namespace leeway
