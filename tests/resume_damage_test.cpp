// `leeway train --resume` when something is wrong: damaged files are detected and repaired, a full
// disk only loses what does not fit, and another configuration is refused.

#include <gtest/gtest.h>

#include "base/test_disk.h"
#include "resume_support.h"

namespace leeway {
namespace {

// A run with checkpoints of steps 8, 10 and 12 that was killed just before its end.
class DamageTest : public ResumeFixture {
 protected:
  void SetUp() override {
    ResumeFixture::SetUp();
    ASSERT_EQ(train({"checkpoint.keep_last=3"}).code, 0);
    wanted_ = outcome();
    fs::copy(path("run"), path("finished"), fs::copy_options::recursive);
    fs::remove(path("run/end.json"));
    fs::copy(path("run"), path("whole"), fs::copy_options::recursive);
  }
  void put_back_finished() const {
    fs::remove_all(path("run"));
    fs::copy(path("finished"), path("run"), fs::copy_options::recursive);
  }
  void put_back() const {
    fs::remove_all(path("run"));
    fs::copy(path("whole"), path("run"), fs::copy_options::recursive);
  }
  static void flip_a_byte(const std::string& name) {
    std::string bytes = read_file(name);
    bytes[bytes.size() / 2] ^= 4;
    write_file_atomically(name, bytes);
  }
  Outcome wanted_;
};

TEST_F(DamageTest, ADamagedCheckpointIsNamedAndTheOneBeforeIsUsed) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(path("whole/checkpoints/step_12"))) {
    names.push_back(entry.path().filename());
  }
  ASSERT_EQ(names.size(), 8u);
  const std::map<std::string, std::function<void(const std::string&)>> damages = {
      {"cut", [](const auto& name) { fs::resize_file(name, fs::file_size(name) / 2); }},
      {"empty", [](const auto& name) { fs::resize_file(name, 0); }},
      {"flipped", flip_a_byte},
      {"deleted", [](const auto& name) { fs::remove(name); }},
  };
  for (const std::string& name : names) {
    for (const auto& [kind, damage] : damages) {
      SCOPED_TRACE(name + " " + kind);
      put_back();
      damage(path("run/checkpoints/step_12/" + name));
      const RunResult result = resume();
      ASSERT_EQ(result.code, 0) << result;
      EXPECT_TRUE(contains(result.err, "checkpoint of step 12 is skipped")) << result.err;
      // A manifest may be readable but wrong about another file.
      EXPECT_TRUE(contains(result.err,
                           "checkpoints/step_12/" + (name == "manifest.json" ? "" : name + ": ")))
          << result.err;
      EXPECT_TRUE(contains(result.err, "resumed from step 10")) << result.err;
      expect_same(outcome(), wanted_);
      EXPECT_EQ(resume().code, 0);
    }
  }
}

TEST_F(DamageTest, HalfWrittenCheckpointsAreNotLookedAtAndGo) {
  fs::rename(path("run/checkpoints/step_12"), path("run/checkpoints/.writing_1"));
  fs::create_directories(path("run/checkpoints/.writing_99999999"));
  write("run/report.html.4711.tmp", "half");
  write("run/mine.tmp", "of the user");
  const RunResult result = resume();
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "resumed from step 10")) << result.err;
  expect_same(outcome(), wanted_);
  EXPECT_TRUE(fs::remove(path("run/mine.tmp")));
  expect_no_leftovers();
}

TEST_F(DamageTest, LinesCutOffOrDamagedAfterTheCheckpointAreWrittenAgain) {
  fs::remove_all(path("run/checkpoints/step_12"));
  std::ofstream(path("run/metrics.jsonl"), std::ios::app) << "\0\0\0\n{\"step\": 13, \"lo";
  std::ofstream(path("run/eval.jsonl"), std::ios::app) << "{\"st";
  ASSERT_EQ(resume().code, 0);
  expect_same(outcome(), wanted_);
}

TEST_F(DamageTest, AnotherReferenceThanThatOfStepZeroIsRefused) {
  fs::remove_all(path("run/checkpoints/step_12"));
  const std::string name = path("run/weights/step_0/model.safetensors");
  std::string bytes = read_file(name);
  bytes[bytes.size() - 4] ^= 1;  // the last bit of a number
  write_file_atomically(name, bytes);
  const RunResult result = resume();
  EXPECT_EQ(result.code, 3) << result;
  EXPECT_TRUE(contains(result.err, "weights/step_0: is not the policy of step 0")) << result.err;
  expect_readable();
}

TEST_F(DamageTest, AFinishedRunIsLeftAsItIs) {
  put_back_finished();
  const auto before = content_of(path("run"));
  for (const std::vector<std::string>& sets :
       {std::vector<std::string>{}, {"eval.samples=3", "checkpoint.every=1"}}) {
    const RunResult result = resume(sets);
    EXPECT_EQ(result.code, 0) << result;
    EXPECT_TRUE(contains(result.err, "the run has finished, all of its 12 steps")) << result.err;
    const Document summary = json_of(result.out);
    EXPECT_STREQ(summary["end"].GetString(), "finished");
    EXPECT_EQ(summary["steps"].GetInt(), 12);
    EXPECT_STREQ(summary["weights"].GetString(), "run/weights/step_12");
    EXPECT_EQ(summary["before"].MemberCount(), summary["after"].MemberCount());
  }
  const RunResult text = leeway({"train", "--resume", "run"});
  EXPECT_TRUE(contains(text.out, "run/weights/step_12")) << text;
  EXPECT_TRUE(content_of(path("run")) == before);
}

TEST_F(DamageTest, AFinishedRunWithoutWholeCheckpointsIsLeftAsItIs) {
  for (const bool removed : {true, false}) {
    put_back_finished();
    if (removed) {
      fs::remove_all(path("run/checkpoints"));
    } else {
      for (const std::string& step : checkpoints()) {
        flip_a_byte(path("run/checkpoints/" + step + "/model.safetensors"));
      }
    }
    const auto before = content_of(path("run"));
    const RunResult result = resume();
    EXPECT_EQ(result.code, 0) << result;
    EXPECT_TRUE(contains(result.err, "the run has finished, all of its 12 steps")) << result.err;
    EXPECT_EQ(contains(result.err, "checkpoint of step 12 is skipped"), !removed);
    EXPECT_STREQ(json_of(result.out)["weights"].GetString(), "run/weights/step_12");
    EXPECT_GT(json_of(result.out)["before"].MemberCount(), 0u);
    EXPECT_GT(json_of(result.out)["account"]["admitted"].GetInt(), 0);
    // There is nothing to continue from for more steps.
    expect_mistake(resume({"trainer.max_steps=20"}),
                   {"there is no checkpoint to continue from", "leeway train --from run"});
    EXPECT_TRUE(content_of(path("run")) == before);
    // The weights are gone as well, so there is nothing to recover from.
    fs::remove_all(path("run/weights/step_12"));
    const RunResult less = resume();
    EXPECT_EQ(less.code, 0) << less;
    EXPECT_TRUE(contains(less.err, "missing")) << less.err;
    EXPECT_TRUE(contains(less.err, "run/weights/step_12")) << less.err;
  }
}

TEST_F(DamageTest, NothingIsMovedOrDeletedBehindASymbolicLink) {
  fs::remove_all(path("run/checkpoints/step_12"));
  for (const char* name : {"weights", "checkpoints", "rollouts"}) {
    fs::rename(path(std::string("run/") + name), path(name));
    fs::create_directory_symlink(path(name), path(std::string("run/") + name));
  }
  const auto weights = content_of(path("weights"));
  const RunResult result = resume({"checkpoint.keep_last=1"});
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "run/weights/step_12 is behind a symbolic link and stays"))
      << result.err;
  EXPECT_TRUE(content_of(path("weights")) == weights);  // recreated identically
  for (const char* name : {"weights", "checkpoints", "rollouts"}) {
    EXPECT_TRUE(fs::is_symlink(path(std::string("run/") + name))) << name;
  }
  for (const char* step : {"step_8", "step_10", "step_12"}) {
    EXPECT_TRUE(fs::exists(path(std::string("checkpoints/") + step))) << step;
  }
  expect_same(outcome(), wanted_);
}

TEST_F(DamageTest, WhatCameAfterTheLastCheckpointIsMadeGood) {
  for (const char* missing : {"run/report.html", "run/weights/step_12", "run/eval.jsonl"}) {
    SCOPED_TRACE(missing);
    put_back();
    fs::remove_all(path(missing));
    if (std::string(missing) == "run/eval.jsonl") {
      std::string kept;
      for (const std::string& line : lines_of(read_file(path("whole/eval.jsonl")))) {
        if (json_of(line)["step"].GetInt() < 12) kept += line + "\n";
      }
      write("run/eval.jsonl", kept);
    }
    ASSERT_EQ(resume().code, 0);
    expect_same(outcome(), wanted_);
    EXPECT_TRUE(fs::exists(path("run/report.html")));
  }
}

TEST_F(DamageTest, AnotherConfigurationIsRefusedWithBothValues) {
  fs::remove_all(path("run/checkpoints/step_12"));
  const auto before = content_of(path("run"));
  expect_mistake(resume({"trainer.learning_rate=1e-3", "trainer.loss.ref_kl=0.5"}),
                 {"trainer.learning_rate: 0.003 in the run, 0.001 now",
                  "trainer.loss.ref_kl: 0.05 in the run, 0.5 now"});
  expect_mistake(resume({"trainer.max_steps=9"}),
                 {"trainer.max_steps = 9: the run has already done 10 steps"});
  expect_mistake(resume({"sft.max_steps=9"}), {"sft.max_steps", "supervised training is over"});
  std::string other = kResumeConfig;
  other.replace(other.find("max_operand = 5"), 15, "max_operand = 7");
  write("other.toml", other + "[[environment]]\nname = \"sort\"\nid = \"more\"\n");
  expect_mistake(leeway({"train", "other.toml", "--resume", "run"}),
                 {"max_operand: 5 in the run, 7 now", "absent in the run", "\"more\""});
  expect_mistake(leeway({"train", "--resume", "nowhere"}), {"nowhere/config.toml"});
  EXPECT_TRUE(content_of(path("run")) == before);
}

TEST_F(DamageTest, WhatDoesNotChangeTheTrainingMayBeAnother) {
  fs::remove_all(path("run/checkpoints/step_12"));
  const std::string config = read_file(path("run/config.toml"));
  const RunResult result =
      resume({"trainer.threads=1", "rollout.threads=1", "output.tensorboard=true",
              "output.rollouts_every=100", "eval.samples=3", "eval.every=11", "checkpoint.every=1",
              "checkpoint.keep_last=1"});
  ASSERT_EQ(result.code, 0) << result;
  const Outcome found = outcome();
  EXPECT_TRUE(found.weights == wanted_.weights);
  EXPECT_EQ(found.metrics, wanted_.metrics);
  EXPECT_TRUE(fs::exists(path("run/tensorboard")));
  EXPECT_EQ(checkpoints(), std::set<std::string>{"step_12"});
  EXPECT_TRUE(contains(read_file(path("run/config.toml")), "samples = 3"));

  // If nothing changed, the file keeps the origins of its values.
  put_back();
  fs::remove_all(path("run/checkpoints/step_12"));
  ASSERT_EQ(leeway({"train", "run.toml", "--resume", "run"}).code, 0);
  expect_same(outcome(), wanted_);
  put_back();
  fs::remove_all(path("run/checkpoints/step_12"));
  ASSERT_EQ(resume().code, 0);
  EXPECT_EQ(read_file(path("run/config.toml")), config);
}

// Runs on a separate file system whose size can be set.
class FullDiskTest : public ResumeFixture {
 protected:
  void SetUp() override {
    ResumeFixture::SetUp();
    memory_.reset();
    inside_ = "disk";
    fs::create_directory(directory());
    if (!testing::mount_small_disk(directory(), "16m")) {
      GTEST_SKIP() << "needs the right to mount a small disk";
    }
    mounted_ = true;
    prepare(directory());
  }
  void TearDown() override {
    if (mounted_) ::umount2(directory().c_str(), MNT_DETACH);
  }
  void set_size(const std::string& size) const {
    ASSERT_TRUE(testing::resize_small_disk(directory(), size));
  }
  bool mounted_ = false;
};

TEST_F(FullDiskTest, CheckpointsThatDoNotFitCostNothingButThemselves) {
  const std::vector<std::string> sets = {"output.rollouts_every=100", "checkpoint.every=1",
                                         "checkpoint.keep_last=1"};
  const Outcome wanted = undisturbed(sets);
  // Room for the reference, one checkpoint, the metrics and the last weights, but not for two.
  set_size("560k");
  const RunResult result = train(sets);
  EXPECT_TRUE(contains(result.err, "warning: no checkpoint of step")) << result.err;
  EXPECT_TRUE(contains(result.err, " MB are free on its disk, ")) << result.err;
  EXPECT_TRUE(contains(result.err, "step 12/12")) << result.err;
  EXPECT_EQ(checkpoints(), std::set<std::string>{"sft_4"});
  expect_readable();
  set_size("16m");
  const RunResult resumed = resume();
  ASSERT_EQ(resumed.code, 0) << resumed;
  EXPECT_TRUE(contains(resumed.err, "resumed from supervised step 4")) << resumed.err;
  expect_same(outcome(), wanted);
  expect_no_leftovers();
}

TEST_F(FullDiskTest, AFullDiskEndsTheRunWhichGoesOnWhenThereIsRoom) {
  const std::vector<std::string> sets = {"trainer.max_steps=300", "output.rollouts_every=100",
                                         "checkpoint.every=10"};
  const Outcome wanted = undisturbed(sets, 300);
  set_size("1100k");
  const RunResult result = train(sets);
  EXPECT_EQ(result.code, 3) << result;
  const std::string reason = json_of(result.out)["reason"].GetString();
  EXPECT_TRUE(reason.starts_with("run/") &&
              reason.ends_with(": cannot write: No space left on device"))
      << reason;
  EXPECT_TRUE(contains(result.err, "leeway: the run gave up: " + reason)) << result.err;
  EXPECT_STREQ(json_of(result.out)["end"].GetString(), "gave_up");
  expect_readable();
  const RunResult still_full = resume();
  EXPECT_TRUE(still_full.code == 2 || still_full.code == 3) << still_full;
  EXPECT_TRUE(contains(still_full.err, "No space left on device")) << still_full.err;
  expect_readable();
  set_size("16m");
  const RunResult resumed = resume();
  ASSERT_EQ(resumed.code, 0) << resumed;
  EXPECT_TRUE(contains(resumed.err, "resumed from step")) << resumed.err;
  expect_same(outcome(300), wanted);
  expect_no_leftovers();
}

}  // namespace
}  // namespace leeway
