// A checkpoint belongs to its run, and a folder to one process: anything from another run, another
// configuration or other data is not mistaken for the run's own.

#include <gtest/gtest.h>

#include "resume_support.h"

namespace leeway {
namespace {

class IdentityTest : public ResumeFixture {
 protected:
  // A run whose last checkpoint is gone, so that there is something to resume.
  void make_unfinished() const {
    ASSERT_EQ(train({"checkpoint.keep_last=3"}).code, 0);
    fs::remove_all(path("run/checkpoints/step_12"));
    fs::remove(path("run/end.json"));
  }
};

TEST_F(IdentityTest, ACheckpointOfAnotherRunIsPassedOver) {
  ASSERT_EQ(train({"output_dir=other", "seed=2", "checkpoint.keep_last=3"}).code, 0);
  make_unfinished();
  const Outcome wanted = outcome();
  // Complete, with the same configuration except the seed, and from a later step.
  fs::copy(path("other/checkpoints/step_12"), path("run/checkpoints/step_12"),
           fs::copy_options::recursive);
  const RunResult result = resume();
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "checkpoint of step 12 is skipped")) << result.err;
  EXPECT_TRUE(contains(result.err, "belongs to another run, ")) << result.err;
  EXPECT_TRUE(contains(result.err, "resumed from step 10")) << result.err;
  expect_same(outcome(), wanted);
}

TEST_F(IdentityTest, TwoRunsOfOneConfigurationHaveIdsOfTheirOwn) {
  ASSERT_EQ(train({"trainer.max_steps=2"}).code, 0);
  ASSERT_EQ(train({"trainer.max_steps=2"}).code, 0);
  const Document first = json_of(read_file(path("run/identity.json")));
  const Document second = json_of(read_file(path("run-2/identity.json")));
  EXPECT_STRNE(first["run_id"].GetString(), second["run_id"].GetString());
  EXPECT_EQ(text_of(first["config_hashes"]), text_of(second["config_hashes"]));
  EXPECT_EQ(text_of(first["data"]), text_of(second["data"]));
  EXPECT_STREQ(first["job"].GetString(), "train");
  const Document manifest = json_of(read_file(path("run/checkpoints/step_2/manifest.json")));
  EXPECT_STREQ(manifest["run_id"].GetString(), first["run_id"].GetString());
}

TEST_F(IdentityTest, OtherDataIsRefusedAndTheSameDataElsewhereIsNot) {
  make_unfinished();
  const Outcome wanted = outcome();
  const auto before = content_of(path("run"));
  const std::string letters = read_file(path("letters.jsonl"));
  std::string other = letters;
  other[other.find("a=")] = '9';
  write("letters.jsonl", other);
  expect_mistake(resume(), {"environment.0.data", "letters.jsonl", "content has changed",
                            "leeway train --from run"});
  EXPECT_TRUE(content_of(path("run")) == before);
  fs::remove(path("letters.jsonl"));
  write("elsewhere.jsonl", letters);
  const RunResult result = resume({"environment.0.data=elsewhere.jsonl"});
  ASSERT_EQ(result.code, 0) << result;
  expect_same(outcome(), wanted);
}

TEST_F(IdentityTest, AConfigurationThatSomeoneEditedIsRefused) {
  make_unfinished();
  std::string config = read_file(path("run/config.toml"));
  const std::string whole = config;
  const size_t at = config.find("learning_rate = 0.003");
  ASSERT_NE(at, std::string::npos);
  config.replace(at, 21, "learning_rate = 0.002");
  write("run/config.toml", config);
  expect_mistake(resume(), {"run/config.toml was changed since the run wrote it", "--from run"});
  // Keys that may change may be changed there too.
  config = whole;
  config.replace(config.find("prompts = 8 "), 12, "prompts = 7 ");
  write("run/config.toml", config);
  EXPECT_EQ(resume().code, 0);
}

TEST_F(IdentityTest, AFolderOfBeforeThereWereIdentitiesGoesOn) {
  make_unfinished();
  const Outcome wanted = outcome();
  fs::remove(path("run/identity.json"));
  for (const std::string& step : checkpoints()) {
    const std::string name = path("run/checkpoints/" + step + "/manifest.json");
    Document manifest = json_of(read_file(name));
    for (const char* key : {"run_id", "config_hash", "data_hash"}) manifest.RemoveMember(key);
    write_file_atomically(name, text_of(manifest));
  }
  const RunResult result = resume();
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "resumed from step 10")) << result.err;
  expect_same(outcome(), wanted);
  EXPECT_TRUE(fs::exists(path("run/identity.json")));
}

TEST_F(IdentityTest, ALostIdentityIsTakenFromTheCheckpoint) {
  make_unfinished();
  const std::string id = json_of(read_file(path("run/identity.json")))["run_id"].GetString();
  fs::remove(path("run/identity.json"));
  ASSERT_EQ(resume().code, 0);
  EXPECT_EQ(json_of(read_file(path("run/identity.json")))["run_id"].GetString(), id);
  // A damaged file is named.
  write("run/identity.json", "{\"run_id\": 7}");
  expect_mistake(resume(), {"run/identity.json", "damaged", "Remove it"});
}

TEST_F(IdentityTest, TenSimultaneousStartsEachGetANameOfTheirOwn) {
  fs::create_directory(path("run"));  // a folder without a run is not taken yet
  std::vector<std::unique_ptr<Started>> runs;
  for (int k = 0; k < 10; ++k) {
    runs.push_back(std::make_unique<Started>(
        arguments({"run.toml"}, {"trainer.max_steps=1", "sft.max_steps=1", "eval.prompts=1"}),
        directory()));
  }
  for (auto& run : runs) EXPECT_EQ(run->wait(), 0) << read_file(path("err.txt"));
  std::set<std::string> ids;
  for (int k = 1; k <= 10; ++k) {
    const std::string name = path(k == 1 ? "run" : "run-" + std::to_string(k));
    ASSERT_TRUE(fs::exists(name + "/metrics.jsonl")) << name;
    EXPECT_EQ(lines_of(read_file(name + "/metrics.jsonl")).size(), 1u) << name;
    ids.insert(json_of(read_file(name + "/identity.json"))["run_id"].GetString());
  }
  EXPECT_EQ(ids.size(), 10u);
}

}  // namespace
}  // namespace leeway
