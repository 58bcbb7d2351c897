// Problems are detected early and recorded: environments that cannot work are detected before
// anything is trained, evaluation follows the failure policy, and the reason why a run ended is
// written down.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <thread>

#include "base/files.h"
#include "cli_helpers.h"
#include "tiny_model.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRun = R"(
output_dir = "run"
)" LEEWAY_TINY_MODEL R"([trainer]
max_steps = 4
[orchestrator]
prompts_per_batch = 4
group_size = 2
retry_backoff = 0.01
[rollout]
max_new_tokens = 4
stop = "\n"
[eval]
every = 2
prompts = 4
greedy = false
[[environment]]
name = "process"
id = "judge"
data = "train.jsonl"
eval_data = "eval.jsonl"
command = "sh judge.sh"
processes = 1
turn_timeout = 20
)";

// Answers 0 or 1 for every turn of the training split; runs `held_out` for the others, with $line
// and $id set.
std::string judge(const std::string& held_out) {
  return R"(read -r hello; echo '{"type": "hello", "protocol": 1}'
while read -r line; do id=${line#*'"id": '}; id=${id%%,*}
case $line in *'"kind": "held out"'*) )" +
         held_out + R"(;; esac
echo "{\"id\": $id, \"reward\": $((id % 2))}"
done
)";
}

class TroubleTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string train, eval;
    for (char c = 'a'; c <= 'h'; ++c) {
      train += std::string("{\"prompt\": \"") + c + "=\", \"completion\": \"x\\n\"}\n";
      eval += std::string("{\"prompt\": \"") + c + "?\", \"kind\": \"held out\"}\n";
    }
    folder_.write("train.jsonl", train);
    folder_.write("eval.jsonl", eval);
    folder_.write("run.toml", kRun);
    folder_.write("judge.sh", judge(":"));
  }
  RunResult train(const std::vector<std::string>& sets = {}) const {
    fs::remove_all(folder_.path() / "run");
    std::vector<std::string> args = {"train", "run.toml", "--json"};
    for (const std::string& set : sets) args.insert(args.end(), {"--set", set});
    return run_program(args, {.directory = folder_.path().string()});
  }
  std::string text(const std::string& name) const { return read_file(folder_ / ("run/" + name)); }
  Document last_evaluation() const { return json_of(lines_of(text("eval.jsonl")).back()); }
  // False after five minutes, which no machine needs.
  static bool wait_until(const std::function<bool()>& done) {
    for (int i = 0; i < 30000; ++i) {
      if (done()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }

  TempFolder folder_;
};

TEST_F(TroubleTest, AProgramThatCannotStartIsKnownBeforeAnythingIsTrained) {
  const std::vector<std::string> sft = {"sft.max_steps=100000"};
  folder_.write("judge.sh", "echo no licence >&2; exit 5\n");
  expect_mistake(train(sft), {"environment judge", "exit status 5", "no licence", "by hand"});
  EXPECT_FALSE(fs::exists(folder_ / "run"));
  folder_.write("judge.sh", "echo '{\"type\": \"hello\", \"protocol\": 7}'; sleep 100\n");
  expect_mistake(train(sft), {"environment judge", "protocol \"7\"", "protocol 1"});
  folder_.write("judge.sh", "sleep 100\n");
  expect_mistake(train({"sft.max_steps=100000", "environment.0.turn_timeout=0.2"}),
                 {"environment judge", "environment.turn_timeout", "no hello within 0.2 s"});
  EXPECT_FALSE(fs::exists(folder_ / "run"));
}

TEST_F(TroubleTest, AnEmptyHeldOutSplitIsKnownBeforeAnythingIsTrained) {
  folder_.write("one.jsonl", "{\"prompt\": \"a=\", \"completion\": \"b\"}\n");
  expect_mistake(
      train({"sft.max_steps=100000", "environment.0.data=one.jsonl", "environment.0.eval_data="}),
      {"environment judge", "no held-out prompt", "environment.0.eval_data"});
  EXPECT_FALSE(fs::exists(folder_ / "run"));
}

TEST_F(TroubleTest, WeightsThatOverflowAreRefused) {
  expect_mistake(train({"environment.0.weight=1e307"}), {"environment.0.weight", "1e+307"});
}

TEST_F(TroubleTest, AnOutageInAnEvaluationCostsNothing) {
  // The first two turns of each evaluation's first prompt kill the program.
  folder_.write("judge.sh", judge(R"(case $line in *'"a?"'*)
  n=$(cat outage 2>/dev/null || echo 0); echo $((n + 1)) > outage
  [ $((n % 3)) -lt 2 ] && { echo the network is down >&2; exit 1; } ;; esac)"));
  const RunResult result = train();
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_EQ(json_of(result.out)["steps"].GetDouble(), 4.0);
  EXPECT_EQ(lines_of(text("eval.jsonl")).size(), 3u);  // at steps 0, 2 and 4
  EXPECT_EQ(last_evaluation()["eval/all/failed_rollouts"].GetDouble(), 0.0);
  EXPECT_EQ(last_evaluation()["eval/all/prompts"].GetDouble(), 4.0);
  EXPECT_EQ(read_file(folder_ / "outage"), "9\n");
}

TEST_F(TroubleTest, WhatStaysFailedInAnEvaluationIsCountedAndNamed) {
  const std::string error = R"(echo "{\"id\": $id, \"error\": \"a broken page\"}"; continue)";
  folder_.write("judge.sh", judge("case $line in *'\"a?\"'*) " + error + ";; esac"));
  RunResult result = train();
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_EQ(last_evaluation()["eval/all/failed_rollouts"].GetDouble(), 1.0);
  for (const std::string& said : {result.err, text("log.txt")}) {
    EXPECT_TRUE(contains(said, "1 of 4 rollouts failed")) << said;
    EXPECT_TRUE(contains(said, "a broken page")) << said;
  }
  // Nothing completes: this is reported, and the run continues.
  folder_.write("judge.sh", judge(error));
  result = train();
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "eval at step 4: nothing completed: all 4 rollouts failed"))
      << result;
  EXPECT_EQ(last_evaluation()["eval/all/prompts"].GetDouble(), 0.0);
  const RunResult alone =
      run_program({"eval", "run.toml", "--json"}, {.directory = folder_.path().string()});
  EXPECT_EQ(alone.code, 3) << alone;
  EXPECT_TRUE(contains(alone.err, "all 4 rollouts failed")) << alone;
}

TEST_F(TroubleTest, ASignalIsNoticedWithinAnEvaluation) {
  folder_.write("judge.sh", judge("touch evaluating; sleep 1000"));
  const pid_t child = ::fork();
  if (child == 0) {
    if (::chdir(folder_.path().c_str()) != 0) ::_exit(126);
    const int null = ::open("/dev/null", O_WRONLY);
    ::dup2(null, STDOUT_FILENO);
    ::dup2(null, STDERR_FILENO);
    const std::string program = leeway_program();
    ::execl(program.c_str(), "leeway", "train", "run.toml", nullptr);
    ::_exit(127);
  }
  ASSERT_TRUE(wait_until([&] { return fs::exists(folder_ / "evaluating"); }))
      << "no evaluation began in five minutes";
  ::kill(child, SIGTERM);
  int status = 0;
  const bool ended = wait_until([&] { return ::waitpid(child, &status, WNOHANG) == child; });
  if (!ended) ::kill(child, SIGKILL);
  ASSERT_TRUE(ended) << "the signal was not noticed in five minutes of an evaluation";
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  const Document end = json_of(text("end.json"));
  EXPECT_STREQ(end["end"].GetString(), "stopped");
  EXPECT_EQ(end["steps"].GetDouble(), 0.0);
  EXPECT_TRUE(contains(text("log.txt"), "the run was stopped after 0 steps"));
  EXPECT_FALSE(fs::exists(folder_ / "run/eval.jsonl") && !text("eval.jsonl").empty());
}

TEST_F(TroubleTest, WhyARunEndedIsInItsFolder) {
  ASSERT_EQ(train().code, 0);
  EXPECT_STREQ(json_of(text("end.json"))["end"].GetString(), "finished");
  EXPECT_EQ(lines_of(text("log.txt")).back(), "the run finished after 4 steps");
  EXPECT_TRUE(contains(text("report.html"), R"("end":"finished")") ||
              contains(text("report.html"), R"("end": "finished")"));

  folder_.write("judge.sh", R"(read -r hello; echo '{"type": "hello", "protocol": 1}'
while read -r line; do echo "the database is gone" >&2; exit 3; done
)");
  // Several processes: one that answers nothing is started again after ever longer pauses.
  const RunResult result = train({"environment.0.processes=8"});
  EXPECT_EQ(result.code, 3) << result;
  const Document end = json_of(text("end.json"));
  EXPECT_STREQ(end["end"].GetString(), "gave_up");
  for (const std::string& place : {std::string(end["reason"].GetString()), result.err,
                                   lines_of(text("log.txt")).back(), text("report.html")}) {
    EXPECT_TRUE(contains(place, "in a row")) << place.substr(0, 2000);
    EXPECT_TRUE(contains(place, "the database is gone")) << place.substr(0, 2000);
  }
}

TEST_F(TroubleTest, FailuresAndUnaskedAnswersAreInTheLogAndInTheProgress) {
  folder_.write("judge.sh", R"(read -r hello; echo '{"type": "hello", "protocol": 1}'
while read -r line; do id=${line#*'"id": '}; id=${id%%,*}
case $((id % 4)) in
  0) echo "{\"id\": $id, \"error\": \"flaky backend\"}"; continue ;;
  1) echo "{\"id\": $id, \"reward\": 1e39}"; continue ;;
  2) echo "{\"id\": $id, \"reward\": 1}"; echo "{\"id\": $id, \"reward\": 1}"; continue ;;
esac
echo "{\"id\": $id, \"reward\": 0}"
done
)");
  const RunResult result =
      train({"orchestrator.max_error_reschedule_attempts=unlimited", "trainer.max_steps=6"});
  ASSERT_EQ(result.code, 0) << result;
  double failed = 0.0, bad = 0.0, unasked = 0.0;
  for (const std::string& line : lines_of(text("metrics.jsonl"))) {
    const Document row = json_of(line);
    for (const auto& member : row.GetObject()) {
      const std::string name = member.name.GetString();
      if (name.starts_with("failures/")) failed += member.value.GetDouble();
      if (name == "failures/bad_answer") bad += member.value.GetDouble();
      if (name == "unasked_answers/judge") unasked += member.value.GetDouble();
      EXPECT_TRUE(!name.starts_with("reward/") || std::abs(member.value.GetDouble()) <= 1.0);
    }
  }
  EXPECT_GT(failed, 0.0);
  EXPECT_GT(bad, 0.0);
  EXPECT_GT(unasked, 0.0);
  const std::string log = text("log.txt");
  for (const char* words : {"rollouts failed (", "bad_answer ", "unasked answer: ",
                            "a second answer to a turn", "unsolicited answers"}) {
    EXPECT_TRUE(contains(log, words)) << "no \"" << words << "\" in " << log;
  }
  EXPECT_TRUE(contains(result.err, " failed")) << result;
}

}  // namespace
}  // namespace leeway
