// Configurations as the program reads them: all problems at once, --unset, keys dropped because of
// --set, what paths are relative to, and files that are invalid or nested too deeply.

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "cli_helpers.h"
#include "tiny_model.h"

namespace leeway {
namespace {

constexpr const char* kRun = R"(
output_dir = "run"
)" LEEWAY_TINY_MODEL R"([trainer]
max_steps = 1
[orchestrator]
prompts_per_batch = 2
group_size = 2
[rollout]
max_new_tokens = 4
stop = "\n"
[eval]
prompts = 4
greedy = false
)";

const std::string kSort = "[[environment]]\nname = \"sort\"\nmin_length = 1\nmax_length = 2\n";

TEST(ConfigurationProblems, AreSaidAtOnceByEveryCommand) {
  const TempFolder folder;
  const std::string file =
      folder.write("run.toml",
                   "sead = 1\n[sft]\n[trainer]\nmax_steps = 0\n[rollout]\ntop_p = 2\n"
                   "[[environment]]\nname = \"sort\"\n");
  for (const char* command : {"config", "train", "sft", "eval"}) {
    SCOPED_TRACE(command);
    const RunResult result = run_program({command, file, "--set", "trainer.epochs=0"});
    expect_mistake(result,
                   {"4 problems", file + " line 1: sead", file + " line 4: trainer.max_steps",
                    file + " line 6: rollout.top_p", "--set trainer.epochs = 0"});
    EXPECT_EQ(lines_of(result.err).size(), 5u) << result;
  }
  const std::string sweep =
      folder.write("sweep.toml",
                   "base = \"run.toml\"\noutput_dir = \"o\"\nseeds = [1, 2]\n[[table]]\n"
                   "name = \"t\"\n[[table.row]]\nname = \"a\"\nset = [\"trainer.epoch=1\"]\n"
                   "[[table.row]]\nname = \"b\"\nset = [\"trainer.epochs=0\"]\n");
  expect_mistake(run_program({"sweep", sweep, "--dry-run"}),
                 {"5 problems", file + " line 1: sead", file + " line 4", file + " line 6",
                  sweep + " line 6: table t, row a: --set trainer.epoch = 1",
                  sweep + " line 9: table t, row b: --set trainer.epochs = 0"});
}

TEST(DryRun, ChecksAndShowsWhatARunWouldDoAndWritesNothing) {
  const TempFolder folder;
  const std::string file = folder.write("run.toml", kRun + kSort);
  const RunOptions here{.directory = folder.path().string()};
  const RunResult plan = run_program({"train", file, "--dry-run"}, here);
  ASSERT_EQ(plan.code, 0) << plan;
  for (const char* words :
       {"random weights: llama, ", " parameters\n", "device       cpu\n",
        "environment  sort (sort): prompts are generated\n", "loss         icepop\n",
        "1 of 2 prompts x 2 rollouts, up to 4 new tokens each", "memory       at least "}) {
    EXPECT_TRUE(contains(plan.out, words)) << words << " is not in " << plan;
  }
  const Document json = json_of(run_program({"train", file, "--dry-run", "--json"}, here).out);
  EXPECT_EQ(json["rollouts_per_step"].GetDouble(), 4.0);
  EXPECT_STREQ(json["environments"][0]["id"].GetString(), "sort");
  EXPECT_FALSE(std::filesystem::exists(folder / "run"));
  const auto refused = [&](const std::string& set, const std::vector<std::string>& words) {
    expect_mistake(run_program({"train", file, "--dry-run", "--set", set}, here), words);
  };
  refused("rollout.top_p=0.5", {"rollout.top_p", "truncated sampling"});
  // A number of ranks is checked, and none is started.
  EXPECT_EQ(run_program({"train", file, "--dry-run", "--ranks", "2"}, here).code, 0);
  expect_mistake(run_program({"train", file, "--dry-run", "--ranks", "3"}, here), {"3", "1, 2, 4"});
  refused("model.path=Qwen/Qwen3-0.6B", {"--set", "model.path"});
  expect_mistake(run_program({"train", folder.write("none.toml", kRun), "--dry-run"}, here),
                 {"[[environment]]"});
  const std::string echo =
      folder.write("echo.toml", std::string(kRun) +
                                    "[orchestrator.renderer]\nname = \"qwen3\"\n"
                                    "[[environment]]\nname = \"process\"\ncommand = \"false\"\n"
                                    "data = \"data.jsonl\"\n");
  expect_mistake(
      run_program({"train", echo, "--dry-run", "--set", "model.vocab_size=300"}, here),
      {echo + " line ", "environment.0.data = ", "there is no such file", folder / "data.jsonl"});
  folder.write("data.jsonl", "{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\n{\"prompt\": \"c\"}\n");
  expect_mistake(run_program({"train", echo, "--dry-run", "--set", "model.vocab_size=300"}, here),
                 {"environment process: its program does not work", "exit status 1"});
  EXPECT_FALSE(std::filesystem::exists(folder / "run"));
}

TEST(EvalCommand, SaysThatItEvaluatesRandomWeights) {
  const TempFolder folder;
  const std::string file = folder.write("run.toml", kRun + kSort);
  const RunResult result = run_program({"eval", file});
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "note: these are random weights")) << result;
  EXPECT_FALSE(contains(result.out, "random")) << result;
}

TEST(ConfigurationSet, WithoutAnEqualsSignIsSaidToHaveNone) {
  const TempFolder folder;
  const std::string file = folder.write("run.toml", kRun);
  for (const char* command : {"config", "train", "sft", "eval"}) {
    SCOPED_TRACE(command);
    expect_mistake(run_program({command, file, "--set", "foo"}), {"--set foo", "no \"=\""});
    expect_mistake(run_program({command, "--set", "foo"}), {"--set foo", "no \"=\""});
  }
  // A file after the assignments is accepted too.
  EXPECT_EQ(run_program({"config", "--set", "seed=3", file}).code, 0);
}

TEST(ConfigurationUnset, LeavesOutWhatTheFileHas) {
  const TempFolder folder;
  const std::string file =
      folder.write("run.toml", kRun + kSort + "[sft]\nmax_steps = 1\nbatch_size = 2\n");
  const RunResult dump = run_program({"config", "--unset", "sft", file, "--unset", "eval.prompts"});
  EXPECT_EQ(dump.code, 0) << dump;
  EXPECT_FALSE(contains(dump.out, "[sft]")) << dump;
  EXPECT_TRUE(contains(dump.out, "prompts = 256")) << dump;
  expect_mistake(run_program({"config", file, "--unset", "sftt"}),
                 {"--unset sftt", "did you mean sft?"});
  const RunResult train =
      run_program({"train", "run.toml", "--unset", "sft", "--json"}, {.directory = folder.path()});
  EXPECT_EQ(train.code, 0) << train;
  EXPECT_EQ(json_of(train.out)["sft_steps"].GetDouble(), 0.0);
  expect_mistake(run_program({"sft", file, "--unset", "sft"}), {"no [sft] table"});
  const RunResult example = run_program({"config", "--example", "--unset", "sft"});
  EXPECT_FALSE(contains(example.out, "[sft]")) << example;
}

TEST(ConfigurationSet, TakesKeysAlongWithANote) {
  const TempFolder folder;
  const std::string file =
      folder.write("run.toml", "[trainer.loss]\npreset = \"icepop\"\nicepop_ratio_low = 0.3\n");
  const RunResult result = run_program({"config", file, "--set", "trainer.loss.preset=ppo"});
  EXPECT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "note: --set trainer.loss.preset")) << result;
  EXPECT_TRUE(contains(result.err, "icepop_ratio_low = 0.3 (" + file + " line 3)")) << result;
  EXPECT_FALSE(contains(result.out, "icepop")) << result;
}

TEST(ConfigurationPaths, StartAtTheFileAndAreAbsoluteInTheRun) {
  const TempFolder folder;
  std::filesystem::create_directory(folder / "inner");
  folder.write("inner/prompts.jsonl",
               "{\"prompt\": \"a=\", \"answer\": \"b\"}\n"
               "{\"prompt\": \"c=\", \"answer\": \"d\"}\n");
  folder.write("inner/held_out.jsonl", "{\"prompt\": \"e=\", \"answer\": \"f\"}\n");
  folder.write("inner/run.toml", std::string(kRun) +
                                     "[[environment]]\nname = \"jsonl\"\n"
                                     "data = \"prompts.jsonl\"\neval_data = \"held_out.jsonl\"\n");
  const RunOptions here{.directory = folder.path()};
  const RunResult result = run_program({"train", "inner/run.toml"}, here);
  ASSERT_EQ(result.code, 0) << result;
  const std::string saved = run_program({"config", "run/config.toml"}, here).out;
  const std::string data =
      std::filesystem::canonical(folder.path()).string() + "/inner/prompts.jsonl";
  EXPECT_TRUE(contains(saved, "data = \"" + data + "\"")) << saved;
  EXPECT_TRUE(contains(saved, "output_dir = \"run\"")) << saved;
  EXPECT_TRUE(std::filesystem::exists(folder / "run/metrics.jsonl"));
}

TEST(ConfigurationFiles, ThatAreTooDeepAreRefused) {
  const TempFolder folder;
  const std::string batch = folder.write("batch.json", kBatch);
  std::string dots = "a";
  for (int i = 0; i < 50'000; ++i) dots += ".a";
  const std::string file = folder.write("deep.toml", "\n" + dots + " = 1\n");
  const std::vector<std::vector<std::string>> commands = {
      {"config", file},
      {"train", file},
      {"sweep", file},
      {"loss", "eval", "--config", file, "--batch", batch},
      {"render", "--config", file, "--input", batch}};
  for (const std::vector<std::string>& command : commands) {
    expect_mistake(run_program(command), {file + " line 2", "64 dots"});
  }
}

// Reading a pipe would block until it has a writer, and reading /dev/zero would never end.
TEST(ConfigurationFiles, ThatAreNoneAreRefused) {
  const TempFolder folder;
  const std::string pipe = folder / "pipe", socket_path = folder / "socket";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  ASSERT_LT(socket_path.size(), sizeof address.sun_path);
  socket_path.copy(address.sun_path, socket_path.size());
  ASSERT_EQ(::bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  const std::string batch = folder.write("batch.json", kBatch);
  const std::string jsonl = std::string(kRun) + "[[environment]]\nname = \"jsonl\"\ndata = \"";
  for (const std::string& path : {pipe, socket_path, std::string("/dev/zero")}) {
    SCOPED_TRACE(path);
    const std::string run = folder.write("run.toml", jsonl + path + "\"\n");
    const std::vector<std::vector<std::string>> commands = {
        {"config", path},
        {"train", path},
        {"train", run, "--set", "output_dir=" + folder / "run"},
        {"sweep", path},
        {"loss", "eval", "--preset", "icepop", "--batch", path},
        {"loss", "check", path},
        {"render", "--renderer", "qwen3", "--input", path},
        {"render", "--renderer", "qwen3", "--input", batch, "--tokenizer", path},
        {"trajectory", path},
        {"logprobs", "--model", folder / "m", "--tokens", path}};
    for (const std::vector<std::string>& command : commands) {
      SCOPED_TRACE(command[0]);
      const RunResult result = run_program(command, {.time_limit = std::chrono::seconds(60)});
      EXPECT_EQ(result.code, 2) << result;
      if (command[0] != "logprobs" && command[1] != run) {
        EXPECT_TRUE(contains(result.err, path + ": is not a regular file")) << result;
      }
    }
  }
  ::close(listener);
}

TEST(Seeds, ThatAreNegativeAreRefused) {
  const TempFolder folder;
  const std::string file = folder.write("run.toml", kRun);
  expect_mistake(run_program({"train", file, "--set", "seed=-1"}), {"--set seed = -1", "0 to"});
  for (const char* seed : {"-1", "-18446744073709551615"}) {
    expect_mistake(
        run_program({"init", "--config", file, "--output", folder / "m", "--seed", seed}),
        {"--seed", "negative"});
    expect_mistake(run_program({"generate", "--model", "m", "--tokens", "t", "--max-new-tokens",
                                "1", "--seed", seed}),
                   {"--seed", "negative"});
  }
}

}  // namespace
}  // namespace leeway
