#include "run/input_paths.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "leeway/error.h"
#include "run/test_support.h"

namespace leeway {
namespace {

std::string problem_of(const std::string& file, const std::string& text,
                       const std::vector<std::string>& sets = {}) {
  const Catalog catalog;
  try {
    check_input_paths(parse_config(catalog, file, text, sets, ConfigScope::whole));
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) {
    EXPECT_NE(text.find(word), std::string::npos) << "no \"" << word << "\" in: " << text;
  }
}

TEST(InputPaths, AModelThatIsNotThereIsRefusedByItsKeyAndLine) {
  for (const auto& [key, text] : std::vector<std::pair<std::string, std::string>>{
           {"model.path", "[model]\npath = \"Qwen/Qwen3-0.6B\"\n"},
           {"model.path",
            "[model]\npath = \"Qwen/Qwen3-0.6B\"\n[orchestrator.renderer]\nname = "
            "\"auto\"\n"},
           {"trainer.teacher",
            "[trainer]\nteacher = \"Qwen/Qwen3-0.6B\"\n[trainer.loss]\nteacher_tau = 0.5\n"}}) {
    expect_words(problem_of("run.toml", text),
                 {"run.toml line 2: " + key + " = ", "Qwen/Qwen3-0.6B", "there is no such folder",
                  "Leeway downloads nothing", "hf download NAME --local-dir FOLDER"});
  }
  expect_words(problem_of("run.toml", "", {"model.path=nowhere"}), {"--set model.path = "});
}

TEST(InputPaths, DataThatIsNotThereIsRefusedWithWhereItWasLookedFor) {
  const TestFolder folder;
  const std::string file = folder / "run.toml";
  const std::string text =
      "[[environment]]\nname = \"sort\"\n[[environment]]\nname = \"jsonl\"\ndata = \"no.jsonl\"\n";
  expect_words(problem_of(file, text),
               {file + " line 5: environment.1.data = ", "there is no such file",
                folder / "no.jsonl", std::filesystem::absolute("no.jsonl").string()});
  write_file_atomically(folder / "no.jsonl", "{}");
  EXPECT_EQ(problem_of(file, text), "");
}

}  // namespace
}  // namespace leeway
