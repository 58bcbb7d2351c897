// Everything goes wrong at once, and the run still ends with every rollout accounted for: a judge
// that hangs, dies, prints garbage, floods, answers late or reports errors, and a program of
// protocol 2 that does the same with many episodes at a time; prompts that never work; the whole
// program killed again and again and resumed.
//
// `scripts/chaos` runs it for longer: LEEWAY_CHAOS_STEPS and LEEWAY_CHAOS_KILLS.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <set>
#include <thread>

#include "base/files.h"
#include "base/rng.h"
#include "cli_helpers.h"
#include "tiny_model.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::atoll(text) : otherwise;
}

// The judge's behaviour depends on the turn's id, which is random.
constexpr const char* kJudge = R"(#!/bin/sh
while read -r line; do
  case $line in
    *'"type": "hello"'*) echo '{"type": "hello", "protocol": 1}'; continue ;;
  esac
  id=${line#*'"id": '} id=${id%%,*}
  case $line in *'"poison": true'*) echo "{\"id\": $id, \"error\": \"this prompt never works\"}"; continue ;; esac
  case $((id % 37)) in
    3) sleep 60 ;;
    7) echo "going down" >&2; exit 3 ;;
    11) echo "this is no JSON" ; continue ;;
    13) echo "{\"id\": $id, \"error\": \"flaky backend\"}"; continue ;;
    17) echo "{\"id\": $id, \"reward\": 1e999}"; continue ;;
    19) head -c 300000 /dev/zero | tr '\0' 'x'; echo; continue ;;
    23) echo "{\"id\": $((id + 1)), \"reward\": 1}"; continue ;;
    29) kill -9 $$ ;;
  esac
  case $line in *'"text": "'[a-m]*) reward=1 ;; *) reward=0 ;; esac
  echo "{\"id\": $id, \"reward\": $reward}"
done
)";

// Protocol 2, with groups that are scored together. What goes wrong is chance.
constexpr const char* kAsker = R"(
import json, os, random, signal, sys, time
rng = random.Random(os.urandom(8))
members = {}
def write(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
def say(**message):
    write(json.dumps(message))
def ask(episode, id):
    say(type="sample", episode=episode, id=id, messages=[{"role": "user", "content": "q="}])
sys.stdin.readline()
say(type="hello", protocol=2, train=400, eval=50, scores_groups=True)
for line in sys.stdin:
    m = json.loads(line)
    if m["type"] == "episode":
        e = m["id"]
        if m["split"] == "train" and m["index"] % 40 == 5:
            say(type="error", episode=e, error="this prompt never works")
            continue
        chance = rng.randrange(300)
        if chance == 0: time.sleep(60)
        elif chance == 1: os._exit(3)
        elif chance == 2: os.kill(os.getpid(), signal.SIGKILL)
        elif chance == 3: write("this is no JSON")
        elif chance == 4: write("x" * 300000)
        elif chance < 8: say(type="error", episode=e, error="flaky backend")
        elif chance < 11: say(type="done", episode=e, reward=float("inf"))
        elif chance < 14: say(type="done", episode=e + 1, reward=1)
        elif chance < 17: continue
        elif chance < 20: [ask(e, "x%d" % i) for i in range(40)]
        ask(e, "1")
    elif m["type"] == "sampled" and m["id"] == "1":
        text = m["reply"]["text"]
        say(type="done", episode=m["episode"], info={"text": text}, metrics={"letters": len(text)})
    elif m["type"] == "score_group":
        rewards = [float(x["info"]["text"][:1] < "m") for x in m["episodes"]]
        chance = rng.randrange(40)
        if chance == 0: say(type="scores", id=m["id"], rewards=rewards[1:])
        elif chance == 1: say(type="scores", id=m["id"], error="no scorer")
        else: say(type="scores", id=m["id"], rewards=rewards)
)";

constexpr const char* kConfig = R"(
seed = 11
)" LEEWAY_TINY_MODEL R"([trainer]
learning_rate = 1e-3
warmup_steps = 0
[orchestrator]
prompts_per_batch = 8
group_size = 4
max_off_policy_steps = 2
min_group_size = 2
max_prompt_failures = 2
retry_backoff = 0.01
rollout_timeout = 20
[rollout]
max_new_tokens = 6
stop = "\n"
[eval]
prompts = 4
greedy = false
[output]
rollouts_every = 1
rollouts_groups = 0
[checkpoint]
every = 2
[[environment]]
name = "sort"
min_length = 2
max_length = 3
[[environment]]
name = "process"
id = "judge"
weight = 3
data = "prompts.jsonl"
command = "sh judge.sh"
processes = 6
turn_timeout = 0.3
max_output_bytes = 100000
[[environment]]
name = "process"
id = "asker"
weight = 3
command = "exec python3 asker.py"
processes = 3
turn_timeout = 3
max_output_bytes = 100000
)";

class Chaos : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    folder_.write("judge.sh", kJudge);
    folder_.write("asker.py", kAsker);
    folder_.write("run.toml", kConfig);
    std::string prompts;
    for (int i = 0; i < 400; ++i) {
      prompts += "{\"prompt\": \"" + std::to_string(i) + "=\"" +
                 (i % 40 == 5 ? ", \"poison\": true" : "") + "}\n";
    }
    folder_.write("prompts.jsonl", prompts);
  }
  std::vector<std::string> arguments(bool resume) const {
    std::vector<std::string> args = {"train"};
    if (resume) {
      args.insert(args.end(), {"--resume", "run"});
    } else {
      args.insert(args.end(), {"run.toml", "--set", "output_dir=run", "--set",
                               "trainer.max_steps=" + std::to_string(steps_), "--set",
                               "orchestrator.schedule=" + GetParam()});
    }
    args.push_back("--json");
    return args;
  }
  // Starts the program and kills it after a while unless it ends first; returns whether it was
  // killed.
  bool run_and_kill(bool resume, std::chrono::milliseconds after) const {
    const pid_t child = ::fork();
    if (child == 0) {
      if (::chdir(folder_.path().c_str()) != 0) ::_exit(126);
      const int null = ::open("/dev/null", O_WRONLY);
      ::dup2(null, STDOUT_FILENO);
      ::dup2(null, STDERR_FILENO);
      std::vector<std::string> words = arguments(resume);
      words.insert(words.begin(), leeway_program());
      std::vector<char*> argv;
      for (std::string& word : words) argv.push_back(word.data());
      argv.push_back(nullptr);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    const auto end = std::chrono::steady_clock::now() + after;
    int status = 0;
    while (std::chrono::steady_clock::now() < end) {
      if (::waitpid(child, &status, WNOHANG) == child) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    ::kill(child, SIGKILL);
    ::waitpid(child, &status, 0);
    return true;
  }

  // Whether there is a run with a checkpoint. A run killed before its first checkpoint is deleted.
  bool can_go_on() const {
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(folder_ / "run/checkpoints", none)) {
      if (entry.path().filename().string().starts_with("step_")) return true;
    }
    fs::remove_all(folder_ / "run");
    return false;
  }

  TempFolder folder_;
  const int64_t steps_ = setting("LEEWAY_CHAOS_STEPS", 24);
  const int64_t kills_ = setting("LEEWAY_CHAOS_KILLS", 5);
};

TEST_P(Chaos, EndsWithEveryRolloutAccountedFor) {
  Rng rng(17);
  int64_t kills = 0;
  for (; kills < kills_; ++kills) {
    const auto after = std::chrono::milliseconds(300 + rng.below(1500));
    if (!run_and_kill(can_go_on(), after)) break;
  }
  const RunResult result =
      run_program(arguments(can_go_on()),
                  {.directory = folder_.path().string(), .time_limit = std::chrono::seconds(600)});
  ASSERT_EQ(result.code, 0) << result;
  const Document summary = json_of(result.out);
  EXPECT_STREQ(summary["end"].GetString(), "finished");
  EXPECT_EQ(summary["steps"].GetDouble(), static_cast<double>(steps_));
  const Json& account = summary["account"];
  double sum = 0.0;
  for (const char* key :
       {"trained", "filtered", "stale", "dropped", "waiting", "failed", "cancelled", "running"}) {
    sum += account[key].GetDouble();
  }
  EXPECT_EQ(account["admitted"].GetDouble(), sum) << result.out;
  EXPECT_GT(account["failed"].GetDouble(), 0.0);

  // Every step occurs once, no group twice, and prompts that never work were given up with a
  // reason.
  std::set<double> steps, groups;
  std::set<std::string> kinds;
  for (const std::string& line : lines_of(read_file(folder_ / "run/metrics.jsonl"))) {
    const Document row = json_of(line);
    EXPECT_TRUE(steps.insert(row["step"].GetDouble()).second);
    for (const auto& member : row.GetObject()) {
      const std::string name = member.name.GetString();
      if (name.starts_with("failures/")) kinds.insert(name);
    }
    double parts = 0.0;
    for (const char* key :
         {"running", "failed", "cancelled", "trained", "filtered", "stale", "dropped", "waiting"}) {
      parts += row[(std::string("account/") + key).c_str()].GetDouble();
    }
    EXPECT_EQ(row["account/admitted"].GetDouble(), parts) << line;
  }
  EXPECT_EQ(steps.size(), static_cast<size_t>(steps_));
  for (int64_t step = 1; step <= steps_; ++step) {
    std::set<double> own;
    const std::string file = "run/rollouts/step_" + std::to_string(step) + ".jsonl";
    for (const std::string& line : lines_of(read_file(folder_ / file))) {
      own.insert(json_of(line)["group"].GetDouble());
    }
    for (const double group : own) EXPECT_TRUE(groups.insert(group).second) << "trained twice";
  }
  EXPECT_EQ(groups.size(), static_cast<size_t>(8 * steps_));
  for (const char* kind : {"failures/bad_answer", "failures/environment_error"}) {
    EXPECT_TRUE(kinds.contains(kind)) << kind;
  }
  // Hanging turns show up as timeouts. In the free schedule they may be cancelled as stale before.
  const bool cancelled = GetParam() == "free" && account["cancelled"].GetDouble() > 0.0;
  EXPECT_TRUE(kinds.contains("failures/timeout") || cancelled) << result.out;
  EXPECT_TRUE(contains(read_file(folder_ / "run/log.txt"), "going down"));  // the judge's stderr
  const RunResult report = run_program({"report", "run"}, {.directory = folder_.path().string()});
  EXPECT_EQ(report.code, 0) << report;
  std::printf(
      "%s: %lld steps, %lld kills; admitted %.0f = trained %.0f + filtered %.0f + stale "
      "%.0f + dropped %.0f + waiting %.0f + failed %.0f + cancelled %.0f + running %.0f\n",
      GetParam().c_str(), static_cast<long long>(steps_), static_cast<long long>(kills),
      account["admitted"].GetDouble(), account["trained"].GetDouble(),
      account["filtered"].GetDouble(), account["stale"].GetDouble(), account["dropped"].GetDouble(),
      account["waiting"].GetDouble(), account["failed"].GetDouble(),
      account["cancelled"].GetDouble(), account["running"].GetDouble());
}

INSTANTIATE_TEST_SUITE_P(Schedules, Chaos, ::testing::Values("lockstep", "free"),
                         [](const auto& schedule) { return schedule.param; });

}  // namespace
}  // namespace leeway
