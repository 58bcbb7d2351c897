// Closed standard streams, readers that disappear, terminals that hang up, file size limits, and
// text with terminal escapes: none of them ends or corrupts a run.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <thread>

#include "cli_helpers.h"
#include "tiny_model.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfig = R"(output_dir = "run"
)" LEEWAY_TINY_MODEL R"([trainer]
max_steps = 6
[orchestrator]
prompts_per_batch = 4
group_size = 4
[rollout]
max_new_tokens = 4
stop = "\n"
[eval]
prompts = 4
samples = 1
[checkpoint]
every = 2
[[environment]]
name = "sort"
min_length = 1
max_length = 2
)";

// Enough steps that a signal arrives before the last one.
const std::vector<std::string> kLong = {"--set", "trainer.max_steps=100000",
                                        "--set", "checkpoint.every=1000",
                                        "--set", "output.rollouts_every=0"};

class Streams : public ::testing::Test {
 protected:
  Streams() { folder_.write("config.toml", kConfig); }
  std::string path(const std::string& name) const { return folder_ / name; }
  RunOptions options() const { return {.directory = folder_.path().string()}; }
  // Every line of a file is JSON, one line per step, `count` in total.
  void expect_metrics(size_t count) const {
    const std::vector<std::string> lines = lines_of(file_text(path("run/metrics.jsonl")));
    EXPECT_EQ(lines.size(), count);
    for (const std::string& line : lines) EXPECT_TRUE(json_of(line).IsObject()) << line;
  }
  // Runs a shell script with the program as $LEEWAY.
  RunResult shell(const std::string& script) const {
    RunOptions in_shell = options();
    in_shell.program = "sh";
    return run_program({"-c", "LEEWAY='" + leeway_program() + "'\n" + script}, in_shell);
  }
  // Runs `$LEEWAY train` in the background, runs `then` after its third step with its pid in $P,
  // and waits.
  RunResult disturb(const std::string& start, const std::string& then) const {
    return shell(
        fmt::format("{} \"$LEEWAY\" train config.toml {} >out 2>err & P=$!\n"
                    "until [ \"$(wc -l < run/metrics.jsonl 2>/dev/null || echo 0)\" -ge 3 ]; do\n"
                    "  kill -0 $P 2>/dev/null || exit 99\n  sleep 0.02\ndone\n{}\nwait $P\n",
                    start, fmt::format("{}", fmt::join(kLong, " ")), then));
  }

  TempFolder folder_;
};

TEST_F(Streams, WhoseReaderGoesAwayDoNotEndARun) {
  const RunResult result =
      shell("{ \"$LEEWAY\" train config.toml; echo $? > code; } 2>&1 | head -1");
  EXPECT_TRUE(contains(result.out, "run folder run")) << result;
  // The summary could not be written; everything else exists.
  EXPECT_EQ(file_text(path("code")), "2\n");
  expect_metrics(6);
  EXPECT_TRUE(fs::exists(path("run/report.html")));
  EXPECT_TRUE(fs::exists(path("run/weights/step_6/config.json")));
  EXPECT_TRUE(contains(file_text(path("run/log.txt")), "step 6/6"));
}

TEST_F(Streams, OfPeopleThatGoAwayDoNotChangeTheResult) {
  const RunResult result =
      shell("{ \"$LEEWAY\" train config.toml --json > out; echo $? > code; } 2>&1 | head -1");
  EXPECT_EQ(result.code, 0) << result;
  EXPECT_EQ(file_text(path("code")), "0\n");
  EXPECT_EQ(std::string(json_of(file_text(path("out")))["end"].GetString()), "finished");
}

TEST_F(Streams, ThatWereClosedDoNotGetIntoFiles) {
  for (const std::vector<int>& closed :
       std::vector<std::vector<int>>{{0}, {1}, {2}, {0, 1, 2}, {1, 2}}) {
    fs::remove_all(path("run"));
    RunOptions without = options();
    without.in_child = [&] {
      for (const int stream : closed) ::close(stream);
    };
    const RunResult result = run_program({"train", "config.toml"}, without);
    const bool heard = closed.front() != 1 && closed.size() < 3;
    EXPECT_EQ(result.code, heard ? 0 : 2) << result;
    expect_metrics(6);
    for (const auto& entry : fs::recursive_directory_iterator(path("run"))) {
      if (!entry.is_regular_file() || entry.path().filename() == "log.txt") continue;
      EXPECT_FALSE(contains(file_text(entry.path()), "run folder run")) << entry.path();
    }
  }
}

TEST_F(Streams, ThatWereClosedGetNoResultAndSaySo) {
  for (const std::vector<std::string>& args : std::vector<std::vector<std::string>>{
           {"loss", "list"}, {"--help"}, {"--version"}, {"help", "train"}}) {
    RunOptions without = options();
    without.in_child = [] { ::close(STDOUT_FILENO); };
    expect_mistake(run_program(args, without), {"stdout", "Bad file descriptor"});
  }
  RunOptions without = options();
  without.in_child = [] { ::close(STDIN_FILENO); };
  expect_mistake(run_program({"loss", "eval", "--preset", "is", "--batch", "/dev/stdin"}, without),
                 {"/dev/stdin"});
}

TEST_F(Streams, HungUpTheRunIsSaved) {
  const RunResult result = disturb("", "kill -HUP $P; kill -HUP $P; sleep 0.3; kill -HUP $P");
  EXPECT_EQ(result.code, 0) << result << file_text(path("err"));
  EXPECT_TRUE(fs::exists(path("run/report.html")));
  EXPECT_TRUE(fs::exists(path("run/checkpoints")));
  EXPECT_TRUE(contains(file_text(path("err")), "leeway train --resume run"));
}

TEST_F(Streams, HungUpUnderNohupTheRunGoesOn) {
  // Ten more steps after the hang-up; then it is stopped normally.
  const RunResult result =
      disturb("nohup",
              "kill -HUP $P; N=$(wc -l < run/metrics.jsonl)\n"
              "until [ \"$(wc -l < run/metrics.jsonl)\" -ge $((N + 10)) ]; do\n"
              "  kill -0 $P 2>/dev/null || exit 98\n  sleep 0.02\ndone\nkill -TERM $P");
  EXPECT_EQ(result.code, 0) << result << file_text(path("err"));
}

TEST_F(Streams, OfALimitedSizeEndARunWithAReason) {
  RunOptions limited = options();
  limited.in_child = [] {
    const rlimit limit{20'000, 20'000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  };
  const RunResult result =
      run_program({"train", "config.toml", "--set", "trainer.max_steps=1000"}, limited);
  EXPECT_EQ(result.code, 3) << result;
  EXPECT_TRUE(contains(result.err, "File too large")) << result;
}

// ---------------------------------------------------------------------------------------------
// Text with terminal control sequences

// Contains no byte that a terminal interprets, except newlines and tabs.
bool is_tame(const std::string& text) {
  return std::none_of(
             text.begin(), text.end(),
             [](unsigned char c) { return (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f; }) &&
         !contains(text, "\xc2\x9b") && !contains(text, "\xe2\x80\xae");
}

const std::string kWild =
    "a\033]0;owned\007b\xc2\x9b"
    "2J\xe2\x80\xae"
    "c\rd\x7f\xff";

TEST_F(Streams, ShowNoRawControlCharactersOfNamesAndKeys) {
  for (const std::vector<std::string>& args : std::vector<std::vector<std::string>>{
           {"train", kWild},
           {"config", kWild},
           {"train", "config.toml", "--set", kWild + "=1"},
           {"train", "config.toml", "--set", "trainer.loss.preset=" + kWild},
           {"loss", "explain", kWild},
           {kWild},
           {"help", kWild},
           {"report", kWild},
           {"render", "--renderer", kWild, "--input", kWild}}) {
    const RunResult result = run_program(args, options());
    EXPECT_EQ(result.code, 2) << args.front();
    EXPECT_TRUE(is_tame(result.err)) << result.err;
    EXPECT_TRUE(contains(result.err, "\\u001b]0;owned\\u0007")) << result.err;
  }
}

TEST_F(Streams, ShowNoRawControlCharactersOfEnvironments) {
  folder_.write("data.jsonl", "{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\n");
  folder_.write("held_out.jsonl", "{\"prompt\": \"c\"}\n{\"prompt\": \"d\"}\n");
  folder_.write("env.sh", R"sh(grep SigIgn /proc/$$/status >&2
printf 'said \302\2332J to stderr\n' >&2
read -r hello; echo '{"type": "hello", "protocol": 1}'
while read -r line; do id=${line#*'"id": '}; id=${id%%,*}
  printf '{"id": %s, "error": "\\u001b]0;owned\\u0007 \302\2332J"}\n' "$id"
done
)sh");
  const std::string run = std::string(kConfig).substr(0, std::string(kConfig).find("[[env"));
  folder_.write("process.toml",
                run +
                    "[[environment]]\nname = \"process\"\neval_data = \"held_out.jsonl\"\n"
                    "data = \"data.jsonl\"\ncommand = \"sh env.sh\"\n");
  const RunResult result =
      run_program({"train", "process.toml", "--set", "orchestrator.retry_backoff=0.01"}, options());
  EXPECT_EQ(result.code, 3) << result;
  EXPECT_TRUE(is_tame(result.err)) << result.err;
  EXPECT_TRUE(contains(result.err, "\\u001b]0;owned\\u0007 \\u009b2J")) << result.err;
  const std::string log = file_text(path("run/log.txt"));
  EXPECT_TRUE(is_tame(log)) << log;
  EXPECT_TRUE(contains(log, "said \\u009b2J to stderr")) << log;
  // The program is started with no signals ignored (1 to 31; the C library reserves the ones
  // above).
  const size_t mask = log.find("SigIgn: ");
  ASSERT_NE(mask, std::string::npos) << log;
  EXPECT_EQ(std::stoull(log.substr(mask + 8, 16), nullptr, 16) & 0x7fffffffu, 0u) << log;
}

}  // namespace
}  // namespace leeway
