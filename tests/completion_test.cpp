// Shell completion and the man page, which the program makes from its own commands.

#include <unistd.h>

#include "cli_helpers.h"

namespace leeway {
namespace {

bool installed(const std::string& program) {
  return run_program({"-c", "command -v " + program}, {.program = "sh"}).code == 0;
}

struct HelpPage {
  std::string path;                  // "leeway loss eval"
  std::vector<std::string> options;  // long ones
};

// Every command with its options as --help lists them.
void collect(const std::vector<std::string>& words, std::vector<HelpPage>& pages) {
  std::vector<std::string> command = words;
  command.push_back("--help");
  const RunResult help = run_program(command);
  ASSERT_EQ(help.code, 0) << help;
  HelpPage page;
  page.path = "leeway";
  for (const std::string& word : words) page.path += " " + word;
  std::vector<std::string> below;
  bool commands = false;
  for (const std::string& line : lines_of(help.out)) {
    if (line == "Subcommands:") commands = true;
    if (!line.starts_with("  ") || line[2] == ' ') continue;
    const std::string name = line.substr(2, line.find(' ', 2) - 2);
    if (commands) below.push_back(name);
    const size_t dashes = name.find("--");
    if (!commands && dashes != std::string::npos) page.options.push_back(name.substr(dashes));
  }
  pages.push_back(page);
  for (const std::string& name : below) {
    std::vector<std::string> longer = words;
    longer.push_back(name);
    collect(longer, pages);
  }
}

const std::vector<HelpPage>& help_pages() {
  static const std::vector<HelpPage> pages = [] {
    std::vector<HelpPage> found;
    collect({}, found);
    return found;
  }();
  return pages;
}

// What bash offers for the last of these words.
std::vector<std::string> completed(const std::vector<std::string>& words,
                                   const std::string& directory = "") {
  std::string list;
  for (const std::string& word : words) list += " '" + word + "'";
  const RunResult result = run_program(
      {"-c", "source <(leeway completion bash); COMP_WORDS=(" + list + "); COMP_CWORD=" +
                 std::to_string(words.size() - 1) + "; _leeway; printf '%s\n' \"${COMPREPLY[@]}\""},
      {.directory = directory, .path_first = LEEWAY_BINARY_DIR, .program = "bash"});
  EXPECT_EQ(result.code, 0) << result;
  EXPECT_EQ(result.err, "") << result;
  std::vector<std::string> offered = lines_of(result.out);
  std::erase(offered, "");
  return offered;
}

using Words = std::vector<std::string>;

TEST(Completion, OffersCommandsAndTheirOptionsInBash) {
  ASSERT_GE(help_pages().size(), 20u);
  EXPECT_TRUE(has(completed({"leeway", ""}), "train"));
  EXPECT_EQ(completed({"leeway", "log"}), Words{"logprobs"});
  EXPECT_EQ(completed({"leeway", "loss", "ex"}), Words{"explain"});
  EXPECT_EQ(completed({"leeway", "loss", ""}),
            (Words{"list", "explain", "eval", "check", "compare"}));
  EXPECT_EQ(completed({"leeway", "help", "swe"}), Words{"sweep"});
  EXPECT_EQ(completed({"leeway", "generate", "--max"}), Words{"--max-new-tokens"});
  for (const HelpPage& page : help_pages()) {
    SCOPED_TRACE(page.path);
    Words words = {"leeway"};
    for (size_t at = 7; at < page.path.size();) {
      const size_t end = std::min(page.path.find(' ', at), page.path.size());
      words.push_back(page.path.substr(at, end - at));
      at = end + 1;
    }
    words.emplace_back("--");
    const Words offered = completed(words);
    for (const std::string& option : page.options) EXPECT_TRUE(has(offered, option)) << option;
  }
}

TEST(Completion, OffersValuesInBash) {
  EXPECT_EQ(completed({"leeway", "generate", "--precision", ""}),
            (Words{"float32", "bf16", "int8", "fp8"}));
  EXPECT_EQ(completed({"leeway", "generate", "--tokens", "t.json", "--device", "cu"}),
            Words{"cuda"});
  EXPECT_EQ(completed({"leeway", "generate", "--precision", "=", "b"}), Words{"bf16"});
  EXPECT_EQ(completed({"leeway", "completion", ""}), (Words{"bash", "zsh", "fish"}));
  EXPECT_TRUE(has(completed({"leeway", "loss", "explain", "ice"}), "icepop"));
  EXPECT_TRUE(has(completed({"leeway", "loss", "eval", "--preset", "verl/"}), "verl/vanilla"));
  EXPECT_EQ(completed({"leeway", "train", "run.toml", "--set", "trainer.max_st"}),
            Words{"trainer.max_steps="});
  EXPECT_TRUE(has(completed({"leeway", "loss", "explain", "ppo", "--set", "eps"}), "eps_low="));
  EXPECT_TRUE(completed({"leeway", "generate", "--top-k", ""}).empty()) << "a number";
}

TEST(Completion, OffersFilesInBash) {
  const TempFolder folder;
  folder.write("run.toml", "");
  folder.write("readme", "");
  EXPECT_EQ(completed({"leeway", "train", "ru"}, folder.path().string()), Words{"run.toml"});
  EXPECT_EQ(completed({"leeway", "generate", "--tokens", "read"}, folder.path().string()),
            Words{"readme"});
}

TEST(Completion, NamesEverythingForZshAndFishToo) {
  const RunResult zsh = run_program({"completion", "zsh"}),
                  fish = run_program({"completion", "fish"});
  expect_quiet_success(zsh);
  expect_quiet_success(fish);
  EXPECT_TRUE(zsh.out.starts_with("#compdef leeway\n"));
  for (const HelpPage& page : help_pages()) {
    SCOPED_TRACE(page.path);
    EXPECT_TRUE(contains(zsh.out, "    ('" + page.path + "')\n"));
    const std::string at =
        "'__leeway_at " + page.path.substr(std::min<size_t>(7, page.path.size())) + "'";
    for (const std::string& option : page.options) {
      EXPECT_TRUE(contains(zsh.out, option + "[")) << option;
      const size_t line = fish.out.find(at);
      ASSERT_NE(line, std::string::npos) << at;
      EXPECT_TRUE(contains(fish.out.substr(line), " -l " + option.substr(2) + " ")) << option;
    }
  }
  const TempFolder folder;
  const std::string zsh_file = folder.write("_leeway", zsh.out);
  const std::string fish_file = folder.write("leeway.fish", fish.out);
  if (installed("zsh")) {
    const RunResult parsed = run_program({"-n", zsh_file}, {.program = "zsh"});
    EXPECT_EQ(parsed.code, 0) << parsed;
  }
  if (installed("fish")) {
    const RunResult offered =
        run_program({"-c", "source " + fish_file + "; complete -C 'leeway generate --precision '"},
                    {.path_first = LEEWAY_BINARY_DIR, .program = "fish"});
    EXPECT_TRUE(contains(offered.out, "bf16")) << offered;
    EXPECT_EQ(run_program({"-n", fish_file}, {.program = "fish"}).code, 0);
  }
}

TEST(Completion, RefusesAnUnknownShell) {
  expect_mistake(run_program({"completion", "tcsh"}), {"tcsh", "bash"});
  expect_mistake(run_program({"completion"}), {"shell", "--help"});
}

TEST(ManPage, DescribesEveryCommandAndOption) {
  const RunResult man = run_program({"man"});
  expect_quiet_success(man);
  const auto escaped = [](const std::string& text) {
    std::string out;
    for (const char c : text) out += c == '-' ? std::string("\\-") : std::string(1, c);
    return out;
  };
  for (const char* part :
       {"NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "COMMANDS", "EXIT STATUS"}) {
    EXPECT_TRUE(contains(man.out, std::string("\n.SH ") + part + "\n")) << part;
  }
  for (const HelpPage& page : help_pages()) {
    SCOPED_TRACE(page.path);
    const std::string heading = "\n.SS \\fB" + page.path + "\\fR\n";
    if (page.path != "leeway") {
      EXPECT_TRUE(contains(man.out, heading));
    }
    const size_t start = page.path == "leeway" ? 0 : man.out.find(heading);
    const std::string text = man.out.substr(start, man.out.find("\n.SS ", start + 1) - start);
    for (const std::string& option : page.options) {
      if (option == "--help" && page.path != "leeway") continue;
      EXPECT_TRUE(contains(text, "\\fB" + escaped(option) + "\\fR")) << option;
    }
  }
  // Every line is text or a request that the page's macros know.
  for (const std::string& line : lines_of(man.out)) {
    if (!line.starts_with('.')) continue;
    const std::string request = line.substr(0, std::min(line.find(' '), line.size()));
    EXPECT_TRUE(has({".TH", ".SH", ".SS", ".TP", ".PP", ".\\\""}, request)) << line;
  }
}

TEST(ManPage, IsReadByGroffWithoutAWarning) {
  const TempFolder folder;
  const std::string page = folder.write("leeway.1", run_program({"man"}).out);
  if (!installed("groff")) return;  // the test above looks at its structure
  const RunResult shown =
      run_program({"-man", "-Tascii", "-P-c", "-P-b", "-P-u", "-ww", page}, {.program = "groff"});
  EXPECT_EQ(shown.code, 0) << shown;
  EXPECT_EQ(shown.err, "") << shown;
  EXPECT_TRUE(contains(shown.out, "EXIT STATUS")) << shown;
}

}  // namespace
}  // namespace leeway
