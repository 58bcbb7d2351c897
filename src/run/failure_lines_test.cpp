#include "run/failure_lines.h"

#include <gtest/gtest.h>

#include "base/utf8.h"

namespace leeway {
namespace {

RolloutFailure failure_of(const std::string& message) {
  return {.kind = FailureKind::timeout, .environment = 0, .example = 17, .message = message};
}

TEST(FailureLines, SayKindEnvironmentExampleAndMessage) {
  EXPECT_EQ(failure_line("judge", failure_of("no answer within 5 s")),
            "rollout failed: judge, example 17: timeout: no answer within 5 s");
}

TEST(FailureLines, AreOneLineThatATerminalCannotMistake) {
  EXPECT_EQ(failure_line("e", failure_of("\n\x1b[2Jgone \xff\nTraceback: more")),
            "rollout failed: e, example 17: timeout: \\u001b[2Jgone \\xff");
  std::string accents;
  for (int i = 0; i < 1000; ++i) accents += "\xc3\xa9";
  const std::string line = failure_line("e", failure_of(accents));
  EXPECT_LT(line.size(), 500u);
  EXPECT_EQ(line.find('\\'), std::string::npos) << "no character is cut in two";
  EXPECT_EQ(valid_utf8_prefix(line), line.size());
  EXPECT_EQ(failure_line("e", failure_of("")), "rollout failed: e, example 17: timeout: ");
}

TEST(FailureLines, TellOfTheFirstFailureOfEachEnvironmentAtOnce) {
  FailureLines lines;
  EXPECT_NE(lines.add("e", failure_of("a"), 10.0), std::nullopt);
  EXPECT_EQ(lines.add("e", failure_of("a"), 10.1), std::nullopt);
  EXPECT_EQ(lines.add("other", failure_of("b"), 10.2),
            "rollout failed: other, example 17: timeout: b (and 1 more before it)");
  EXPECT_EQ(lines.add("other", failure_of("b"), 10.3), std::nullopt);
}

TEST(FailureLines, AreOneASecondAndCountTheRest) {
  FailureLines lines;
  EXPECT_EQ(lines.rest(), std::nullopt);
  EXPECT_EQ(lines.add("e", failure_of("a"), 10.0), "rollout failed: e, example 17: timeout: a");
  EXPECT_EQ(lines.add("e", failure_of("b"), 10.1), std::nullopt);
  EXPECT_EQ(lines.add("e", failure_of("c"), 10.9), std::nullopt);
  EXPECT_EQ(lines.add("e", failure_of("d"), 11.1),
            "rollout failed: e, example 17: timeout: d (and 2 more before it)");
  EXPECT_EQ(lines.add("e", failure_of("f"), 11.2), std::nullopt);
  EXPECT_EQ(lines.rest(), "rollouts failed: and 1 more");
  EXPECT_EQ(lines.rest(), std::nullopt);
}

}  // namespace
}  // namespace leeway
