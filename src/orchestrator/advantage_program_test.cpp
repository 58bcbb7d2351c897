#include "orchestrator/advantage_program.h"

#include <gtest/gtest.h>

#include "base/test_folder.h"
#include "orchestrator/batch.h"
#include "orchestrator/environment_test_support.h"
#include "orchestrator/process_test_support.h"
#include "orchestrator/steady_clock.h"

namespace leeway {
namespace {

using namespace leeway::testing;

const std::vector<std::string> kIds = {"sort", "talk"};
const std::string kSilent =
    R"(read -r hello; echo '{"type": "hello", "protocol": 1}'; exec sleep 3600)";
const auto kGoOn = [] { return false; };

Rollout rollout_of(double reward, size_t tokens, bool truncated) {
  Rollout rollout;
  TrajectoryStep& step = rollout.steps.emplace_back();
  step.prompt = {1, 2};
  step.completion.assign(tokens, 5);
  step.logprobs.assign(tokens, -1.0f);
  step.versions.assign(tokens, 0);
  rollout.rewards = {{.name = "exact", .value = reward}};
  rollout.reward = reward;
  rollout.truncated = truncated;
  return rollout;
}

std::vector<Group> two_groups() {
  std::vector<Group> groups(2);
  groups[0].number = 7;
  groups[0].example.index = 3;
  groups[0].rollouts = {rollout_of(1.0, 2, false), rollout_of(0.0, 4, true)};
  groups[1].number = 8;
  groups[1].environment = 1;
  groups[1].rollouts = {rollout_of(0.5, 1, false), rollout_of(0.25, 1, false)};
  return groups;
}

OrchestratorTable table_of(const std::string& command, double timeout = 60.0) {
  OrchestratorTable table;
  table.advantage_command = command;
  table.advantage_timeout = timeout;
  table.retry_backoff = 0.001;
  return table;
}

std::vector<GroupVerdict> verdicts_of(const std::string& command) {
  SteadyClock clock;
  AdvantageProgram program(table_of(command), clock);
  return program.ask(two_groups(), kIds, kGoOn);
}

TEST(AdvantageProgram, GivesAdvantagesAndDropsGroups) {
  const auto verdicts =
      verdicts_of(answering("case $line in *talk*) " + answer(R"("drop": "too easy")") + ";; *) " +
                            answer(R"("advantages": [2.5, -1])") + ";; esac"));
  ASSERT_EQ(verdicts.size(), 2u);
  EXPECT_EQ(verdicts[0].advantages, (std::vector<double>{2.5, -1.0}));
  EXPECT_EQ(verdicts[0].drop, "");
  EXPECT_EQ(verdicts[1].drop, "too easy");
  EXPECT_TRUE(verdicts[1].advantages.empty());
}

TEST(AdvantageProgram, IsToldOfTheGroup) {
  const TestFolder folder;
  const std::string file = folder.at("requests");
  verdicts_of(answering("echo \"$line\" >> " + file + "; " + answer(R"("advantages": [0, 0])")));
  const std::string text = text_of_file(file);
  EXPECT_EQ(text.find("{\"type\": \"group\", \"id\": "), 0u) << text;
  for (const char* part :
       {R"("environment": "sort", "example": 3, "rewards": [1, 0], )",
        R"("parts": [{"exact": 1}, {"exact": 0}], "lengths": [2, 4], "truncated": [false, true]})",
        R"("environment": "talk", "example": 0, "rewards": [0.5, 0.25])"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in " << text;
  }
}

TEST(AdvantageProgram, StopsTheRunWithTheLastFailure) {
  const struct {
    std::string command, message;
  } cases[] = {
      {answering(answer(R"("advantages": [1])")), "must be a list of 2 numbers"},
      {answering(answer(R"("advantages": [1, NaN])")), "advantages has NaN"},
      {answering(answer(R"("advantages": [1, 1e40])")), "a float32 can hold"},
      {answering(answer(R"("advantages": [1, "x"])")), "must consist of numbers"},
      {answering(answer(R"("advantages": 1)")), "must be a list of 2 numbers"},
      {answering(answer(R"("drop": 1)")), "drop must be a string"},
      {answering(answer(R"("drop": "a", "advantages": [1, 2])")), "one of advantages, drop, error"},
      {answering(answer(R"("reward": 1)")), "one of advantages, drop, error"},
      {answering(answer(R"("error": "no model")")), "the program reports: no model"},
      {answering("echo '{\"id\": 1, \"advantages\": [1, 2]}'"), "its id must be"},
      {answering("echo nonsense"), "nonsense"},
      {answering("echo dying >&2; exit 3"), "ended with exit status 3"},
  };
  for (const auto& each : cases) {
    SteadyClock clock;
    AdvantageProgram program(table_of(each.command), clock);
    try {
      program.ask(two_groups(), kIds, kGoOn);
      ADD_FAILURE() << each.command;
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("group 7 of sort, example 3, asked 3 times"), std::string::npos) << text;
      EXPECT_NE(text.find(each.message), std::string::npos) << text;
    }
    EXPECT_GE(program.take_log().size(), 2u) << "each repeat is logged";
  }
}

TEST(AdvantageProgram, IsNotWaitedForLongerThanItsTimeout) {
  SteadyClock clock;
  OrchestratorTable table = table_of(answering(":"), 0.2);
  table.max_error_reschedule_attempts = 2;
  AdvantageProgram program(table, clock);
  expect_refused(
      [&] { program.ask(two_groups(), kIds, kGoOn); },
      {"orchestrator.advantage_timeout", "gave no answer within 0.2 s", "asked 2 times"});
}

TEST(AdvantageProgram, IsAskedAgainAfterAFailure) {
  // Dies at its first request, and gives two answers to its second.
  const TestFolder folder;
  const std::string mark = folder.at("mark");
  const std::string good = answer(R"("advantages": [1, 2])");
  const auto verdicts = verdicts_of(answering("if [ ! -e " + mark + " ]; then touch " + mark +
                                              "; exit 1; fi; " + good + "; " + good));
  ASSERT_EQ(verdicts.size(), 2u);
  for (const GroupVerdict& verdict : verdicts) {
    EXPECT_EQ(verdict.advantages, (std::vector<double>{1.0, 2.0}));
  }
}

TEST(AdvantageProgram, ThatFailsEndlesslyEndsWhenTheRunIsToStop) {
  SteadyClock clock;
  OrchestratorTable table = table_of(answering(answer(R"("error": "later")")));
  table.max_error_reschedule_attempts = {};
  AdvantageProgram program(table, clock);
  bool again = false;
  const auto should_stop = [&] { return again |= !program.take_log().empty(); };
  expect_refused([&] { program.ask(two_groups(), kIds, should_stop); },
                 {"the run was asked to stop"});
}

TEST(AdvantageProgram, IsNotWaitedForWhenTheRunIsToStop) {
  SteadyClock clock;
  AdvantageProgram program(table_of(kSilent, 3600.0), clock);
  program.check();
  expect_refused([&] { program.ask(two_groups(), kIds, [] { return true; }); },
                 {"the run was asked to stop", "not answered yet"});
}

TEST(AdvantageProgram, ThatDoesNotWorkIsRefusedBeforeTheRun) {
  SteadyClock clock;
  AdvantageProgram missing(table_of("/does/not/exist"), clock);
  expect_refused([&] { missing.check(); },
                 {"orchestrator.advantage_command does not work",
                  "orchestrator.advantage_command = \"/does/not/exist\""});
  AdvantageProgram other(table_of(R"(read -r hello; echo '{"type": "hello", "protocol": 99}')"),
                         clock);
  expect_refused([&] { other.check(); }, {"orchestrator.advantage_command", "protocol"});
}

TEST(AdvantageProgram, LeavesNothingBehind) {
  const int children = count_children();
  verdicts_of(answering(answer(R"("advantages": [1, 2])")));
  EXPECT_EQ(count_children(), children);
}

TEST(AdvantageProgram, DecidesWhatABatchTrains) {
  SteadyClock clock;
  AdvantageProgram program(
      table_of(answering("case $line in *talk*) " + answer(R"("drop": "too easy")") + ";; *) " +
                         answer(R"("advantages": [2.5, -1])") + ";; esac")),
      clock);
  std::vector<Group> groups = two_groups();
  groups[0].rollouts[0].credit.resize(1);
  groups[0].rollouts[0].credit[0].reward = 0.25;  // part of the reward, for a program
  groups[0].rollouts[1].credit.resize(1);
  groups[0].rollouts[1].credit[0].advantages = {9.0};
  const PreparedBatch batch = prepare_batch(1, groups, kIds, {.program = &program});
  EXPECT_EQ(batch.drop_reasons, (std::vector<std::string>{"", "too easy"}));
  EXPECT_EQ(batch.advantages, (std::vector<std::vector<double>>{{2.5, -1.0}, {0.0, 0.0}}));
  EXPECT_EQ(batch.filtered_rollouts, 2);
  ASSERT_EQ(batch.learner.samples.size(), 2u);
  EXPECT_EQ(batch.learner.samples[0].advantage(2), 2.5f);
  EXPECT_EQ(batch.learner.samples[1].advantage(2), 9.0f) << "the environment's own";
  for (const auto& [name, value] : batch.metrics) {
    if (name == "filtered_groups") {
      EXPECT_EQ(value, 1.0);
    }
  }
}

}  // namespace
}  // namespace leeway
