#include <gtest/gtest.h>

#include <set>

#include "orchestrator/environment_factories.h"
#include "orchestrator/environment_test_support.h"

namespace leeway {
namespace {

using ::leeway::testing::expect_refused;
using ::leeway::testing::parts_of;
using ::leeway::testing::plain_reply;
using ::leeway::testing::prompt_of;

EnvironmentTable table(int64_t max_operand, int64_t terms, const std::string& operators) {
  EnvironmentTable t;
  t.name = "arithmetic";
  t.max_operand = max_operand;
  t.terms = terms;
  t.operators = operators;
  return t;
}

// "2*3-4=": products first, then the sum, by another way than the evaluator's.
int64_t value_of(const std::string& prompt, std::set<int64_t>& operands, std::string& operators) {
  int64_t total = 0, product = 1, sign = 1, operand = 0;
  for (const char c : prompt) {
    if (c >= '0' && c <= '9') {
      operand = operand * 10 + (c - '0');
      continue;
    }
    operands.insert(operand);
    product *= operand;
    operand = 0;
    if (c != '=') operators += c;
    if (c == '*') continue;
    total += sign * product;
    product = 1;
    sign = c == '-' ? -1 : 1;
  }
  return total;
}

TEST(ArithmeticEnvironment, AsksForSumsAndProductsWithTheUsualPrecedence) {
  const auto environment = make_arithmetic_environment(table(12, 4, "+-*"), 3);
  EXPECT_FALSE(environment->needs_renderer());
  std::set<int64_t> operands;
  std::set<char> used;
  for (uint64_t i = 0; i < 1000; ++i) {
    const Example example = environment->example(Split::train, i);
    std::string operators;
    const int64_t value = value_of(prompt_of(example), operands, operators);
    EXPECT_EQ(example.answer, std::to_string(value) + "\n") << prompt_of(example);
    EXPECT_EQ(operators.size(), 3u);
    used.insert(operators.begin(), operators.end());
    EXPECT_EQ(parts_of(*environment, example, plain_reply(example.demonstration.at(0).content)),
              "exact 1 * 1");
    EXPECT_EQ(parts_of(*environment, example, plain_reply(std::to_string(value))), "exact 1 * 0");
  }
  EXPECT_EQ(operands.size(), 13u);
  EXPECT_EQ(*operands.rbegin(), 12);
  EXPECT_EQ(used, (std::set<char>{'+', '-', '*'}));
}

TEST(ArithmeticEnvironment, KeepsItsSplitsApart) {
  const auto one = make_arithmetic_environment(table(9, 2, "+-"), 1);
  const auto two = make_arithmetic_environment(table(9, 2, "+-"), 2);
  std::set<std::string> train, held_out;
  for (uint64_t i = 0; i < 4000; ++i) {
    train.insert(prompt_of(one->example(Split::train, i)));
    held_out.insert(prompt_of(two->example(Split::held_out, i)));
    EXPECT_EQ(prompt_of(one->example(Split::train, i)), prompt_of(one->example(Split::train, i)));
  }
  for (const std::string& prompt : held_out) EXPECT_FALSE(train.contains(prompt)) << prompt;
  EXPECT_EQ(train.size() + held_out.size(), 200u);
}

TEST(ArithmeticEnvironment, RefusesSpacesWithoutTwoPromptsToSplit) {
  expect_refused([] { make_arithmetic_environment(table(0, 2, "+"), 1); },
                 {"too few prompts", "max_operand = 0", "terms = 2", "operators = \"+\""});
  expect_refused([] { make_arithmetic_environment(table(0, 1, "+"), 1); }, {"max_operand = 0"});
}

TEST(ArithmeticEnvironment, EndsOrRefusesForEverySmallSpace) {
  for (int64_t operand = 0; operand <= 3; ++operand) {
    for (int64_t terms = 1; terms <= 3; ++terms) {
      for (const char* operators : {"+", "-", "*", "+-", "+-*"}) {
        try {
          const auto environment = make_arithmetic_environment(table(operand, terms, operators), 1);
          for (uint64_t i = 0; i < 20; ++i) environment->example(Split::held_out, i);
        } catch (const Error& error) {
          EXPECT_NE(std::string(error.what()).find("max_operand"), std::string::npos);
        }
      }
    }
  }
}

TEST(ArithmeticEnvironment, RefusesKeysThatMakeNoSums) {
  const auto refused = [](const EnvironmentTable& t, const std::vector<std::string>& words) {
    expect_refused([&] { make_arithmetic_environment(t, 1); }, words);
    expect_refused([&] { make_calculator_environment(t, 1); }, words);
  };
  refused(table(-1, 2, "+"), {"max_operand = -1"});
  refused(table(9, 0, "+"), {"terms = 0"});
  refused(table(9, 101, "+"), {"terms = 101"});
  refused(table(9, 2, ""), {"operators is empty"});
  refused(table(9, 2, "+/"), {"operators = \"+/\""});
  refused(table(9, 2, "+-+"), {"operators = \"+-+\""});
  refused(table(INT64_MAX, 1, "+"), {"2^53", "max_operand = 9223372036854775807"});
  refused(table(1000, 6, "*"), {"2^53", "terms = 6"});
}

TEST(ArithmeticEnvironment, MakesTheLongestSumsItAllows) {
  const auto environment = make_arithmetic_environment(table(90'000'000'000'000, 100, "-"), 1);
  EXPECT_GT(prompt_of(environment->example(Split::train, 0)).size(), 1400u);
}

}  // namespace
}  // namespace leeway
