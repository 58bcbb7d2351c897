// What a run stores on disk: checkpoints that were tampered with are skipped even if their
// checksums match, numbers that are not finite are never saved, file sizes are bounded, and deleted
// files are noticed.

#include <gtest/gtest.h>

#include <regex>

#include "base/checked_files.h"
#include "resume_support.h"

namespace leeway {
namespace {

// Updates a checkpoint's manifest to match the current content of a file.
void seal(const std::string& folder, const std::string& name) {
  const FileSum sum = sum_of_file(folder + "/" + name);
  std::string manifest = read_file(folder + "/manifest.json");
  const size_t at = manifest.find("\"" + name + "\": {");
  ASSERT_NE(at, std::string::npos) << manifest;
  const size_t end = manifest.find('}', at);
  manifest.replace(at, end - at,
                   "\"" + name + "\": {\"bytes\": " + std::to_string(sum.bytes) +
                       ", \"crc32c\": " + std::to_string(sum.crc32c));
  write_file_atomically(folder + "/manifest.json", manifest);
}

class CraftedTest : public ResumeFixture {
 protected:
  void SetUp() override {
    ResumeFixture::SetUp();
    ASSERT_EQ(train({"checkpoint.keep_last=3"}).code, 0);
    wanted_ = outcome();
    fs::remove(path("run/end.json"));  // killed just before its end
    fs::copy(path("run"), path("whole"), fs::copy_options::recursive);
  }
  // Replaces a file of the newest checkpoint by `text`, with the right checksum, and resumes.
  RunResult resumed_with(const std::string& name, const std::string& text) const {
    fs::remove_all(path("run"));
    fs::copy(path("whole"), path("run"), fs::copy_options::recursive);
    write_file_atomically(path("run/checkpoints/step_12/" + name), text);
    seal(path("run/checkpoints/step_12"), name);
    return resume();
  }
  std::string original(const std::string& name) const {
    return read_file(path("whole/checkpoints/step_12/" + name));
  }
  void expect_passed_over(const RunResult& result, const std::string& name,
                          const std::string& word) const {
    ASSERT_EQ(result.code, 0) << result;
    EXPECT_TRUE(contains(result.err, "checkpoint of step 12 is skipped")) << result.err;
    EXPECT_TRUE(contains(result.err, "checkpoints/step_12/" + name)) << result.err;
    EXPECT_TRUE(contains(result.err, word)) << word << ": " << result.err;
    EXPECT_TRUE(contains(result.err, "resumed from step 10")) << result.err;
    expect_same(outcome(), wanted_);
  }
  static std::string with(std::string text, const std::string& pattern, const std::string& value) {
    const std::string changed = std::regex_replace(text, std::regex(pattern), value,
                                                   std::regex_constants::format_first_only);
    EXPECT_NE(changed, text) << pattern;
    return changed;
  }
  Outcome wanted_;
};

TEST_F(CraftedTest, ACheckpointIsCheckedAndNotOnlySummed) {
  const std::string run = original("run.json"), schedule = original("schedule.json");
  struct Case {
    std::string name, text, word;
  };
  const std::string before = run.substr(0, run.find("\"before\": "));
  const Case cases[] = {
      {"run.json", before + "\"before\": \"x\"}", "\"before\" is not an object"},
      {"run.json", before + "\"before\": " + std::string(200000, '['), "nested"},
      {"run.json", with(run, "\"sft_steps\": [0-9]+", "\"sft_steps\": \"4\""), "\"sft_steps\""},
      {"schedule.json", with(schedule, "\"admitted\": [0-9]+", "\"admitted\": 0"),
       "\"admitted\" = 0"},
      {"schedule.json", with(schedule, "\"next_group\": [0-9]+", "\"next_group\": 1099511627776"),
       "\"next_group\" = 1099511627776"},
      {"trainer.json", "{\"format\": 1, \"optimizer_steps\": -3}", "optimizer_steps"},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.word);
    expect_passed_over(resumed_with(each.name, each.text), each.name, each.word);
  }
  // NaN as the last number of a file.
  for (const char* name : {"model.safetensors", "optimizer.safetensors"}) {
    SCOPED_TRACE(name);
    std::string bytes = original(name);
    bytes.replace(bytes.size() - 4, 4, std::string("\0\0\xc0\x7f", 4));
    expect_passed_over(resumed_with(name, bytes), name, "finite");
  }
}

TEST_F(CraftedTest, DeepLinesAreNoReasonToCrash) {
  const std::string deep = "{\"step\": 3, \"a\": " + std::string(1000000, '[') + "\n";
  std::string lines = read_file(path("run/metrics.jsonl"));
  lines.insert(lines.find('\n') + 1, deep);
  write("run/metrics.jsonl", lines);
  const RunResult report = leeway({"report", "run"});
  EXPECT_EQ(report.code, 0) << report.err.substr(0, 1000);
  EXPECT_TRUE(contains(report.err, "a damaged line is left out: run/metrics.jsonl line 2"))
      << report.err.substr(0, 1000);
  EXPECT_TRUE(contains(read_file(path("run/report.html")), "a damaged line is left out"));
  fs::remove_all(path("run/checkpoints/step_12"));
  const RunResult result = resume();
  ASSERT_EQ(result.code, 0) << result.err.substr(0, 1000);
  expect_same(outcome(), wanted_);
}

TEST_F(CraftedTest, DamagedWeightsAreRefusedWithTheFilesName) {
  const std::string name = path("run/weights/step_12/model.safetensors");
  ASSERT_TRUE(fs::exists(path("run/weights/step_12/checksums.json")));
  write("tokens.json", "{\"tokens\": [[1, 2, 3]]}");
  const std::vector<std::string> use = {"logprobs", "--model", "run/weights/step_12", "--tokens",
                                        "tokens.json"};
  EXPECT_EQ(leeway(use).code, 0);
  std::string bytes = read_file(name);
  bytes[bytes.size() - 4] ^= 1;  // the last bit of a number: only the checksum reveals it
  write_file_atomically(name, bytes);
  expect_mistake(leeway(use), {"weights/step_12/model.safetensors: is damaged", "checksums.json"});
  // Without checksums, changes by other programs are the user's responsibility.
  fs::remove(path("run/weights/step_12/checksums.json"));
  EXPECT_EQ(leeway(use).code, 0);
}

class StoreTest : public ResumeFixture {
 protected:
  // A judge program that answers each turn with `answer`; $n counts the turns.
  void use_judge(const std::string& answer) const {
    std::string config = kResumeConfig;
    config.erase(config.find("[sft]"), config.find("[trainer]") - config.find("[sft]"));
    config.erase(config.find("[[environment]]"));
    write("judge.sh",
          "n=0\nwhile read -r line; do\n"
          "  id=${line#*'\"id\": '} id=${id%%,*} n=$((n + 1))\n"
          "  case $line in\n"
          "    *'\"hello\"'*) echo '{\"type\": \"hello\", \"protocol\": 1}' ;;\n"
          "    *) " +
              answer +
              " ;;\n"
              "  esac\n"
              "done\n");
    write("run.toml", config +
                          "[[environment]]\nname = \"process\"\nid = \"judge\"\n"
                          "command = \"sh judge.sh\"\ndata = \"letters.jsonl\"\n");
  }
};

TEST_F(StoreTest, WeightsThatAreNotFiniteEndTheRunAndAreNeverSaved) {
  const RunResult result = train({"trainer.epsilon=1e-60", "checkpoint.every=1"});
  ASSERT_EQ(result.code, 3) << result;
  EXPECT_TRUE(contains(result.err, "the weights are not finite after the update: ")) << result.err;
  EXPECT_TRUE(contains(result.err, " holds ")) << result.err;
  EXPECT_STREQ(json_of(result.out)["end"].GetString(), "gave_up");
  // What was saved is valid: the run can be resumed and ends the same way.
  EXPECT_TRUE(fs::exists(path(json_of(result.out)["weights"].GetString()) + "/checksums.json"));
  const RunResult again = resume();
  EXPECT_EQ(again.code, 3) << again;
  EXPECT_TRUE(contains(again.err, "resumed from step")) << again.err;
  EXPECT_TRUE(contains(again.err, "the weights are not finite after the update: ")) << again.err;
  expect_readable();
  expect_no_leftovers();

  for (const char* steps : {"sft.max_steps=1", "sft.max_steps=3"}) {
    fs::remove_all(path("run"));
    const RunResult sft = train({"sft.epsilon=1e-60", steps});
    ASSERT_EQ(sft.code, 3) << sft;
    EXPECT_TRUE(contains(sft.err, "not finite") || contains(sft.err, "not a finite")) << sft.err;
    for (const auto& entry : fs::recursive_directory_iterator(path("run"))) {
      if (entry.path().filename() != "config.json") continue;
      write("tokens.json", "{\"tokens\": [[1, 2, 3]]}");
      EXPECT_EQ(
          leeway({"logprobs", "--model", entry.path().parent_path(), "--tokens", "tokens.json"})
              .code,
          0);
    }
  }
}

TEST_F(StoreTest, RolloutsAreKeptAsManyAsAreWanted) {
  ASSERT_EQ(train({"output.rollouts_keep=3"}).code, 0);
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(path("run/rollouts"))) {
    names.insert(entry.path().filename());
  }
  EXPECT_EQ(names, (std::set<std::string>{"step_1.jsonl", "step_11.jsonl", "step_12.jsonl"}));
  expect_readable();
}

TEST_F(StoreTest, AChattyEnvironmentDoesNotFillTheDisk) {
  use_judge(
      "echo \"judging number $n with many words, as programs do\" >&2\n"
      "       echo \"{\\\"id\\\": $id, \\\"reward\\\": 0}\"");
  const RunResult result = train({"output.log_bytes=4096"});
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_LE(fs::file_size(path("run/log.txt")), 4096u);
  EXPECT_LE(fs::file_size(path("run/log.1.txt")), 4096u);
  EXPECT_TRUE(contains(read_file(path("run/log.1.txt")), "judging number"));
}

TEST_F(StoreTest, NamesThatAnEnvironmentInventsAreCapped) {
  use_judge(
      "echo \"{\\\"id\\\": $id, \\\"rewards\\\": {\\\"right\\\": 1, \\\"made_up_$n\\\": 0.5}}\"");
  const RunResult result = train();
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "warning: environment judge: its rewards have more than 64"))
      << result.err;
  std::set<std::string> invented;
  for (const std::string& line : lines_of(read_file(path("run/metrics.jsonl")))) {
    const Document row = json_of(line);
    for (const auto& member : row.GetObject()) {
      const std::string name = member.name.GetString();
      if (name.starts_with("reward/judge/made_up")) invented.insert(name);
    }
  }
  EXPECT_LE(invented.size(), 63u);
  EXPECT_GT(invented.size(), 10u);
  EXPECT_TRUE(contains(read_file(path("run/metrics.jsonl")), "\"reward/judge/other\""));
}

TEST_F(StoreTest, DeletedFilesAreNoticedAtTheNextStep) {
  const auto ended = [&](const std::function<void()>& harm) {
    fs::remove_all(path("run"));
    Started run(arguments({"run.toml", "--json"}, kLong), directory());
    wait_for_steps(10);
    harm();
    EXPECT_EQ(run.wait(), 3);
    const std::string err = read_file(path("err.txt"));
    EXPECT_TRUE(contains(err, "the run gave up: ")) << err;
    EXPECT_TRUE(contains(err, "run/metrics.jsonl: was deleted, moved or replaced")) << err;
    // Immediately, not at the end.
    EXPECT_LT(json_of(read_file(path("out.txt")))["steps"].GetInt(), 400);
  };
  ended([&] { fs::remove(path("run/metrics.jsonl")); });
  ended([&] {
    const std::string text = read_file(path("run/metrics.jsonl"));
    write_file_atomically(path("run/metrics.jsonl"), text);
  });
  ended([&] { fs::rename(path("run"), path("elsewhere")); });
  EXPECT_GE(lines_of(read_file(path("elsewhere/metrics.jsonl"))).size(), 10u);
}

}  // namespace
}  // namespace leeway
