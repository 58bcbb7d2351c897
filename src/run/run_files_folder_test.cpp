// The small files of a run folder: what is written is read back, and crafted ones are refused.

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "base/files.h"
#include "base/test_folder.h"
#include "leeway/error.h"
#include "run/policy_card.h"
#include "run/run_end.h"
#include "run/run_identity.h"
#include "run/sft_state.h"
#include "run/superseded.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;
using leeway::testing::TestFolder;

// Every text in which one value of the object is missing or replaced must be refused.
void expect_refused(const std::string& text, const std::vector<std::string>& values,
                    const std::function<void(const std::string&)>& read) {
  read(text);
  for (const std::string& value : values) {
    const size_t at = text.find(value);
    ASSERT_NE(at, std::string::npos) << value << " in " << text;
    for (const std::string other : {"null", "-1", "\"x\"", "[1]", "{}", "1e300"}) {
      std::string changed = text;
      changed.replace(at, value.size(), other);
      EXPECT_THROW(read(changed), Error) << changed;
    }
  }
  for (const char* other : {"", "[]", "7", "{}", "{\"steps\": "}) {
    EXPECT_THROW(read(other), Error) << other;
  }
}

TEST(RunFolderFiles, TheStateOfTheSupervisedTraining) {
  SftState state;
  state.steps = 17;
  state.tokens = 23456;
  state.reached_reward = true;
  const std::string text = sft_state_json(state);
  EXPECT_EQ(parse_sft_state("sft.json", text).tokens, 23456);
  EXPECT_TRUE(parse_sft_state("sft.json", text).reached_reward);
  expect_refused(text, {"17", "23456", "true"},
                 [](const std::string& json) { parse_sft_state("sft.json", json); });
}

TEST(RunFolderFiles, Identity) {
  const TestFolder folder;
  RunIdentity identity{"0123abcd", "sft", {4123456789u, 7}, {{"sft.data", {"d.jsonl", 88, 99}}}};
  EXPECT_FALSE(read_identity(folder.path()).has_value());
  write_identity(folder.path(), identity);
  const std::string name = folder.path() + "/identity.json";
  const RunIdentity found = *read_identity(folder.path());
  EXPECT_EQ(found.run_id, identity.run_id);
  EXPECT_EQ(found.config_hashes, identity.config_hashes);
  EXPECT_EQ(found.data_hash(), identity.data_hash());
  expect_refused(read_file(name), {"\"sft\"", "4123456789", "88", "99"},
                 [&](const std::string& json) {
                   write_file_atomically(name, json);
                   read_identity(folder.path());
                 });
}

TEST(RunFolderFiles, PolicyCards) {
  const TestFolder folder;
  PolicyCard card{.byte = true, .control_tokens = {"<a>", "<b>"}};
  card.renderer.name = "qwen3";
  card.renderer.preserve_all_thinking = true;
  EXPECT_FALSE(read_policy_card(folder.path()).has_value());
  write_policy_card(folder.path(), card);
  const PolicyCard found = *read_policy_card(folder.path());
  EXPECT_EQ(found.control_tokens, card.control_tokens);
  EXPECT_EQ(found.renderer.name, "qwen3");
  EXPECT_TRUE(found.renderer.preserve_all_thinking);
  const std::string name = folder.path() + "/leeway.json";
  expect_refused(read_file(name), {"\"byte\"", "[\"<a>\", \"<b>\"]", "true"},
                 [&](const std::string& json) {
                   write_file_atomically(name, json);
                   read_policy_card(folder.path());
                 });
}

TEST(RunFolderFiles, AnEndThatCannotBeReadIsNone) {
  const TestFolder folder;
  RunEnd end{.end = "finished", .steps = 12, .max_steps = 12};
  end.totals.admitted = 34;
  write_run_end(folder.path(), end);
  EXPECT_EQ(read_run_end(folder.path())->totals.admitted, 34);
  for (const char* text :
       {"", "{}", "[]", "{\"steps\": \"x\", \"max_steps\": 1}", "{\"steps\": 1"}) {
    write_file_atomically(folder.path() + "/end.json", text);
    EXPECT_FALSE(read_run_end(folder.path()).has_value()) << text;
  }
  remove_run_end(folder.path());
  remove_run_end(folder.path());
  EXPECT_FALSE(read_run_end(folder.path()).has_value());
}

TEST(RunFolderFiles, WhatIsMovedAsideKeepsItsNameAndLinksAreNotFollowed) {
  const TestFolder folder;
  const std::string run = folder.path() + "/run", disk = folder.path() + "/disk";
  fs::create_directories(run + "/weights/step_1");
  fs::create_directories(disk + "/step_3.jsonl");
  fs::create_directory_symlink(disk, run + "/rollouts");
  fs::create_directory_symlink(disk, run + "/weights/step_2");
  fs::create_directory(run + "/superseded_1");
  Superseded superseded(run);
  superseded.move("weights/nowhere");
  EXPECT_TRUE(superseded.empty());
  superseded.move("weights/step_1");
  superseded.move("weights/step_2");
  superseded.move("rollouts/step_3.jsonl");
  EXPECT_EQ(superseded.folder(), run + "/superseded_2");
  EXPECT_TRUE(fs::is_directory(run + "/superseded_2/weights/step_1"));
  EXPECT_TRUE(fs::is_symlink(run + "/superseded_2/weights/step_2"));
  EXPECT_EQ(superseded.left(), std::vector<std::string>{"rollouts/step_3.jsonl"});
  EXPECT_TRUE(fs::exists(disk + "/step_3.jsonl"));
}

}  // namespace
}  // namespace leeway
