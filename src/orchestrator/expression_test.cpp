#include "orchestrator/expression.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace leeway {
namespace {

std::string result(std::string_view text) {
  const Evaluation value = evaluate_expression(text);
  return value.ok ? value.text : "error: " + value.text;
}

TEST(EvaluateExpression, CountsAsOnPaper) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"12+7*3", "33"},
      {"(12+7)*3", "57"},
      {" 2 *\t( 3 + 4 ) ", "14"},
      {"10-4-3", "3"},
      {"100/10/5", "2"},
      {"2-3*4+5", "-5"},
      {"7/2", "3.5"},
      {"1/3*3", "1"},
      {"-7", "-7"},
      {"--7", "7"},
      {"+-+7", "-7"},
      {"2*-3", "-6"},
      {"-(2+3)*2", "-10"},
      {"0.1+0.2", "0.30000000000000004"},
      {".5*4", "2"},
      {"1.5", "1.5"},
      {"3.", "3"},
      {"007", "7"},
      {"0*-1.5", "0"},
      {"9223372036854775807", "9223372036854775807"},
      {"-9223372036854775807-1", "-9223372036854775808"},
      {"(-9223372036854775807-1)/-1", "9.223372036854776e+18"},
      {"9223372036854775807+1", "9.223372036854776e+18"},
      {"9223372036854775807*9223372036854775807", "8.507059173023462e+37"},
      {"99999999999999999999", "1e+20"}};
  for (const auto& [text, value] : cases) EXPECT_EQ(result(text), value) << text;
}

TEST(EvaluateExpression, SaysWhatIsWrong) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"", "error: the expression ends too early"},
      {"  ", "error: the expression ends too early"},
      {"1+", "error: the expression ends too early"},
      {"(1", "error: the expression ends too early"},
      {"1)", "error: unexpected ')' at position 2"},
      {"1 2", "error: unexpected '2' at position 3"},
      {"x+1", "error: unexpected 'x' at position 1"},
      {"2**3", "error: unexpected '*' at position 3"},
      {"1e5", "error: unexpected 'e' at position 2"},
      {"()", "error: unexpected ')' at position 2"},
      {".", "error: unexpected '.' at position 1"},
      {"1.2.3", "error: a number with two points at position 1"},
      {"1/0", "error: division by zero"},
      {"1/(2-2)", "error: division by zero"},
      {"1/0.0", "error: division by zero"},
      {"2\xc3\x97"
       "3",
       "error: unexpected character at position 2"},
      {"1\n+1", "error: unexpected character at position 2"},
      {std::string("1\0+1", 4), "error: unexpected character at position 2"},
      {std::string(400, '9'), "error: a number has too many digits"},
      {std::string(300, '9') + "*" + std::string(300, '9'), "error: the value is too large"},
      {std::string(1'000'000, '('), "error: the expression is longer than 2000 characters"},
      {std::string(1500, '('), "error: parentheses or signs are nested too deeply"},
      {std::string(1500, '-') + "1", "error: parentheses or signs are nested too deeply"}};
  for (const auto& [text, message] : cases) EXPECT_EQ(result(text), message) << text;
}

TEST(EvaluateExpression, TakesNestingThatPeopleWrite) {
  EXPECT_EQ(result(std::string(90, '(') + "5" + std::string(90, ')')), "5");
}

// Any text has a value or an error, and a value is a number again.
TEST(EvaluateExpression, SurvivesAnyText) {
  constexpr std::string_view kAlphabet = "0123456789..++--**//(()) x\xe2\x88\x92";
  Rng rng(11);
  int values = 0;
  for (int round = 0; round < 30'000; ++round) {
    std::string text;
    for (uint64_t n = rng.below(14); n > 0; --n) {
      text += rng.below(50) == 0 ? static_cast<char>(rng.below(256))
                                 : kAlphabet[rng.below(kAlphabet.size())];
    }
    const Evaluation first = evaluate_expression(text);
    ASSERT_FALSE(first.text.empty());
    for (const char c : first.text) ASSERT_TRUE(c >= ' ' && c <= '~') << text;
    if (!first.ok || first.text.find('e') != std::string::npos) continue;
    ++values;
    EXPECT_EQ(result(first.text), first.text) << text;
  }
  EXPECT_GT(values, 500);
}

// Against the compiler's arithmetic, on expressions of known value.
TEST(EvaluateExpression, AgreesWithTheExpressionsItself) {
  Rng rng(12);
  const auto make = [&](const auto& self, int depth) -> std::pair<std::string, int64_t> {
    if (depth == 0 || rng.below(4) == 0) {
      const auto n = static_cast<int64_t>(rng.below(20));
      return {std::to_string(n), n};
    }
    const auto [left, a] = self(self, depth - 1);
    const auto [right, b] = self(self, depth - 1);
    switch (rng.below(4)) {
      case 0: return {fmt::format("({}+{})", left, right), a + b};
      case 1: return {fmt::format("({} - {})", left, right), a - b};
      case 2: return {fmt::format("({}*{})", left, right), a * b};
      default: return {fmt::format("-{}", left), -a};
    }
  };
  for (int round = 0; round < 2000; ++round) {
    const auto [text, value] = make(make, 4);
    EXPECT_EQ(result(text), std::to_string(value)) << text;
  }
}

}  // namespace
}  // namespace leeway
