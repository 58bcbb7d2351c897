// What the program tells a user who waits: help, the progress of a sweep, how to continue a run,
// what a number means.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include "cli_helpers.h"
#include "tiny_model.h"

namespace leeway {
namespace {

constexpr const char* kConfig = R"(output_dir = "a run"
)" LEEWAY_TINY_MODEL R"([sft]
max_steps = 1
batch_size = 2
[trainer]
max_steps = 100000
[orchestrator]
prompts_per_batch = 2
group_size = 2
[rollout]
max_new_tokens = 4
stop = "\n"
[eval]
prompts = 2
samples = 2
[output]
rollouts_every = 0
[[environment]]
name = "sort"
min_length = 1
max_length = 2
)";

TEST(Help, IsACommandToo) {
  for (const std::vector<std::string>& words : std::vector<std::vector<std::string>>{
           {}, {"train"}, {"loss"}, {"loss", "eval"}, {"sweep"}, {"help"}}) {
    std::vector<std::string> option = words, command = words;
    option.push_back("--help");
    command.insert(command.begin(), "help");
    const RunResult by_command = run_program(command);
    expect_quiet_success(by_command);
    EXPECT_EQ(by_command.out, run_program(option).out);
  }
  const RunResult train = run_program({"help", "train"});
  EXPECT_TRUE(contains(train.out, "--resume")) << train;
  const RunResult all = run_program({"help"});
  for (const char* name : {"train", "eval", "sweep", "help"}) {
    EXPECT_TRUE(contains(all.out, name)) << all;
  }
}

TEST(Help, OnNoCommandNamesTheNearest) {
  expect_mistake(run_program({"help", "trian"}), {"trian", "did you mean train?"});
  expect_mistake(run_program({"help", "loss", "evil"}), {"evil", "did you mean eval?"});
}

TEST(Eval, SaysWhatPassAtKMeans) {
  const TempFolder folder;
  const std::string config = folder.write("config.toml", kConfig);
  const RunResult result = run_program({"eval", config});
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.out, "pass@2")) << result;
  EXPECT_TRUE(contains(result.out, "pass@k  probability that at least one of k answers")) << result;
}

// Runs `start` in the background with the program as $LEEWAY; sends SIGTERM once `seen` holds.
RunResult stopped(const TempFolder& folder, const std::string& start, const std::string& seen) {
  const std::string script = fmt::format(
      "LEEWAY='{}'\n{} >out 2>err & P=$!\n"
      "until {}; do kill -0 $P 2>/dev/null || exit 99; sleep 0.02; done\n"
      "kill -TERM $P; wait $P",
      leeway_program(), start, seen);
  return run_program({"-c", script}, {.directory = folder.path().string(), .program = "sh"});
}

TEST(Sweep, SaysHowFarItIs) {
  const TempFolder folder;
  folder.write("config.toml", kConfig);
  folder.write("sweep.toml",
               "base = \"config.toml\"\noutput_dir = \"sweep\"\nseeds = [1, 2]\n[[table]]\n"
               "name = \"t\"\n[[table.row]]\nname = \"r\"\nset = [\"trainer.max_steps=50000\"]\n");
  const RunResult result = stopped(folder, "\"$LEEWAY\" sweep sweep.toml --jobs 1",
                                   "grep -q 'runs/[a-z]*, .* left' err");
  EXPECT_EQ(result.code, 130) << result;
  const std::string err = file_text(folder / "err");
  EXPECT_TRUE(contains(err, "0/2 runs done, 1 running, ")) << err;
}

TEST(Train, SaysHowARunThatStoppedGoesOn) {
  const TempFolder folder;
  folder.write("config.toml", kConfig);
  const RunResult result =
      stopped(folder, "\"$LEEWAY\" train config.toml", "[ -s 'a run/metrics.jsonl' ]");
  EXPECT_EQ(result.code, 0) << result;
  const std::string err = file_text(folder / "err");
  const std::string words = "to continue:  leeway ";
  ASSERT_TRUE(contains(err, words + "train --resume 'a run'\n")) << err;
  // The printed command works as it is.
  const RunResult again =
      stopped(folder, "\"$LEEWAY\" train --resume 'a run'", "grep -q 'resumed from step' err");
  EXPECT_EQ(again.code, 0) << again;
}

TEST(Train, SaysHowARunThatGaveUpGoesOn) {
  const TempFolder folder;
  folder.write("config.toml", kConfig);
  // After some hundred steps metrics.jsonl hits its size limit.
  const auto limit_files = [] {
    const rlimit limit{1 << 20, 1 << 20};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(125);
  };
  const RunResult result = run_program(
      {"train", "config.toml"}, {.directory = folder.path().string(), .in_child = limit_files});
  EXPECT_EQ(result.code, 3) << result;
  EXPECT_TRUE(contains(result.err, "to continue:  leeway train --resume 'a run'")) << result;
}

}  // namespace
}  // namespace leeway
