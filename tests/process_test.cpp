// `leeway train` with environments that are programs: those of examples/04_process, and faulty
// ones.

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
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
prompts = 4
greedy = false
)";

// Says hello and runs `body` for every request, with $line and $id set.
std::string answering(const std::string& body) {
  return R"(read -r hello; echo '{"type": "hello", "protocol": 1}'
while read -r line; do id=${line#*'"id": '}; id=${id%%,*}
)" + body +
         "\ndone\n";
}

const std::string kHalf = answering(R"(echo "{\"id\": $id, \"reward\": $((id % 2))}")");

class ProcessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string lines, conversations;
    for (char c = 'a'; c <= 'z'; ++c) {
      lines += std::string("{\"prompt\": \"") + c + "=\", \"answer\": \"x\"}\n";
      conversations += std::string(R"({"prompt": [{"role": "system", "content": "s"}, )") +
                       R"({"role": "user", "content": ")" + c + "\"}]}\n";
    }
    folder_.write("data.jsonl", lines);
    folder_.write("conversations.jsonl", conversations);
  }
  // The table of an environment whose program is `script`.
  std::string table(const std::string& id, const std::string& script,
                    const std::string& more = "turn_timeout = 10\n") const {
    folder_.write(id + ".sh", script);
    return "[[environment]]\nname = \"process\"\nid = \"" + id +
           "\"\ndata = \"data.jsonl\"\ncommand = \"sh " + id + ".sh\"\n" + more;
  }
  RunResult train(const std::string& tables, const std::vector<std::string>& sets = {}) const {
    fs::remove_all(folder_.path() / "run");
    std::string config = kRun + tables;
    if (contains(tables, "renderer")) {  // its control tokens come after the 256 bytes
      const std::string key = "vocab_size = 128\n";
      config.erase(config.find(key), key.size());
    }
    folder_.write("run.toml", config);
    std::vector<std::string> args = {"train", "run.toml", "--json"};
    for (const std::string& set : sets) args.insert(args.end(), {"--set", set});
    return run_program(args, {.directory = folder_.path().string()});
  }
  // The sum over all steps.
  double sum(const std::string& metric) const {
    double total = 0.0;
    for (const std::string& line : lines_of(read_file(folder_ / "run/metrics.jsonl"))) {
      const Document row = json_of(line);
      if (row.HasMember(metric.c_str())) total += row[metric.c_str()].GetDouble();
    }
    return total;
  }

  TempFolder folder_;
};

bool have_python() { return run_program({"-c", "1"}, {.program = "python3"}).code == 0; }

RunResult train_example(const std::string& command, const std::string& run) {
  return run_program({"train", "examples/04_process/config.toml", "--json", "--set",
                      "output_dir=" + run, "--set", "environment.0.command=" + command, "--set",
                      "sft.max_steps=10", "--set", "trainer.max_steps=3"},
                     {.directory = LEEWAY_SOURCE_DIR});
}

TEST_F(ProcessTest, TheExampleTrainsWithBothOfItsPrograms) {
  std::vector<std::string> commands = {"sh examples/04_process/judge.sh"};
  if (have_python()) commands.push_back("python3 examples/04_process/judge.py");
  for (const std::string& command : commands) {
    fs::remove_all(folder_.path() / "run");
    const RunResult result = train_example(command, folder_ / "run");
    ASSERT_EQ(result.code, 0) << result;
    const Document summary = json_of(result.out);
    EXPECT_EQ(summary["steps"].GetDouble(), 3.0);
    EXPECT_EQ(summary["account"]["failed"].GetDouble(), 0.0);
    const bool python = command.starts_with("python3");
    for (const char* part : {"exact", "beginning", "reward"}) {
      const Document row = json_of(lines_of(read_file(folder_ / "run/metrics.jsonl")).front());
      EXPECT_EQ(row.HasMember((std::string("reward/letters/") + part).c_str()),
                python == (std::string(part) != "reward"))
          << part;
    }
  }
}

TEST_F(ProcessTest, TheProgramsOfTheExampleAgree) {
  if (!have_python()) GTEST_SKIP() << "there is no python3";
  std::string requests = "{\"type\": \"hello\", \"protocol\": 1}\n";
  const std::vector<std::string> replies = {R"(cdefg\n)",
                                            R"(cdefg)",
                                            R"(cdeg\n)",
                                            R"()",
                                            R"(\n)",
                                            R"(c\"g\n)",
                                            R"(cdefg\\n)",
                                            R"(\\\")",
                                            R"(a\", \"content\": \"cdefg\n)",
                                            R"($(exit 1)`*\n)",
                                            R"(\u0000cdefg\n)",
                                            "\xc3\xa9",
                                            R"(cdefg\ncdefg\n)"};
  for (size_t i = 0; i < replies.size(); ++i) {
    requests += R"({"type": "turn", "id": )" + std::to_string(i) +
                R"(, "turn": 1, "example": {"prompt": "c-g=", "first": "c", "last": "g"}, )"
                R"("messages": [], "reply": {"text": ")" +
                replies[i] + R"(", "content": ")" + replies[i] +
                R"(", "truncated": false, "tool_calls": []}})"
                "\n";
  }
  const auto answers = [&](const std::string& program, const std::string& script) {
    return lines_of(run_program({LEEWAY_SOURCE_DIR "/examples/04_process/" + script},
                                {.input = requests, .program = program})
                        .out);
  };
  const std::vector<std::string> python = answers("python3", "judge.py"),
                                 shell = answers("sh", "judge.sh");
  ASSERT_EQ(python.size(), replies.size() + 1);
  ASSERT_EQ(shell.size(), replies.size() + 1);
  for (size_t i = 0; i < replies.size(); ++i) {
    const Document one = json_of(python[i + 1]), two = json_of(shell[i + 1]);
    EXPECT_EQ(one["rewards"]["exact"].GetDouble(), i == 0 ? 1.0 : 0.0) << replies[i];
    EXPECT_EQ(two["reward"].GetDouble(), i == 0 ? 1.0 : 0.0) << replies[i];
  }
}

TEST_F(ProcessTest, ABadProgramIsNamedWithWhatItDid) {
  struct Case {
    std::string script;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {"no-such-program-anywhere\n", {"exit status 127", "no-such-program-anywhere"}},
      {"echo the database is gone >&2; exit 3\n", {"exit status 3", "the database is gone"}},
      {"sleep 1000\n", {"environment.turn_timeout", "0.3 s"}},
      {"echo '{\"type\": \"hello\", \"protocol\": 7}'; sleep 1000\n",
       {"protocol \"7\"", "protocol 1"}},
      {"echo Welcome; sleep 1000\n", {"Welcome"}},
      {answering("echo \"{\\\"id\\\": $id, \\\"reward\\\": NaN}\""), {"NaN", "finite"}},
      {answering("echo \"{\\\"id\\\": $id, \\\"messages\\\": [{\\\"role\\\": \\\"user\\\", "
                 "\\\"content\\\": \\\"?\\\"}]}\""),
       {"orchestrator.renderer.name"}},
  };
  for (const Case& bad : cases) {
    const RunResult result = train(table("judge", bad.script, "turn_timeout = 0.3\n"));
    // A program that does not even say hello is refused before the run.
    EXPECT_EQ(result.code, contains(bad.script, "while read") ? 3 : 2) << bad.script << result;
    for (const std::string& word : bad.words) {
      EXPECT_TRUE(contains(result.err, word)) << "no \"" << word << "\" in: " << result.err;
    }
  }
}

TEST_F(ProcessTest, MistakesInTheTableAreNamed) {
  const std::string good = table("judge", kHalf);
  expect_mistake(train("[[environment]]\nname = \"process\"\ndata = \"data.jsonl\"\n"),
                 {"environment.0.command"});
  expect_mistake(train(good, {"environment.0.verifier=exact"}), {"environment.0.verifier"});
  expect_mistake(train(good, {"environment.0.data=absent.jsonl"}), {"absent.jsonl"});
  expect_mistake(train(good, {"environment.0.prompt_key=question"}), {"line 1", "question"});
  expect_mistake(train(good, {"environment.0.data=conversations.jsonl"}),
                 {"orchestrator.renderer.name"});
}

TEST_F(ProcessTest, OneBrokenEnvironmentOfThreeStopsNobody) {
  const std::string tables = "[[environment]]\nname = \"sort\"\nmin_length = 2\nmax_length = 3\n" +
                             table("half", kHalf) +
                             table("broken", answering("echo boom >&2; exit 3"));
  const RunResult result = train(
      tables, {"environment.2.turn_timeout=0.1", "orchestrator.max_error_reschedule_attempts=2"});
  ASSERT_EQ(result.code, 0) << result;
  const Document summary = json_of(result.out);
  EXPECT_EQ(summary["steps"].GetDouble(), 4.0);
  EXPECT_EQ(summary["account"]["trained"].GetDouble(), 4.0 * 8);
  const double failed = summary["account"]["failed"].GetDouble();
  EXPECT_GT(failed, 0.0);
  EXPECT_GT(sum("errored_rollouts/broken"), 0.0);
  EXPECT_LE(sum("errored_rollouts/broken"), failed);
  EXPECT_EQ(sum("errored_rollouts/half"), 0.0);
  EXPECT_EQ(sum("errored_rollouts/sort"), 0.0);
  EXPECT_GT(sum("dropped_groups/broken"), 0.0);
  EXPECT_GT(sum("reward/half/reward"), 0.0);
  EXPECT_EQ(sum("reward/broken/max"), 0.0);
  EXPECT_TRUE(contains(read_file(folder_ / "run/given_up.jsonl"), "broken"));
}

TEST_F(ProcessTest, AProgramMayGoOnWithMessages) {
  // The second turn refers to the first one's reply and the message after it.
  const std::string script = answering(R"(case $line in
  *'"turn": 1,'*) echo "{\"id\": $id, \"messages\": [{\"role\": \"user\", \"content\": \"again\"}]}" ;;
  *'"content": "again"'*) echo "{\"id\": $id, \"rewards\": {\"two\": $((id % 2))}}" ;;
  *) echo "{\"id\": $id, \"error\": \"no second message\"}" ;;
esac)");
  std::string tables = table("talk", script) + "[orchestrator.renderer]\nname = \"qwen3\"\n";
  const RunResult result = train(tables, {"environment.0.data=conversations.jsonl",
                                          "model.max_position_embeddings=512", "rollout.stop="});
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_EQ(json_of(result.out)["account"]["failed"].GetDouble(), 0.0);
  EXPECT_EQ(sum("turns/all/mean"), 4 * 2.0);
  EXPECT_GT(sum("reward/talk/two"), 0.0);
}

TEST_F(ProcessTest, NoProgramOutlivesARunHoweverItEnds) {
  const auto running = [](const std::string& mark) {
    int count = 0;
    for (const auto& entry : fs::directory_iterator("/proc")) {
      std::ifstream stream(entry.path() / "cmdline", std::ios::binary);
      std::string line;
      if (std::getline(stream, line)) count += contains(line, mark);
    }
    return count;
  };
  // What is killed is gone a moment later, on a busy machine a long one: up to five minutes.
  const auto left = [&](const std::string& mark) {
    for (int i = 0; i < 15000 && running(mark) > 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return running(mark);
  };
  const std::string mark = "outlives" + std::to_string(::getpid());
  // Ignores the end of its input and has a child in its own session: both must be killed.
  const std::string stubborn = "setsid sh -c 'while :; do sleep 0.05; done' " + mark +
                               " </dev/null >/dev/null 2>&1 &\n" + kHalf +
                               "while :; do sleep 0.05; done\n";
  ASSERT_EQ(train(table(mark, stubborn)).code, 0);
  EXPECT_EQ(left(mark), 0);
  // Killed in the middle: once a step is trained.
  const std::string script =
      "'" + leeway_program() +
      "' train run.toml --set trainer.max_steps=1000000 --set output_dir=killed & P=$!\n"
      "until [ -s killed/metrics.jsonl ]; do kill -0 $P || exit 99; sleep 0.02; done\n"
      "kill -KILL $P; wait $P";
  const RunResult killed =
      run_program({"-c", script}, {.directory = folder_.path().string(), .program = "sh"});
  EXPECT_EQ(killed.code, 128 + SIGKILL) << killed;
  EXPECT_EQ(left(mark), 0);
}

}  // namespace
}  // namespace leeway
