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
  EXPECT_NE(notes[0].find("of prompt 1: it has 48 tokens, the model 48 positions"),
            std::string::npos)
      << notes[0];
  const std::string error = error_of(setup_of(folder, line_of(std::string(60, 'b'))));
  EXPECT_NE(error.find("environment jsonl: 1 of 1 prompts"), std::string::npos) << error;
}

TEST(TextCheck, RefusesATokenizerWithOtherTokensThanTheModel) {
  const TestFolder folder;
  const std::string error = error_of(setup_of(folder, line_of("a") + line_of("\u00e9")));
  EXPECT_NE(error.find("its prompt 1 has the token 195, and the model has vocab_size = 128"),
            std::string::npos)
      << error;
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
