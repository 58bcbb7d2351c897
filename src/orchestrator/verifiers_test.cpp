#include "orchestrator/verifiers.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "orchestrator/environment_test_support.h"

namespace leeway {
namespace {

using ::leeway::testing::expect_refused;
using ::leeway::testing::plain_reply;
using ::leeway::testing::rendered_reply;

std::string text_of(const Verdict& verdict) {
  EXPECT_TRUE(verdict.found || !verdict.right);
  return verdict.right ? "right" : verdict.found ? "wrong" : "nothing";
}

std::string number_of(std::string_view text) { return final_number(text).value_or("none"); }

std::string choice_of(std::string_view text) {
  const auto letter = final_choice(text);
  return letter ? std::string(1, *letter) : "none";
}

TEST(Trimmed, LeavesWhatIsBetweenTheSpaces) {
  EXPECT_EQ(trimmed(" \t\r\n a b\n"), "a b");
  EXPECT_EQ(trimmed("a"), "a");
  EXPECT_EQ(trimmed(" \n"), "");
  EXPECT_EQ(trimmed(""), "");
}

TEST(JudgedText, IsTheContentWithoutThinking) {
  EXPECT_EQ(judged_text(rendered_reply("42")), "42");
  EXPECT_EQ(judged_text(plain_reply("42\n")), "42\n");
}

TEST(VerifyExact, ComparesTrimmedTexts) {
  EXPECT_EQ(text_of(verify_exact(" Paris\n", "Paris")), "right");
  EXPECT_EQ(text_of(verify_exact("Paris", "\tParis ")), "right");
  EXPECT_EQ(text_of(verify_exact("paris", "Paris")), "wrong");
  EXPECT_EQ(text_of(verify_exact("Paris.", "Paris")), "wrong");
  EXPECT_EQ(text_of(verify_exact("New  York", "New York")), "wrong");
  EXPECT_EQ(text_of(verify_exact("", "Paris")), "nothing");
  EXPECT_EQ(text_of(verify_exact(" \n", "Paris")), "nothing");
}

TEST(FinalNumber, IsTheLastOneAsItIsWritten) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"42", "42"},
      {"3 apples and 4 pears make 7.", "7"},
      {"It costs $1,234.50.", "1234.50"},
      {"1,234,567", "1234567"},
      {"1,23", "23"},
      {"1,2345", "2345"},
      {"12345,678", "678"},
      {"12,345,67", "67"},
      {"1, 2, 3", "3"},
      {"-5", "-5"},
      {"x = -5", "-5"},
      {"(-5)", "-5"},
      {"+5", "5"},
      {"10-3", "3"},
      {"x-3", "3"},
      {"(2)-3", "3"},
      {"5 - 3", "3"},
      {"page --7", "7"},
      {".5", "0.5"},
      {"-.5", "-0.5"},
      {"0.50", "0.50"},
      {"7.", "7"},
      {"50%", "50"},
      {"12kg", "12"},
      {"6.02e23", "6.02e23"},
      {"1E-5", "1e-5"},
      {"1e+5", "1e5"},
      {"2e", "2"},
      {"2e-", "2"},
      {"1e5e6", "6"},
      {"#### 72", "72"},
      {"\\boxed{42} is better than 41", "42"},
      {"\\boxed{1} \\boxed{2} 3", "2"},
      {"\\boxed{x = 1,000}", "1000"},
      {"\\boxed{\\text{about } {17}} 3", "17"},
      {"\\boxed{nothing} 3", "3"},
      {"\\boxed{5} \\boxed{6", "5"},
      {"\\boxed{6", "6"},
      {"\\boxed{5\\}} 9", "5"},
      {"} } 4 { {", "4"},
      {"", "none"},
      {"seven", "none"},
      {"-", "none"},
      {"...", "none"}};
  for (const auto& [text, number] : cases) EXPECT_EQ(number_of(text), number) << text;
}

TEST(VerifyNumeric, ComparesValuesNotTexts) {
  const std::vector<std::pair<std::string, std::string>> same{
      {"The total is 1,234.", "1234"},
      {"1234.00", "1234"},
      {"007", "7"},
      {"-0", "0"},
      {"0.5", ".50"},
      {"1e3", "1000"},
      {"0.3333333333333", "0.33333333333334"},
      {"123456789012345678", "123456789012345678"},
      {"99999999999999999999999", "1e23"},
      {"1e999", "1e999"},
      {"so 72", "She sold 48/2 = 24. #### 72"},
      {"\\boxed{5} (not 6)", "5"}};
  for (const auto& [a, b] : same) {
    EXPECT_EQ(text_of(verify_numeric(a, b)), "right") << a << " / " << b;
  }
  const std::vector<std::pair<std::string, std::string>> different{
      {"5", "-5"},
      {"0.333", "0.3333"},
      {"10000000001", "10000000000"},
      {"123456789012345678", "123456789012345679"},
      {"0", "1e-300"},
      {"1e999", "1e998"},
      {"12", "1,2"}};
  for (const auto& [a, b] : different) {
    EXPECT_EQ(text_of(verify_numeric(a, b)), "wrong") << a << " / " << b;
    EXPECT_EQ(text_of(verify_numeric(b, a)), "wrong") << b << " / " << a;
  }
  EXPECT_EQ(text_of(verify_numeric("no idea", "5")), "nothing");
}

TEST(VerifyNumeric, FindsAnyWholeNumberThatIsWritten) {
  Rng rng(21);
  for (int round = 0; round < 2000; ++round) {
    const auto magnitude = static_cast<int64_t>(rng.next() >> (2 + rng.below(60)));
    const int64_t n = rng.below(2) == 0 ? magnitude : -magnitude;
    const std::string plain = std::to_string(n);
    std::string grouped = plain;
    const size_t first = n < 0 ? 1 : 0;
    for (size_t at = grouped.size(); at > first + 3; at -= 3) grouped.insert(at - 3, 1, ',');
    EXPECT_EQ(number_of(fmt::format("Of 5, it is {}.", grouped)), plain);
    EXPECT_EQ(text_of(verify_numeric(fmt::format("${}$", grouped), plain)), "right");
    // Beyond, a half is within the tolerance of numbers that are not whole.
    if (magnitude < 100'000'000) {
      EXPECT_EQ(text_of(verify_numeric(grouped + ".5", plain)), "wrong");
    }
  }
}

TEST(FinalChoice, IsTheLastLetterWrittenAsAChoice) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"(B)", "B"},
      {"Answer: B", "B"},
      {"answer: B.", "B"},
      {"The ANSWER IS C", "C"},
      {"The answer is: **D**", "D"},
      {"the answer is (E), not", "E"},
      {"Answer:\nJ", "J"},
      {"Answer = \"A\"", "A"},
      {"(A) is wrong, (B) is right", "B"},
      {"Answer: A. No, wait. Answer: B", "B"},
      {"Answer: A. Or (C)", "C"},
      {"\\boxed{C}", "C"},
      {"\\boxed{\\text{C}}", "C"},
      {"\\boxed{(C)} or (D)", "C"},
      {"\\boxed{12} (D)", "D"},
      {"B", "B"},
      {" b \n", "B"},
      {"B.", "B"},
      {"b)", "B"},
      {"(K)", "none"},
      {"K", "none"},
      {"(b)", "none"},
      {"Answer: Because", "none"},
      {"Answer: I'm not sure", "none"},
      {"answerB", "none"},
      {"the answer isB", "none"},
      {"A dog", "none"},
      {"answer", "none"},
      {"answer: ", "none"},
      {"the answer is", "none"},
      {"(B", "none"},
      {"(", "none"},
      {"", "none"}};
  for (const auto& [text, letter] : cases) EXPECT_EQ(choice_of(text), letter) << text;
}

TEST(VerifyChoice, ComparesLetters) {
  EXPECT_EQ(text_of(verify_choice("I think (B).", "B")), "right");
  EXPECT_EQ(text_of(verify_choice("Answer: B", "(B)")), "right");
  EXPECT_EQ(text_of(verify_choice("Answer: B", "b")), "right");
  EXPECT_EQ(text_of(verify_choice("Answer: C", "B")), "wrong");
  EXPECT_EQ(text_of(verify_choice("no idea", "B")), "nothing");
}

TEST(AnswerPattern, IsSearchedInTheReply) {
  const AnswerPattern pattern(R"(\b(cat|dog)s?\b)");
  EXPECT_EQ(text_of(pattern.verify("Two dogs.")), "right");
  EXPECT_EQ(text_of(pattern.verify("Two dogsleds.")), "nothing");
  EXPECT_EQ(text_of(pattern.verify("")), "nothing");
  EXPECT_EQ(text_of(AnswerPattern("(?i)^yes$").verify("YES")), "right");
  EXPECT_EQ(text_of(AnswerPattern("^\\p{L}+$").verify("\xc3\xa9t\xc3\xa9")), "right");
  EXPECT_EQ(text_of(AnswerPattern("(a)(b)(c)").verify("xabc")), "right");
}

TEST(AnswerPattern, TakesRepliesThatAreNoText) {
  const AnswerPattern pattern("ok");
  EXPECT_EQ(text_of(pattern.verify("\xff\xfe ok \xc3")), "right");
  EXPECT_EQ(text_of(pattern.verify("\xff\xfe o\xc3k")), "nothing");
  EXPECT_EQ(text_of(pattern.verify(std::string("\0 ok", 4))), "right");
}

TEST(AnswerPattern, RefusesWhatIsNone) {
  expect_refused([] { AnswerPattern("(a"); }, {"\"(a\"", "offset 2"});
  expect_refused([] { AnswerPattern("*"); }, {"\"*\""});
  expect_refused([] { AnswerPattern("\\C"); }, {"\\C"});
  expect_refused([] { AnswerPattern("\xff"); }, {"regular expression"});
}

TEST(AnswerPattern, GivesUpInsteadOfBacktrackingForEver) {
  const std::string text = std::string(5000, 'a') + "!";
  EXPECT_EQ(text_of(AnswerPattern("(a+)+$").verify(text)), "nothing");
  EXPECT_EQ(text_of(AnswerPattern("(a|aa)+$").verify(text)), "nothing");
  EXPECT_EQ(text_of(AnswerPattern("(a+)+!").verify(text)), "right");
  // Within the limit of one match at each position, but far beyond the limit of all together.
  EXPECT_EQ(text_of(AnswerPattern("(?:a|a){19}[bc]").verify(text)), "nothing");
}

TEST(Verifiers, SurviveAnyText) {
  const std::vector<std::string> pieces{"\\boxed{", "{",  "}",      "\\",   "1",   ",234", ".", "-",
                                        "e",        "E5", "Answer", ":",    " is", "(B)",  "(", ")",
                                        "B",        " ",  "\n",     "\xff", "0",   "999"};
  Rng rng(22);
  const AnswerPattern pattern("B|1");
  for (int round = 0; round < 20'000; ++round) {
    std::string text;
    for (uint64_t n = rng.below(12); n > 0; --n) text += pieces[rng.below(pieces.size())];
    const auto number = final_number(text);
    const bool has_digit = text.find_first_of("0123456789") != std::string::npos;
    EXPECT_EQ(number.has_value(), has_digit) << text;
    if (number) {
      EXPECT_EQ(text_of(verify_numeric(text, *number)), "right") << text << " / " << *number;
    }
    if (const auto letter = final_choice(text)) {
      EXPECT_EQ(text_of(verify_choice(text, std::string(1, *letter))), "right") << text;
    }
    text_of(verify_exact(text, "B"));
    text_of(pattern.verify(text));
  }
}

TEST(Verifiers, TakeTimeInProportionToTheText) {
  std::string boxes, answers, commas;
  for (int i = 0; i < 100'000; ++i) boxes += "\\boxed{", answers += "answer is (", commas += "1,";
  EXPECT_EQ(number_of(boxes), "none");
  EXPECT_EQ(number_of(commas), "1");
  EXPECT_EQ(choice_of(answers + "B"), "B");
  EXPECT_EQ(choice_of("answer" + std::string(100'000, ' ') + "B"), "B");
}

}  // namespace
}  // namespace leeway
