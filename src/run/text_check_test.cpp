#include "run/text_check.h"

#include <gtest/gtest.h>

#include "base/files.h"
#include "base/folders.h"
#include "leeway/error.h"
#include "run/test_support.h"

namespace leeway {
namespace {

// A run on these lines of a file, with 48 positions.
RunSetup setup_of(const TestFolder& folder, const std::string& lines,
                  std::vector<std::string> sets = {}) {
  static const Catalog catalog;
  write_file_atomically(folder / "data.jsonl", lines);
  write_file_atomically(folder / "eval.jsonl", "{\"prompt\": \"held out\", \"answer\": \"1\"}\n");
  const std::vector<std::string> own = {"environment.name=jsonl",
                                        "environment.data=" + (folder / "data.jsonl"),
                                        "environment.eval_data=" + (folder / "eval.jsonl")};
  sets.insert(sets.begin(), own.begin(), own.end());
  return RunSetup(parse_config(catalog, "run.toml", kTinyRun, sets, ConfigScope::whole,
                               {"environment.min_length", "environment.max_length"}));
}

std::string line_of(const std::string& prompt) {
  return "{\"prompt\": \"" + prompt + "\", \"answer\": \"1\"}\n";
}

std::string error_of(const RunSetup& setup) {
  try {
    check_text(setup);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(TextCheck, SaysNothingOfPromptsThatFit) {
  const TestFolder folder;
  const RunSetup setup = setup_of(folder, line_of("a") + line_of(std::string(47, 'b')));
  EXPECT_EQ(check_text(setup), std::vector<std::string>{});
  EXPECT_EQ(text_line(setup), "plain text, replies end at \\n");
}

TEST(TextCheck, CountsPromptsThatTheModelHasNoRoomFor) {
  const TestFolder folder;
  const std::vector<std::string> notes =
      check_text(setup_of(folder, line_of("a") + line_of(std::string(48, 'b')) + line_of("c")));
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("environment jsonl: 1 of 3 prompts"), std::string::npos) << notes[0];
  EXPECT_NE(notes[0].find("bbb...\": it has 48 tokens, and the model 48 positions"),
            std::string::npos)
      << notes[0];
}

TEST(TextCheck, RefusesAnEnvironmentWithoutAPromptToTrainOn) {
  const TestFolder folder;
  const RunSetup setup = setup_of(folder, line_of(std::string(60, 'b')) + line_of("\u00e9"));
  const std::string error = error_of(setup);
  EXPECT_NE(error.find("environment jsonl: 2 of 2 prompts"), std::string::npos) << error;
  EXPECT_EQ(check_text(setup, /*goes_on=*/true).size(), 1u) << "its data may not change";
}

TEST(TextCheck, HeldOutPromptsAreNotedAlone) {
  const TestFolder folder;
  write_file_atomically(folder / "long.jsonl", line_of(std::string(60, 'h')));
  const RunSetup setup =
      setup_of(folder, line_of("a"), {"environment.eval_data=" + (folder / "long.jsonl")});
  const std::vector<std::string> notes = check_text(setup);
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("1 of 1 held-out prompts"), std::string::npos) << notes[0];
}

TEST(TextCheck, ATokenThatTheModelLacksMakesAPromptUnusable) {
  const TestFolder folder;
  const std::vector<std::string> notes =
      check_text(setup_of(folder, line_of("a") + line_of("\u00e9")));
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("it has the token 195, and the model's vocab_size is 128"),
            std::string::npos)
      << notes[0];
}

// Of a large file thousands of prompts are looked at, evenly spread, and others may fit.
TEST(TextCheck, OfALargeFileNothingIsRefused) {
  const TestFolder folder;
  std::string lines;
  for (int i = 0; i < 6000; ++i) lines += line_of(std::string(60, 'b') + std::to_string(i));
  for (int i = 0; i < 100; ++i) lines += line_of(std::to_string(i));
  const std::vector<std::string> notes = check_text(setup_of(folder, lines));
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find(" of 4096 prompts"), std::string::npos) << notes[0];
  EXPECT_EQ(notes[0].find("4096 of 4096"), std::string::npos) << notes[0];
}

TEST(TextCheck, APromptIsRenderedAsItIsInTheRun) {
  const TestFolder folder;
  const RunSetup setup = setup_of(folder, line_of(std::string(40, 'b')),
                                  {"orchestrator.renderer.name=qwen3", "model.vocab_size=300"});
  EXPECT_NE(error_of(setup).find("1 of 1 prompts"), std::string::npos)
      << "the chat format's tokens";
  EXPECT_NE(text_line(setup).find("renderer qwen3, replies end at <|im_end|>"), std::string::npos)
      << text_line(setup);
}

TEST(TextCheck, NamesAStopTextOfSeveralTokens) {
  const TestFolder folder;
  const std::vector<std::string> notes =
      check_text(setup_of(folder, line_of("a"), {"rollout.stop=\"</b>\""}));
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("rollout.stop = \"</b>\" is 4 tokens here, and a reply ends at the last "
                          "of them, \">\""),
            std::string::npos)
      << notes[0];
}

TEST(TextCheck, AChatTemplateThatNobodyUsesIsNoted) {
  const TestFolder folder;
  const RunSetup scratch = setup_of(folder, line_of("a"));
  const std::string model = folder / "model";
  make_folders(model);
  save_parameters(scratch.weights, model);
  const std::string unset = kTinyRun;
  const Catalog catalog;
  const auto notes_of_model = [&] {
    const std::string text = "[model]\npath = \"" + model + "\"\ntokenizer = \"byte\"\n" +
                             unset.substr(unset.find("[trainer]"));
    return check_text(RunSetup(parse_config(catalog, "run.toml", text, {}, ConfigScope::whole)));
  };
  EXPECT_EQ(notes_of_model(), std::vector<std::string>{});
  write_file_atomically(model + "/chat_template.jinja", "{{ messages }}");
  const std::vector<std::string> notes = notes_of_model();
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find(model + " has a chat template"), std::string::npos) << notes[0];
  EXPECT_NE(notes[0].find("orchestrator.renderer.name"), std::string::npos) << notes[0];
}

}  // namespace
}  // namespace leeway
