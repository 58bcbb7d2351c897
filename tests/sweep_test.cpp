// `leeway sweep` as users run it, with runs of milliseconds, and the sweep file of the examples.

#include <gtest/gtest.h>
#include <sys/file.h>

#include <cmath>
#include <map>

#include "base/files.h"
#include "cli_helpers.h"
#include "python_packages.h"
#include "tiny_model.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

constexpr const char* kBase = R"(
)" LEEWAY_TINY_MODEL R"([trainer]
max_steps = 3
learning_rate = 3e-3
warmup_steps = 0
[orchestrator]
prompts_per_batch = 4
group_size = 4
max_off_policy_steps = 0
[rollout]
max_new_tokens = 6
stop = "\n"
[eval]
prompts = 8
samples = 2
[output]
rollouts_every = 0
[[environment]]
name = "jsonl"
data = "letters.jsonl"
verifier = "regex"
)";

constexpr const char* kTop = "base = \"base.toml\"\noutput_dir = \"out\"\nseeds = [1, 2]\n";
constexpr const char* kReuse =
    "[[table]]\nname = \"reuse\"\ntitle = \"By reuse\"\nset = [\"trainer.epochs=4\"]\n"
    "[[table.row]]\nname = \"none\"\ntitle = \"no | correction\"\n"
    "set = [\"trainer.loss.preset=reinforce\"]\n"
    "[[table.row]]\nname = \"icepop\"\nset = [\"trainer.loss.icepop_ratio_high=1.01\"]\n";
constexpr const char* kStale =
    "[[table]]\nname = \"stale\"\n[[table.row]]\nname = \"two\"\n"
    "set = [\"orchestrator.max_off_policy_steps=2\"]\n";

// A working folder with base.toml and what it needs; sweep files are in `sweeps`.
class SweepTest : public ::testing::Test {
 protected:
  SweepTest() {
    fs::create_directory(path("sweeps"));
    // A task that random weights sometimes solve.
    std::string lines;
    for (char c = 'a'; c <= 'z'; ++c) {
      lines += std::string("{\"prompt\": \"") + c + "=\", \"answer\": \"[a-z0-9]\"}\n";
    }
    folder_.write("letters.jsonl", lines);
    folder_.write("sweeps/base.toml", kBase);
  }
  std::string path(const std::string& name) const { return (folder_.path() / name).string(); }
  void write(const std::string& text) const { folder_.write("sweeps/sweep.toml", text); }
  RunResult leeway(const std::vector<std::string>& args) const {
    return run_program(args, {.directory = folder_.path().string()});
  }
  RunResult sweep(std::vector<std::string> args = {}) const {
    args.insert(args.begin(), {"sweep", "sweeps/sweep.toml"});
    return leeway(args);
  }
  // When each run was written.
  std::map<std::string, fs::file_time_type> times() const {
    std::map<std::string, fs::file_time_type> found;
    for (const auto& entry : fs::recursive_directory_iterator(path("out"))) {
      if (entry.path().filename() != "metrics.jsonl") continue;
      found[fs::relative(entry.path().parent_path(), path("out")).string()] =
          fs::last_write_time(entry.path());
    }
    return found;
  }

  TempFolder folder_;
};

double number(const Json& object, const char* key) {
  EXPECT_TRUE(object.HasMember(key)) << key;
  return object.HasMember(key) && object[key].IsNumber() ? object[key].GetDouble() : std::nan("");
}

TEST_F(SweepTest, TablesComeOut) {
  write(std::string(kTop) + kReuse + kStale);
  const RunResult result = sweep({"--jobs", "2"});
  ASSERT_EQ(result.code, 0) << result;
  for (const char* words : {"By reuse\n", "held-out reward", "max mismatch KL", "no | correction",
                            "icepop", "stale\n", " +- ", " %"}) {
    EXPECT_TRUE(contains(result.out, words)) << words << "\n" << result.out;
  }
  EXPECT_TRUE(contains(result.err, "[6/6] ")) << result.err;
  EXPECT_TRUE(contains(result.err, "stale/two/seed_2: finished")) << result.err;
  const std::string page = read_file(path("out/report.html"));
  EXPECT_TRUE(contains(page, "</html>"));
  EXPECT_TRUE(contains(page, "reuse/icepop"));
  EXPECT_FALSE(contains(page, "seed_2"));

  // All results exist, so the tables are printed at once.
  const RunResult markdown = sweep({"--markdown"});
  EXPECT_EQ(markdown.code, 0) << markdown;
  EXPECT_TRUE(contains(markdown.out, "| run | held-out reward |")) << markdown.out;
  EXPECT_TRUE(contains(markdown.out, "| no \\| correction | ")) << markdown.out;
}

TEST_F(SweepTest, NumbersAreThoseOfTheRuns) {
  write(std::string(kTop) + kReuse + kStale);
  const RunResult result = sweep({"--json"});
  ASSERT_EQ(result.code, 0) << result;
  const Document json = json_of(result.out);
  ASSERT_EQ(json["tables"].Size(), 2u);
  ASSERT_EQ(json["tables"][0]["rows"].Size(), 2u);
  for (const Json& table : json["tables"].GetArray()) {
    for (const Json& row : table["rows"].GetArray()) {
      ASSERT_EQ(row["runs"].Size(), 2u);
      double reward = 0, kl = 0, dropped = 0, lag = 0;
      std::vector<double> rewards;
      for (const Json& run : row["runs"].GetArray()) {
        const std::string folder = path(run["folder"].GetString());
        const Document summary = json_of(read_file(folder + ".summary.json"));
        rewards.push_back(number(summary["after"], "eval/all/reward/mean"));
        EXPECT_EQ(number(run, "reward"), rewards.back());
        reward += rewards.back() / 2;
        double most = 0;
        for (const std::string& line : lines_of(read_file(folder + "/metrics.jsonl"))) {
          const Document step = json_of(line);
          most = std::max(most, number(step, "mismatch_kl/all/mean"));
          dropped += (1 - number(step, "kept_share")) / 6;
          lag = std::max(lag, number(step, "off_policy_level/all/max"));
        }
        kl += most / 2;
      }
      EXPECT_DOUBLE_EQ(number(row, "reward_mean"), reward);
      EXPECT_NEAR(number(row, "reward_deviation"),
                  std::abs(rewards[0] - rewards[1]) / std::sqrt(2.0), 1e-12);
      EXPECT_DOUBLE_EQ(number(row, "max_mismatch_kl"), kl);
      EXPECT_NEAR(number(row, "dropped_share"), dropped, 1e-12);
      EXPECT_EQ(number(row, "max_off_policy_level"), lag);
    }
  }
  const Json& reuse = json["tables"][0]["rows"];
  EXPECT_EQ(number(reuse[0], "dropped_share"), 0.0);
  EXPECT_GT(number(reuse[1], "dropped_share"), 0.0);
  EXPECT_EQ(number(json["tables"][1]["rows"][0], "max_off_policy_level"), 2.0);
}

// All numbers except times.
std::string without_seconds(const std::string& text) {
  Document json = json_of(text);
  for (Json& table : json["tables"].GetArray()) {
    for (Json& row : table["rows"].GetArray()) {
      row.RemoveMember("seconds");
      for (Json& run : row["runs"].GetArray()) run.RemoveMember("seconds");
    }
  }
  return text_of(json);
}

TEST_F(SweepTest, ResultsDoNotDependOnTheNumberOfJobs) {
  write(std::string(kTop) + kReuse + kStale);
  const RunResult one = sweep({"--json", "--jobs", "1"});
  ASSERT_EQ(one.code, 0) << one;
  // The number of jobs is not a setting: it causes no run to be repeated.
  const auto before = times();
  EXPECT_EQ(sweep({"--json", "--jobs", "2"}).out, one.out);
  EXPECT_EQ(times(), before);
  fs::remove_all(path("out"));
  const RunResult two = sweep({"--json", "--jobs", "2"});
  ASSERT_EQ(two.code, 0) << two;
  EXPECT_EQ(without_seconds(two.out), without_seconds(one.out));
  EXPECT_TRUE(contains(read_file(path("out/reuse/none/seed_1/config.toml")), "threads = 1"));
}

TEST_F(SweepTest, OnlyWhatChangedIsRunAgain) {
  write(std::string(kTop) + kReuse + kStale);
  ASSERT_EQ(sweep().code, 0);
  const auto first = times();
  ASSERT_EQ(first.size(), 6u);
  const RunResult again = sweep();
  EXPECT_EQ(again.code, 0);
  EXPECT_TRUE(contains(again.err, "6 of 6 runs are finished")) << again.err;
  EXPECT_EQ(times(), first);

  // Changes a setting of one row.
  std::string text = std::string(kTop) + kReuse + kStale;
  const std::string from = "max_off_policy_steps=2";
  write(text.replace(text.find(from), from.size(), "max_off_policy_steps=1"));
  const Document listed = json_of(sweep({"--dry-run", "--json"}).out);
  for (const Json& run : listed["runs"].GetArray()) {
    EXPECT_EQ(run["finished"].GetBool(), !contains(run["folder"].GetString(), "stale"));
  }
  EXPECT_EQ(times(), first);
  ASSERT_EQ(sweep().code, 0);
  const auto second = times();
  ASSERT_EQ(second.size(), 6u);
  for (const auto& [run, time] : second) {
    EXPECT_EQ(time == first.at(run), !run.starts_with("stale")) << run;
  }
  EXPECT_FALSE(fs::exists(path("out/stale/two/seed_1-2")));

  // A summary that does not say how the run ended is not a result.
  folder_.write("out/reuse/none/seed_1.summary.json", "{\"end\": \"stopped\"}");
  folder_.write("out/reuse/none/seed_2.summary.json", "{\"end\": ");
  fs::remove(path("out/reuse/icepop/seed_1.settings.json"));
  fs::remove_all(path("out/reuse/icepop/seed_2"));
  const RunResult repaired = sweep();
  EXPECT_EQ(repaired.code, 0) << repaired;
  EXPECT_TRUE(contains(repaired.err, "2 of 6 runs are finished")) << repaired.err;

  // A different base changes every run.
  folder_.write("sweeps/base.toml", std::string(kBase) + "# changed\n");
  EXPECT_FALSE(contains(sweep({"--dry-run"}).out, "finished"));
}

TEST_F(SweepTest, FinishedRunsLeaveNoWeightsWhereTheFileSaysSo) {
  write(std::string("keep_weights = false\n") + kTop + kReuse);
  const RunResult first = sweep({"--jobs", "2", "--json"});
  ASSERT_EQ(first.code, 0) << first;
  EXPECT_EQ(times().size(), 4u);
  for (const auto& [run, time] : times()) {
    EXPECT_FALSE(fs::exists(path("out/" + run + "/weights"))) << run;
    EXPECT_FALSE(fs::exists(path("out/" + run + "/checkpoints"))) << run;
  }
  // They still count as finished, and their numbers are there.
  const RunResult again = sweep({"--json"});
  EXPECT_TRUE(contains(again.err, "4 of 4 runs are finished")) << again.err;
  EXPECT_EQ(again.out, first.out);
}

// The script behind docs/which-correction.md.
TEST_F(SweepTest, TheTablesOfTheExampleAreMadeFromFinishedRuns) {
  if (!have_python()) GTEST_SKIP() << "there is no python3";
  write(std::string(kTop) + kReuse + kStale);
  ASSERT_EQ(sweep({"--jobs", "2", "--only", "reuse"}).code, 0);
  const RunResult tables =
      run_program({LEEWAY_SOURCE_DIR "/examples/08_smollm2/tables.py", "sweeps/sweep.toml"},
                  {.directory = folder_.path().string(), .program = "python3"});
  ASSERT_EQ(tables.code, 0) << tables;
  EXPECT_TRUE(contains(tables.out, "### By reuse\n")) << tables.out;
  EXPECT_TRUE(contains(tables.out, "| loss | right after |")) << tables.out;
  EXPECT_TRUE(contains(tables.out, "\n| icepop | ")) << tables.out;
  EXPECT_FALSE(contains(tables.out, "stale")) << tables.out;
  EXPECT_TRUE(contains(tables.err, "stale/two: 0 of 2 runs are finished")) << tables.err;
  const RunResult summary =
      run_program({LEEWAY_SOURCE_DIR "/examples/08_smollm2/summary.py", "out/reuse/none/seed_1"},
                  {.directory = folder_.path().string(), .program = "python3"});
  ASSERT_EQ(summary.code, 0) << summary;
  EXPECT_TRUE(contains(summary.out, "| seed_1 | ")) << summary.out;
  EXPECT_TRUE(contains(summary.out, "\nreward: ")) << summary.out;
}

TEST_F(SweepTest, OnlySomeRowsAreRunOnRequest) {
  write(std::string(kTop) + kReuse + kStale);
  ASSERT_EQ(sweep({"--only", "reuse/none", "two"}).code, 0);
  EXPECT_EQ(times().size(), 4u);
  const RunResult listed = leeway({"sweep", "--dry-run", "--only", "stale", "sweeps/sweep.toml"});
  EXPECT_EQ(listed.code, 0) << listed;
  EXPECT_TRUE(contains(listed.out, "stale/two/seed_1")) << listed.out;
  EXPECT_FALSE(contains(listed.out, "reuse")) << listed.out;
  expect_mistake(sweep({"--only", "reuse/icepap"}), {"--only reuse/icepap", "reuse/icepop?"});
}

TEST_F(SweepTest, MistakesAreNamedBeforeAnythingIsWritten) {
  expect_mistake(leeway({"sweep"}), {"SWEEP.toml"});
  expect_mistake(leeway({"sweep", "absent.toml"}), {"absent.toml"});
  write(std::string(kTop) + kReuse + kStale +
        "[[table.row]]\nname = \"bad\"\nset = [\"trainer.epoch=2\"]\n");
  for (const char* option : {"--jobs=2", "--dry-run", "--only=reuse"}) {
    expect_mistake(sweep({option}), {"sweep.toml line 20", "table stale", "row bad",
                                     "trainer.epoch", "did you mean trainer.epochs?"});
  }
  // A key without effect is also an error.
  write(std::string(kTop) + kStale +
        "[[table.row]]\nname = \"bad\"\nset = [\"trainer.loss.preset="
        "reinforce\", \"trainer.loss.icepop_ratio_high=3\"]\n");
  expect_mistake(sweep(), {"row bad", "icepop_ratio_high"});
  write("bas = \"base.toml\"\n");
  expect_mistake(sweep(), {"sweep.toml line 1", "did you mean base?"});
  write("base = \"nowhere.toml\"\noutput_dir = \"out\"\nseeds = [1]\n" + std::string(kStale));
  expect_mistake(sweep(), {"sweeps/nowhere.toml"});
  expect_mistake(sweep({"--jobs", "0"}), {"--jobs"});
  write("base = \"base.toml\"\noutput_dir = \"letters.jsonl\"\nseeds = [1]\n" +
        std::string(kStale));
  expect_mistake(sweep(), {"letters.jsonl"});
  EXPECT_FALSE(fs::exists(path("out")));
}

TEST_F(SweepTest, TwoSweepsDoNotWorkInOneFolder) {
  write(std::string(kTop) + kStale);
  fs::create_directory(path("out"));
  // The lock that another sweep would hold while it works.
  const int other = ::open(path("out").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_EQ(::flock(other, LOCK_EX | LOCK_NB), 0);
  expect_mistake(sweep(), {"out: another sweep is at work in this folder; wait for it or end it"});
  EXPECT_TRUE(fs::is_empty(path("out")));
  EXPECT_EQ(sweep({"--dry-run"}).code, 0);
  ::close(other);
  EXPECT_EQ(sweep().code, 0);
}

TEST_F(SweepTest, ARunThatFailsIsListedAndDoesNotStopTheOthers) {
  write(std::string(kTop) +
        "[[table]]\nname = \"rates\"\n"
        "[[table.row]]\nname = \"huge\"\n"
        "set = [\"trainer.learning_rate=1e30\", \"trainer.max_grad_norm=0\"]\n"
        "[[table.row]]\nname = \"fine\"\n"
        "[[table.row]]\nname = \"no_data\"\nset = [\"environment.data=absent.jsonl\"]\n");
  const RunResult result = sweep({"--json", "--jobs", "2"});
  EXPECT_EQ(result.code, 3) << result;
  EXPECT_TRUE(contains(result.err, "rates/huge/seed_1: the run gave up: ")) << result.err;
  EXPECT_TRUE(contains(result.err, "rates/no_data/seed_2: ")) << result.err;
  EXPECT_TRUE(contains(result.err, "absent.jsonl")) << result.err;
  const Document json = json_of(result.out);
  const Json& rows = json["tables"][0]["rows"];
  EXPECT_EQ(number(rows[0], "finished"), 0);
  EXPECT_TRUE(rows[0]["reward_mean"].IsNull());
  EXPECT_FALSE(rows[0]["runs"][0]["finished"].GetBool());
  EXPECT_EQ(number(rows[1], "finished"), 2);
  EXPECT_FALSE(std::isnan(number(rows[1], "reward_mean")));

  // Failed runs are tried again, the others are not.
  const auto fine = times().at("rates/fine/seed_1");
  const RunResult again = sweep();
  EXPECT_EQ(again.code, 3) << again;
  EXPECT_TRUE(contains(again.err, "2 of 6 runs are finished")) << again.err;
  EXPECT_TRUE(contains(again.out, "(0 of 2 seeds)")) << again.out;
  EXPECT_EQ(times().at("rates/fine/seed_1"), fine);
}

TEST_F(SweepTest, AnInterruptEndsTheRunsAndTheNextSweepGoesOn) {
  const std::string start =
      "base = \"base.toml\"\noutput_dir = \"out\"\nseeds = [1]\n[[table]]\n"
      "name = \"t\"\n[[table.row]]\nname = \"short\"\n[[table.row]]\n"
      "name = \"long\"\n";
  for (const char* signal : {"INT", "TERM"}) {
    fs::remove_all(path("out"));
    write(start + "set = [\"trainer.max_steps=1000000\"]\n");
    const RunResult stopped =
        run_program({"--preserve-status", "-s", signal, "2", leeway_program(), "sweep",
                     "sweeps/sweep.toml", "--jobs", "2"},
                    {.directory = folder_.path().string(), .program = "timeout"});
    EXPECT_EQ(stopped.code, 130) << stopped;
    EXPECT_EQ(stopped.out, "");
    EXPECT_TRUE(contains(stopped.err, "leeway: stopped")) << stopped.err;
    EXPECT_FALSE(fs::exists(path("out/t/long/seed_1.summary.json")));
    const auto before = times();
    ASSERT_TRUE(before.contains("t/short/seed_1"));

    write(start);
    const RunResult resumed = sweep();
    EXPECT_EQ(resumed.code, 0) << resumed;
    EXPECT_TRUE(contains(resumed.err, "1 of 2 runs are finished")) << resumed.err;
    EXPECT_EQ(times().at("t/short/seed_1"), before.at("t/short/seed_1"));
    EXPECT_EQ(lines_of(read_file(path("out/t/long/seed_1/metrics.jsonl"))).size(), 3u);
  }
}

// The effective values of a configuration without their origins.
std::map<std::string, std::string> effective(const std::string& file) {
  const RunResult printed = run_program({"config", file});
  EXPECT_EQ(printed.code, 0) << printed;
  std::map<std::string, std::string> values;
  std::string table;
  for (const std::string& line : lines_of(printed.out)) {
    if (line.starts_with("[")) table = line;
    const size_t equals = line.find(" = "), comment = line.find(" # ");
    if (equals == std::string::npos) continue;
    std::string value = line.substr(equals + 3, comment - equals - 3);
    value.erase(value.find_last_not_of(' ') + 1);
    values[table + " " + line.substr(0, equals)] = value;
  }
  return values;
}

TEST(OffPolicyExample, IsTheQuickStartVaried) {
  auto quick = effective(LEEWAY_SOURCE_DIR "/examples/01_sort/config.toml");
  auto base = effective(LEEWAY_SOURCE_DIR "/examples/02_off_policy/base.toml");
  EXPECT_GT(base.size(), 40u);
  EXPECT_EQ(base["[eval] every"], "0");
  EXPECT_EQ(base["[output] rollouts_every"], "0");
  for (const char* key : {" output_dir", " seed", "[eval] every", "[output] rollouts_every",
                          "[output] rollouts_groups", "[output] rollouts_keep"}) {
    quick.erase(key);
    base.erase(key);
  }
  EXPECT_EQ(base, quick);
}

TEST(OffPolicyExample, AsksForRunsThatAreValid) {
  const TempFolder folder;
  const RunResult listed = run_program(
      {"sweep", LEEWAY_SOURCE_DIR "/examples/02_off_policy/sweep.toml", "--dry-run", "--json"},
      {.directory = folder.path().string()});
  expect_quiet_success(listed);
  EXPECT_EQ(json_of(listed.out)["runs"].Size(), 45u);
}

}  // namespace
}  // namespace leeway
