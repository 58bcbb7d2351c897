// Files that the system refuses to open, and threads and memory that it refuses to provide: each
// command names the path and the reason.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "cli_helpers.h"
#include "tiny_model.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

const std::string kModel = LEEWAY_SOURCE_DIR "/tests/data/hf/qwen3-tied";
const std::string kExamples = LEEWAY_SOURCE_DIR "/examples/";

constexpr const char* kConfig = LEEWAY_TINY_MODEL R"([trainer]
max_steps = 2
[orchestrator]
prompts_per_batch = 2
group_size = 2
[rollout]
max_new_tokens = 4
stop = "\n"
[eval]
prompts = 2
samples = 1
[[environment]]
name = "sort"
)";

// Root reads every file thanks to two capabilities. Programs started after this have neither.
void give_up_roots_powers() {
  if (::geteuid() != 0) return;
  for (const int power : {CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH}) {
    if (::prctl(PR_CAPBSET_DROP, power) != 0) ::_exit(125);
  }
}

// Every command, with one of its paths replaced by PATH.
std::vector<std::vector<std::string>> commands(const TempFolder& folder) {
  const std::string config = folder.write("config.toml", kConfig);
  const std::string tokens = kExamples + "tokens.json", batch = kExamples + "batch.json";
  const std::string conversation = kExamples + "conversation.json";
  return {
      {"train", "PATH"},
      {"train", config, "--set", "output_dir=PATH"},
      {"train", config, "--set", "sft.data=PATH"},
      {"train", "--resume", "PATH"},
      {"sft", "PATH"},
      {"config", "PATH"},
      {"report", "PATH"},
      {"eval", "PATH"},
      {"eval", config, "--weights", "PATH"},
      {"sweep", "PATH"},
      {"loss", "eval", "--preset", "is", "--batch", "PATH"},
      {"loss", "eval", "--config", "PATH", "--batch", batch},
      {"loss", "compare", "--batch", "PATH"},
      {"loss", "compare", "--batch", batch, "--html", "PATH/page.html"},
      {"loss", "check", "PATH"},
      {"tokenize", "--tokenizer", "PATH"},
      {"render", "--renderer", "qwen3", "--input", "PATH"},
      {"render", "--renderer", "qwen3", "--input", conversation, "--tokenizer", "PATH"},
      {"trajectory", "PATH"},
      {"init", "--config", "PATH", "--output", folder / "fresh"},
      {"init", "--config", kModel + "/config.json", "--output", "PATH"},
      {"convert", "PATH", folder / "converted"},
      {"convert", kModel, "PATH/model.gguf", "--no-tokenizer"},
      {"logprobs", "--model", "PATH", "--tokens", tokens},
      {"logprobs", "--model", kModel, "--tokens", "PATH"},
      {"generate", "--model", "PATH", "--tokens", tokens, "--max-new-tokens", "1"},
      {"generate", "--model", kModel, "--tokens", "PATH", "--max-new-tokens", "1"},
  };
}

// Runs every command on `path`: exit 2, and a message with the path and the reason.
void expect_refusals(const std::string& path, const std::string& reason) {
  const TempFolder folder;
  for (std::vector<std::string> args : commands(folder)) {
    for (std::string& arg : args) {
      if (const size_t at = arg.find("PATH"); at != std::string::npos) arg.replace(at, 4, path);
    }
    SCOPED_TRACE(fmt::format("{}", fmt::join(args, " ")));
    expect_mistake(
        run_program(args, {.directory = folder.path().string(), .in_child = give_up_roots_powers}),
        {path, reason});
  }
}

TEST(Paths, WithoutPermissionAreNamed) {
  const TempFolder folder;
  const std::string closed = folder / "closed";
  fs::create_directory(closed);
  folder.write("closed/there", kBatch);
  fs::permissions(closed, fs::perms::none);
  expect_refusals(closed + "/there", "Permission denied");
  fs::permissions(closed, fs::perms::owner_all);
}

TEST(Paths, OfFilesWithoutPermissionAreNamed) {
  const TempFolder folder;
  const std::string file = folder.write("closed", kBatch);
  fs::permissions(file, fs::perms::none);
  const RunOptions options{.in_child = give_up_roots_powers};
  expect_mistake(run_program({"loss", "eval", "--preset", "is", "--batch", file}, options),
                 {file, "Permission denied"});
  expect_mistake(run_program({"config", file}, options), {file, "Permission denied"});
}

TEST(Paths, ThatAreTooLongAreNamed) {
  expect_refusals(std::string(300, 'n'), "File name too long");
}

TEST(Paths, ThatLeadToThemselvesAreNamed) {
  const TempFolder folder;
  fs::create_symlink("loop", folder / "loop");
  expect_refusals(folder / "loop", "Too many levels of symbolic links");
}

TEST(Paths, OfASweepsResultsAreNamed) {
  const TempFolder folder;
  fs::create_symlink("loop", folder / "loop");
  folder.write("config.toml", kConfig);
  const std::string tail =
      "seeds = [1]\n[[table]]\nname = \"t\"\n[[table.row]]\nname = \"r\"\nset = "
      "[\"trainer.epochs=1\"]\n";
  for (const std::string& bad : {folder / "loop", std::string(300, 'n')}) {
    const std::string sweep = folder.write(
        "sweep.toml", fmt::format("base = \"config.toml\"\noutput_dir = \"{}\"\n{}", bad, tail));
    expect_mistake(run_program({"sweep", sweep}), {bad});
    const std::string base = folder.write(
        "base.toml", fmt::format("base = \"{}\"\noutput_dir = \"out\"\n{}", bad, tail));
    expect_mistake(run_program({"sweep", base}), {bad});
  }
}

// A stack size that fits no address space, so that every thread is refused, even for root.
void refuse_threads() {
  const rlimit limit{rlim_t{1} << 60, RLIM_INFINITY};
  if (::setrlimit(RLIMIT_STACK, &limit) != 0) ::_exit(125);
}

TEST(Threads, ThatTheSystemRefusesAreTheUsersLimit) {
  const TempFolder folder;
  const std::string config = folder.write("config.toml", kConfig);
  const std::string tokens = kExamples + "tokens.json";
  const RunOptions options{.directory = folder.path().string(), .in_child = refuse_threads};
  const std::vector<std::string> words = {"cannot start a thread",
                                          "Resource temporarily unavailable", "ulimit -u"};
  expect_mistake(
      run_program({"logprobs", "--model", kModel, "--tokens", tokens, "--threads", "3"}, options),
      words);
  expect_mistake(run_program({"generate", "--model", kModel, "--tokens", tokens, "--max-new-tokens",
                              "1", "--threads", "3"},
                             options),
                 words);
  // A run in progress stops and reports the same.
  const RunResult run = run_program({"train", config, "--set", "trainer.threads=3"}, options);
  EXPECT_EQ(run.code, 3) << run;
  for (const std::string& word : words) EXPECT_TRUE(contains(run.err, word)) << run;
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they abort the program

TEST(Memory, ThatTheSystemRefusesIsNotTheUsersMistake) {
  const TempFolder folder;
  const std::string large = folder.write("large", "");
  fs::resize_file(large, uintmax_t{1} << 40);  // a sparse file: takes no space on the disk
  const auto limit_memory = [] {
    const rlimit limit{rlim_t{1} << 33, rlim_t{1} << 33};
    if (::setrlimit(RLIMIT_AS, &limit) != 0) ::_exit(125);
  };
  for (const std::vector<std::string>& args : std::vector<std::vector<std::string>>{
           {"train", large}, {"config", large}, {"loss", "compare", "--batch", large}}) {
    const RunResult result = run_program(args, {.in_child = limit_memory});
    EXPECT_EQ(result.code, 3) << result;
    EXPECT_EQ(result.out, "");
    EXPECT_TRUE(contains(result.err, "out of memory")) << result;
    EXPECT_FALSE(contains(result.err, "too large")) << result;
  }
  const std::string config = folder.write("config.toml", kConfig);
  const RunResult model = run_program({"train", config, "--set", "model.hidden_size=1048576",
                                       "--set", "model.intermediate_size=1048576"},
                                      {.in_child = limit_memory});
  EXPECT_EQ(model.code, 3) << model;
  EXPECT_TRUE(contains(model.err, "no memory for") && contains(model.err, "GiB")) << model;
}

#endif

}  // namespace
}  // namespace leeway
