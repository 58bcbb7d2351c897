// `leeway train` with a program that asks for samples: protocol 2 of `process` environments.

#include <gtest/gtest.h>

#include "base/files.h"
#include "cli_helpers.h"
#include "tiny_model.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

// Two calls of one conversation and one of another context, which is not trained. The first
// argument: "scores" if groups are scored together, "credit" if the first two calls have rewards.
constexpr const char* kProgram = R"(
import json, random, sys
def say(**message):
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()
def user(content):
    return {"role": "user", "content": content}
scores = sys.argv[1] == "scores"
episodes = {}
sys.stdin.readline()
say(type="hello", protocol=2, train=None, eval=20, scores_groups=scores)
for line in sys.stdin:
    m = json.loads(line)
    if m["type"] == "episode":
        number = random.Random(m["seed"]).randrange(9)
        episodes[m["id"]] = {"messages": [user("%d?" % number)], "reward": 0.0}
        say(type="sample", episode=m["id"], id="1", messages=episodes[m["id"]]["messages"])
    elif m["type"] == "sampled":
        e = episodes[m["episode"]]
        text = m["reply"]["text"]
        e["reward"] += sum(c < "m" for c in text) / 10
        if m["id"] == "1":
            e["messages"] += [m["message"], user("sure?")]
            say(type="sample", episode=m["episode"], id="2", messages=e["messages"])
        elif m["id"] == "2":
            say(type="sample", episode=m["episode"], id="judge", messages=[user("good?")],
                max_new_tokens=3, train=False)
        else:
            del episodes[m["episode"]]
            end = {"info": {"reward": e["reward"]}} if scores else {"reward": e["reward"]}
            if sys.argv[1] == "credit": end["turn_rewards"] = {"1": 0.5, "2": len(text) / 8}
            say(type="done", episode=m["episode"], metrics={"letters": len(text)}, **end)
    elif m["type"] == "score_group":
        rewards = [x["info"]["reward"] for x in m["episodes"]]
        say(type="scores", id=m["id"], rewards=[{"best": float(r == max(rewards))} for r in rewards])
)";

class AskingTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (run_program({"-c", "1"}, {.program = "python3"}).code != 0) {
      GTEST_SKIP() << "there is no python3";
    }
    folder_.write("program.py", kProgram);
  }
  RunResult train(const std::string& run, const std::string& argument, const char* more = "") {
    std::string config = R"(
seed = 3
)" LEEWAY_TINY_MODEL R"([trainer]
max_steps = 3
[orchestrator]
prompts_per_batch = 3
group_size = 4
max_turns = 4
schedule = "lockstep"
[orchestrator.renderer]
name = "qwen3"
[rollout]
max_new_tokens = 5
[eval]
prompts = 4
greedy = false
[output]
rollouts_every = 1
rollouts_groups = 0
[[environment]]
name = "process"
id = "asker"
processes = 2
turn_timeout = 60
)";
    // Control tokens come after the 256 bytes, and three turns need more positions.
    for (const std::string key : {"vocab_size = 128\n", "max_position_embeddings = 48\n"}) {
      config.erase(config.find(key), key.size());
    }
    config.insert(config.find("[trainer]"), "max_position_embeddings = 256\n");
    folder_.write("run.toml",
                  config + "command = \"exec python3 program.py " + argument + "\"\n" + more);
    return run_program({"train", "run.toml", "--json", "--set", "output_dir=" + run},
                       {.directory = folder_.path().string()});
  }
  TempFolder folder_;
};

TEST_F(AskingTest, ALockstepRunIsRepeatedBitForBit) {
  for (const char* argument : {"rewards", "scores"}) {
    for (const char* run : {"one", "two"}) {
      fs::remove_all(folder_ / run);
      const RunResult result = train(run, argument);
      ASSERT_EQ(result.code, 0) << result;
      const Document summary = json_of(result.out);
      EXPECT_EQ(summary["account"]["admitted"].GetDouble(), 36.0);
      EXPECT_EQ(summary["account"]["failed"].GetDouble(), 0.0);
    }
    for (const char* file :
         {"rollouts/step_1.jsonl", "rollouts/step_3.jsonl", "weights/step_3/model.safetensors"}) {
      const std::string one = read_file(folder_ / (std::string("one/") + file));
      EXPECT_FALSE(one.empty());
      EXPECT_EQ(one, read_file(folder_ / (std::string("two/") + file))) << file;
    }
    const Document row = json_of(lines_of(read_file(folder_ / "one/metrics.jsonl")).front());
    EXPECT_EQ(row["turns/all/mean"].GetDouble(), 3.0);
    EXPECT_GE(row["samples_per_rollout"].GetDouble(), 2.0);  // the judge's is one of its own
    EXPECT_TRUE(row.HasMember("env_metrics/asker/letters/mean"));
    const bool scores = std::string(argument) == "scores";
    EXPECT_EQ(row.HasMember("reward/asker/best"), scores);
  }
}

TEST_F(AskingTest, RolloutsHaveWhatTheProgramSaidOfThem) {
  const RunResult result = train("run", "credit");
  ASSERT_EQ(result.code, 0) << result;
  const std::string file = folder_ / "run/rollouts/step_2.jsonl";
  const std::vector<std::string> lines = lines_of(read_file(file));
  ASSERT_EQ(lines.size(), 12u);
  double letters = 0.0;
  std::string old_file;
  for (const std::string& line : lines) {
    Document rollout = json_of(line);
    const double own = rollout["env_metrics"]["letters"].GetDouble();
    letters += own / 12.0;
    ASSERT_EQ(rollout["turn_rewards"].Size(), 3u) << line;
    EXPECT_EQ(rollout["turn_rewards"][0].GetDouble(), 0.5);
    EXPECT_EQ(rollout["turn_rewards"][1].GetDouble(), own / 8.0);
    EXPECT_TRUE(rollout["turn_rewards"][2].IsNull());
    EXPECT_NEAR(rollout["reward"].GetDouble(),
                rollout["rewards"]["reward"].GetDouble() + 0.5 + own / 8.0, 1e-9);
    for (const auto& sample : rollout["samples"].GetArray()) {
      EXPECT_EQ(sample["advantages"].Size(), sample["ids"].Size());
    }
    for (const char* key : {"env_metrics", "turn_rewards"}) rollout.RemoveMember(key);
    for (auto& sample : rollout["samples"].GetArray()) sample.RemoveMember("advantages");
    old_file += text_of(rollout) + "\n";
  }
  const Document row = json_of(lines_of(read_file(folder_ / "run/metrics.jsonl"))[1]);
  EXPECT_NEAR(letters, row["env_metrics/asker/letters/mean"].GetDouble(), 1e-9);
  // Files of earlier versions have none of this.
  for (const bool old : {false, true}) {
    if (old) write_file_atomically(file, old_file);
    for (const std::vector<std::string>& command :
         {std::vector<std::string>{"loss", "compare", "--run", "run", "--step", "2"},
          std::vector<std::string>{"report", "run"}}) {
      const RunResult read = run_program(command, {.directory = folder_.path().string()});
      EXPECT_EQ(read.code, 0) << read;
    }
  }
}

TEST_F(AskingTest, WithoutDataTheProgramMustHaveExamples) {
  ASSERT_EQ(train("run", "rewards").code, 0);
  folder_.write("judge.sh", "read -r hello; echo '{\"type\": \"hello\", \"protocol\": 1}'; cat\n");
  for (const auto& [command, words] : std::vector<std::pair<std::string, std::string>>{
           {"sh judge.sh", "speaks protocol 1"}, {"exit 3", "exit status 3"}}) {
    const RunResult result = run_program({"train", "run.toml", "--set", "output_dir=other", "--set",
                                          "environment.0.command=" + command},
                                         {.directory = folder_.path().string()});
    EXPECT_EQ(result.code, 2) << result;
    EXPECT_TRUE(contains(result.err, "data is missing")) << result.err;
    EXPECT_TRUE(contains(result.err, command)) << result.err;
    EXPECT_TRUE(contains(result.err, words)) << result.err;
  }
  const RunResult both = train("third", "rewards", "eval_data = \"x.jsonl\"\n");
  EXPECT_EQ(both.code, 2) << both;
  EXPECT_TRUE(contains(both.err, "eval_data")) << both.err;
}

}  // namespace
}  // namespace leeway
