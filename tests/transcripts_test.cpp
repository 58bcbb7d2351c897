// The pages that a newcomer follows, as one follows them: files are written as the page shows them,
// commands run in their order in an empty folder, and the output shown is the output.

#include <gtest/gtest.h>

#include <regex>

#include "page.h"

namespace leeway {
namespace {

// A page as a list of things to do and see, in order.
struct Step {
  enum class Kind { file, command, output };
  Kind kind;
  size_t line;
  std::string name;  // of a file
  std::string text;
};

// A fence after a line that ends in `NAME`: is the file NAME; sh is commands, a line each; text
// after sh, in the same section, is what the commands print. Other fences are not part of the
// transcript.
std::vector<Step> steps_of(const std::string& page) {
  static const std::regex kNamed("`([A-Za-z0-9_./-]+\\.[a-z]+)`:$");
  std::vector<Step> steps;
  std::string fence, before;  // the language of the fence we are in; the last line of prose
  bool inside = false, ran = false;
  size_t number = 0;
  for (const std::string& line : lines_of(page)) {
    ++number;
    if (line.starts_with("```")) {
      inside = !inside;
      if (!inside) continue;
      fence = line.substr(3);
      std::smatch match;
      const bool named = std::regex_search(before, match, kNamed);
      if (named && fence != "sh" && fence != "text") {
        steps.push_back({Step::Kind::file, number, match[1], ""});
        fence = "file";
      } else if (fence == "text" && ran) {
        steps.push_back({Step::Kind::output, number, "", ""});
      } else if (fence == "text") {
        fence = "";
      }
      ran = fence == "sh";
      before.clear();
      continue;
    }
    if (!inside) {
      if (!line.empty()) before = line;
      if (line.starts_with("#")) ran = false;
      continue;
    }
    if (fence == "sh" && !has_placeholder(line)) {
      steps.push_back({Step::Kind::command, number, "", line});
    } else if (fence == "file" || fence == "text") {
      steps.back().text += line + "\n";
    }
  }
  return steps;
}

// Blanks of any length are one; so are numbers, where these depend on the machine.
std::string collapsed(const std::string& text, bool with_numbers) {
  static const std::regex kTimeLeft(" +[0-9][^\n]* left\\b"), kBlanks("\\s+"),
      kNumber("-?[0-9]+(\\.[0-9]+)?(e[-+]?[0-9]+)?k?");
  std::string out = text;
  if (!with_numbers) {
    out = std::regex_replace(out, kTimeLeft, "");
    out = std::regex_replace(out, kNumber, "#");
  }
  return std::regex_replace(out, kBlanks, " ");
}

// What of `shown` is not in the outputs, in its order; empty if all of it is. "..." leaves out.
std::string missing_from(const std::string& shown, const std::vector<std::string>& outputs,
                         bool with_numbers) {
  std::vector<std::string> texts;
  for (const std::string& output : outputs) texts.push_back(collapsed(output, with_numbers));
  std::vector<size_t> places(texts.size(), 0);
  for (const std::string& line : lines_of(shown)) {
    static const std::regex kDots("\\.\\.\\.");
    for (std::sregex_token_iterator it(line.begin(), line.end(), kDots, -1), end; it != end; ++it) {
      std::string piece = collapsed(*it, with_numbers);
      while (piece.starts_with(" ")) piece.erase(0, 1);
      while (piece.ends_with(" ")) piece.pop_back();
      bool found = piece.empty();
      for (size_t i = 0; i < texts.size() && !found; ++i) {
        const size_t place = texts[i].find(piece, places[i]);
        if (place == std::string::npos) continue;
        places[i] = place + piece.size();
        found = true;
      }
      if (!found) return piece;
    }
  }
  return "";
}

// Training depends on the machine's vector instructions and its speed. Losses and texts do not.
bool depends_on_machine(const std::string& command) {
  return command.starts_with("leeway train") || command.starts_with("leeway eval") ||
         command.starts_with("leeway generate");
}

void follow(const std::string& name) {
  const TempFolder folder;
  fs::copy(kRoot / "examples", folder.path() / "examples", fs::copy_options::recursive);
  fs::create_directory_symlink(kRoot / "tests", folder / "tests");
  static const std::regex kExit(R"(#\s*exit (\d+)\s*$)");
  std::vector<std::string> outputs;  // of the commands of the last sh fence
  bool exact = true, shown = false;
  size_t commands = 0, transcripts = 0;
  for (const Step& step : steps_of(file_text(kRoot / "docs" / name))) {
    SCOPED_TRACE(name + " line " + std::to_string(step.line) + ": " + step.text);
    if (step.kind == Step::Kind::file) {
      fs::create_directories((folder.path() / step.name).parent_path());
      folder.write(step.name, step.text);
    } else if (step.kind == Step::Kind::command) {
      if (shown) {
        outputs.clear();
        exact = true;
        shown = false;
      }
      std::smatch match;
      const bool says = std::regex_search(step.text, match, kExit);
      const RunResult result = run_program(
          {"-c", step.text},
          {.directory = folder.path().string(), .path_first = LEEWAY_BINARY_DIR, .program = "sh"});
      ASSERT_EQ(result.code, says ? std::stoi(match[1]) : 0) << result;
      outputs.push_back(result.err);
      outputs.push_back(result.out);
      exact = exact && !depends_on_machine(step.text);
      ++commands;
    } else {
      const std::string missing = missing_from(step.text, outputs, exact);
      EXPECT_EQ(missing, "") << "is not in the output:\n" << ::testing::PrintToString(outputs);
      shown = true;
      ++transcripts;
    }
  }
  EXPECT_GT(commands, 0u);
  std::cout << commands << " commands, " << transcripts << " transcripts\n";
}

class Transcripts : public ::testing::TestWithParam<std::string> {};

TEST_P(Transcripts, AreWhatAReaderSees) {
  const bool python = contains(file_text(kRoot / "docs" / GetParam()), "\npython3 ");
  if (python && run_program({"-c", "1"}, {.program = "python3"}).code != 0) {
    GTEST_SKIP() << "there is no python3";
  }
  follow(GetParam());
}

INSTANTIATE_TEST_SUITE_P(Pages, Transcripts, ::testing::ValuesIn(kTranscripts),
                         [](const auto& page) {
                           return std::regex_replace(page.param, std::regex("[^a-z]"), "_");
                         });

// ---------------------------------------------------------------------------------------------
// The checker itself

TEST(TranscriptChecker, ReadsFilesCommandsAndOutputs) {
  const std::vector<Step> steps = steps_of(
      "Write `a/b.toml`:\n\n```toml\nx = 1\n```\n\n```sh\nleeway x\nleeway y FILE\n```\n\n"
      "```text\nseen\n```\n\n```text\nnot an output\n```\n\n```toml\nnot = \"a file\"\n```\n");
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_EQ(steps[0].name, "a/b.toml");
  EXPECT_EQ(steps[0].text, "x = 1\n");
  EXPECT_EQ(steps[1].text, "leeway x");
  EXPECT_EQ(steps[2].text, "seen\n");
}

TEST(TranscriptChecker, FindsWhatIsNotInAnOutput) {
  EXPECT_EQ(missing_from("a  1\n...\nc ... e\n", {"a 1\nb\n", "c d e\n"}, true), "");
  EXPECT_EQ(missing_from("a 2\n", {"a 1\n"}, true), "a 2");
  EXPECT_EQ(missing_from("a 2\n", {"a 1\n"}, false), "");
  EXPECT_EQ(missing_from("b\na\n", {"a\nb\n"}, true), "a") << "in another order";
  EXPECT_EQ(missing_from("step  1/60  lag 0  31k tokens/s  9 s left\n",
                         {"step  1/60  lag 0  8k tokens/s  1 min 2 s left\n"}, false),
            "");
}

}  // namespace
}  // namespace leeway
