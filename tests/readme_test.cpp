// Runs the README's commands one after the other, as a reader would: each works on the runs it
// refers to, and so do the commands that `leeway train` suggests at its end.

#include <gtest/gtest.h>

#include <regex>
#include <set>

#include "page.h"

namespace leeway {
namespace {

// The names of the run folders in `runs`.
std::set<std::string> run_names(const TempFolder& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder / "runs")) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

RunResult run_line(const TempFolder& folder, const std::string& line) {
  return run_program(
      {"-c", line},
      {.directory = folder.path().string(), .path_first = LEEWAY_BINARY_DIR, .program = "sh"});
}

// The `runs/NAME` folders that a command refers to.
std::set<std::string> named_runs(const std::string& text) {
  static const std::regex kRun(R"(runs/([A-Za-z0-9_-]+))");
  std::set<std::string> names;
  for (std::sregex_iterator it(text.begin(), text.end(), kRun), end; it != end; ++it) {
    names.insert((*it)[1]);
  }
  return names;
}

// The page written by `leeway report` shows exactly these runs.
void expect_report_of(const std::string& page, const std::set<std::string>& names,
                      const std::set<std::string>& all) {
  const std::string text = file_text(page);
  for (const std::string& name : all) {
    EXPECT_EQ(contains(text, "\"name\": \"" + name + "\""), names.contains(name)) << name;
  }
}

TEST(Readme, ShowsCommandsThatWorkInTheirOrder) {
  const TempFolder folder;
  fs::copy(kRoot / "examples", folder.path() / "examples", fs::copy_options::recursive);
  fs::create_directory_symlink(kRoot / "tests", folder / "tests");
  // `make demo` comes first; all that matters here is that its run exists.
  const RunResult demo =
      run_line(folder, "leeway train --set trainer.max_steps=1 --set sft.max_steps=1");
  ASSERT_EQ(demo.code, 0) << demo;
  std::set<std::string> expected = {"sort"};
  ASSERT_EQ(run_names(folder), expected);
  static const std::regex kReward(R"(held-out reward  ([0-9.]+) .* before, ([0-9.]+) .* after)");
  for (const Command& command : commands_of(parse_page(file_text(kRoot / "README.md")))) {
    SCOPED_TRACE("line " + std::to_string(command.line) + ": " + command.text);
    const RunResult result = run_line(folder, command.text);
    ASSERT_EQ(result.code, command.exit_code) << result;
    const std::set<std::string> named = named_runs(command.text);
    if (command.text.starts_with("leeway train")) {
      // It creates or continues the run it names, and there is something to see.
      ASSERT_EQ(named.size(), 1u);
      expected.insert(named.begin(), named.end());
      std::smatch match;
      ASSERT_TRUE(std::regex_search(result.out, match, kReward)) << result;
      EXPECT_GT(std::stod(match[1]), 0.1) << result;
      EXPECT_GT(std::stod(match[2]), std::stod(match[1])) << result;
    }
    EXPECT_EQ(run_names(folder), expected);
    if (command.text.starts_with("leeway report")) {
      EXPECT_GT(named.size(), 1u);
      expect_report_of(folder / "report.html", named, expected);
    }
  }
  EXPECT_GT(expected.size(), 2u);
}

// The commands below "Try next:", without their explanations.
std::vector<std::string> suggestions(const std::string& text) {
  std::vector<std::string> commands;
  bool below = false;
  for (const std::string& line : lines_of(text)) {
    if (line == "Try next:") below = true;
    if (!below || !line.starts_with("  ")) continue;
    commands.push_back(line.substr(2, line.find("   ", 2) - 2));
  }
  return commands;
}

TEST(TryNext, IsRightInItsOrderInAnyFolder) {
  const TempFolder folder;
  fs::copy(kRoot / "examples", folder.path() / "examples", fs::copy_options::recursive);
  const std::string quick = " --set trainer.max_steps=1 --set sft.max_steps=1";
  // Also if there was a run before, and with settings that a suggestion must leave out.
  const std::vector<std::pair<std::string, std::string>> runs = {
      {"sort", quick},
      {"sort-2", quick + " --set trainer.loss.preset=ppo --set 'trainer.prox_forward = always'" +
                     " --set ' trainer.epochs = 2'"}};
  for (const auto& [first, settings] : runs) {
    const RunResult start = run_line(folder, "leeway train" + settings);
    ASSERT_EQ(start.code, 0) << start;
    const std::vector<std::string> commands = suggestions(start.err);
    ASSERT_GE(commands.size(), 6u) << start;
    EXPECT_EQ(start.out.find("Try next"), std::string::npos) << "stdout is the result";
    EXPECT_EQ(commands.front(), "cp runs/" + first + "/config.toml my.toml");
    for (const std::string& command : commands) {
      SCOPED_TRACE(command);
      const std::set<std::string> before = run_names(folder);
      const bool trains = command.starts_with("leeway train");
      const RunResult result = run_line(folder, command);
      ASSERT_EQ(result.code, 0) << result;
      const std::set<std::string> after = run_names(folder);
      if (trains) {
        for (const std::string& name : named_runs(command)) {
          EXPECT_FALSE(before.contains(name));
          EXPECT_TRUE(after.contains(name));
        }
      }
      EXPECT_EQ(after.size(), before.size() + (trains ? 1 : 0));
      if (command.starts_with("leeway report")) {
        EXPECT_TRUE(named_runs(command).contains(first));
        EXPECT_EQ(named_runs(command).size(), 2u);
        expect_report_of(folder / "report.html", named_runs(command), after);
      }
    }
  }
}

}  // namespace
}  // namespace leeway
