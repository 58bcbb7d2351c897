// Supervised training is resumed as RL is: the warm start of a run, and runs of `leeway sft`.

#include <gtest/gtest.h>

#include "resume_support.h"

namespace leeway {
namespace {

class ResumeSftTest : public ResumeFixture {
 protected:
  // So many supervised steps that a signal comes before the last one.
  inline static const std::vector<std::string> kLongSft = {
      "sft.max_steps=600", "sft.data=letters.jsonl", "checkpoint.every=20"};

  RunResult sft(const std::vector<std::string>& sets = {}) const {
    return leeway(arguments_of("sft", {"run.toml", "--json"}, sets));
  }
  static std::vector<std::string> arguments_of(const std::string& command,
                                               std::vector<std::string> args,
                                               const std::vector<std::string>& sets) {
    args = arguments(std::move(args), sets);
    args.front() = command;
    return args;
  }
  void wait_for_sft_steps(size_t steps) const {
    wait_until([&] {
      return fs::exists(path("run/sft.jsonl")) &&
             lines_of(read_file(path("run/sft.jsonl"))).size() >= steps;
    });
  }
  std::string weights(int step) const {
    return read_file(path("run/weights/step_" + std::to_string(step) + "/model.safetensors"));
  }
};

TEST_F(ResumeSftTest, AWarmStartThatWasKilledOrStoppedGoesOnAndThenRL) {
  const RunResult whole = train(kLongSft);
  ASSERT_EQ(whole.code, 0) << whole;
  const Outcome wanted = outcome();
  const std::string lines = read_file(path("run/sft.jsonl"));
  for (const int signal : {SIGKILL, SIGINT}) {
    fs::remove_all(path("run"));
    Started run(arguments({"run.toml", "--json"}, kLongSft), directory());
    wait_for_sft_steps(50);
    run.send(signal);
    ASSERT_EQ(run.wait(), signal == SIGKILL ? -SIGKILL : 0) << read_file(path("err.txt"));
    ASSERT_LT(lines_of(read_file(path("run/sft.jsonl"))).size(), 600u);
    if (signal == SIGINT) {
      EXPECT_STREQ(json_of(read_file(path("out.txt")))["end"].GetString(), "stopped");
    }
    const RunResult result = resume();
    ASSERT_EQ(result.code, 0) << result;
    EXPECT_TRUE(contains(result.err, "resumed from supervised step ")) << result.err;
    EXPECT_EQ(read_file(path("run/sft.jsonl")), lines);
    expect_same(outcome(), wanted);
    expect_no_leftovers();
  }
}

TEST_F(ResumeSftTest, AFinishedRunOfSftIsLeftAsItIs) {
  ASSERT_EQ(sft().code, 0);
  EXPECT_EQ(checkpoints(), (std::set<std::string>{"sft_2", "sft_4"}));
  const auto before = content_of(path("run"));
  for (const char* command : {"train", "sft"}) {
    const RunResult result = leeway({command, "--resume", "run"});
    EXPECT_EQ(result.code, 0) << result;
    EXPECT_TRUE(contains(result.err, "the supervised training has finished, 4 steps"))
        << result.err;
    EXPECT_TRUE(contains(result.err, "leeway train --from run")) << result.err;
    EXPECT_TRUE(contains(result.out, "run/weights/step_4")) << result.out;
  }
  EXPECT_TRUE(content_of(path("run")) == before);
  fs::remove_all(path("run/checkpoints"));
  EXPECT_EQ(leeway({"train", "--resume", "run"}).code, 0);
}

TEST_F(ResumeSftTest, ARunOfSftThatWasInterruptedGoesOnBitForBit) {
  // Demonstrations of the file, in epochs, and those that environments make.
  for (const std::string data : {"letters.jsonl", ""}) {
    std::vector<std::string> sets = kLongSft;
    sets[1] = "sft.data=\"" + data + "\"";
    fs::remove_all(path("run"));
    ASSERT_EQ(sft(sets).code, 0);
    const std::string wanted = weights(600), lines = read_file(path("run/sft.jsonl"));
    fs::remove_all(path("run"));
    Started run(arguments_of("sft", {"run.toml"}, sets), directory());
    wait_for_sft_steps(50);
    run.send(data.empty() ? SIGTERM : SIGKILL);
    run.wait();
    const RunResult result = leeway({data.empty() ? "train" : "sft", "--resume", "run", "--json"});
    ASSERT_EQ(result.code, 0) << result;
    EXPECT_TRUE(contains(result.err, "resumed from supervised step ")) << result.err;
    EXPECT_STREQ(json_of(result.out)["end"].GetString(), "finished");
    EXPECT_EQ(json_of(result.out)["steps"].GetInt(), 600);
    EXPECT_TRUE(weights(600) == wanted);
    EXPECT_EQ(read_file(path("run/sft.jsonl")), lines);
  }
}

TEST_F(ResumeSftTest, MoreSupervisedStepsAreAllowedAndFewerAreNot) {
  ASSERT_EQ(sft({"sft.max_steps=6"}).code, 0);
  const std::string wanted = weights(6);
  fs::remove_all(path("run"));
  ASSERT_EQ(sft().code, 0);
  expect_mistake(leeway({"sft", "--resume", "run", "--set", "sft.max_steps=3"}),
                 {"sft.max_steps = 3: the run has done 4 steps already"});
  const RunResult result = leeway({"sft", "--resume", "run", "--set", "sft.max_steps=6"});
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(weights(6) == wanted);  // the rate is constant: its course has no end
  fs::remove_all(path("run"));
  ASSERT_EQ(train().code, 0);
  expect_mistake(leeway({"sft", "--resume", "run"}), {"leeway train --resume run"});
}

}  // namespace
}  // namespace leeway
