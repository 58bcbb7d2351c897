// Checks the documentation: paths and links exist, make targets exist, commands run.

#include <fnmatch.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <regex>
#include <set>

#include "page.h"

namespace leeway {
namespace {

// The path in a code span such as `src/core/spec.cpp:12`, or empty if it is not a path.
std::string path_in(const std::string& code) {
  static const char* const kFolders[] = {"src/",     "include/",  "docs/",  "tests/",
                                         "scripts/", "examples/", "cmake/", "benchmarks/"};
  if (std::none_of(std::begin(kFolders), std::end(kFolders),
                   [&](const char* folder) { return code.starts_with(folder); })) {
    return "";
  }
  std::string path = code.substr(0, code.find_first_of(" \t#"));
  path = path.substr(0, path.find(':'));
  while (path.ends_with(",") || path.ends_with(".") || path.ends_with(";")) path.pop_back();
  return path;
}

// Expands a/{b,c}.h to a/b.h and a/c.h.
std::vector<std::string> expanded(const std::string& path) {
  const size_t open = path.find('{'), close = path.find('}');
  if (open == std::string::npos || close == std::string::npos || close < open) return {path};
  std::vector<std::string> out;
  std::string word;
  for (const char c : path.substr(open + 1, close - open - 1) + ",") {
    if (c != ',') {
      word += c;
      continue;
    }
    for (const std::string& rest : expanded(path.substr(0, open) + word + path.substr(close + 1))) {
      out.push_back(rest);
    }
    word.clear();
  }
  return out;
}

bool exists_in(const fs::path& root, const std::string& path) {
  if (path.find_first_of("*?") == std::string::npos) return fs::exists(root / path);
  const std::string folder = path.substr(0, path.find('/'));
  if (!fs::is_directory(root / folder)) return false;
  for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
    if (::fnmatch(path.c_str(), fs::relative(entry.path(), root).c_str(), 0) == 0) return true;
  }
  return false;
}

std::vector<std::string> missing_paths(const Page& page, const fs::path& root) {
  std::vector<std::string> missing;
  for (const Span& span : page.code) {
    const std::string path = path_in(span.text);
    if (path.empty()) continue;
    for (const std::string& one : expanded(path)) {
      if (exists_in(root, one)) continue;
      // Placeholders such as `tests/NAME_test.cpp` are not files.
      if (std::regex_search(one, std::regex("[A-Z]{2,}|[<>]|\\.\\."))) continue;
      missing.push_back(std::to_string(span.line) + ": `" + span.text + "`");
    }
  }
  return missing;
}

std::vector<std::string> broken_links(const Page& page, const fs::path& file) {
  std::vector<std::string> broken;
  for (const Span& span : page.links) {
    if (std::regex_search(span.text, std::regex("^[a-z][a-z0-9+.-]*:")))
      continue;  // http:, mailto:
    const size_t hash = span.text.find('#');
    const std::string target = span.text.substr(0, hash);
    const fs::path path = target.empty() ? file : file.parent_path() / target;
    bool good = fs::exists(path);
    if (good && hash != std::string::npos && path.extension() == ".md") {
      const std::string anchor = span.text.substr(hash + 1);
      good = target.empty() ? page.slugs.contains(anchor)
                            : parse_page(file_text(path)).slugs.contains(anchor);
    }
    if (!good) broken.push_back(std::to_string(span.line) + ": " + span.text);
  }
  return broken;
}

std::set<std::string> targets_of(const std::string& makefile) {
  std::set<std::string> targets;
  for (const std::string& line : lines_of(makefile)) {
    const size_t colon = line.find(':');
    if (line.empty() || !std::isalpha(static_cast<unsigned char>(line[0])) ||
        colon == std::string::npos || line.compare(colon, 2, ":=") == 0 ||
        line.substr(0, colon).find_first_of("=?") != std::string::npos) {
      continue;
    }
    static const std::regex kSpaces("\\s+");
    const std::string names = line.substr(0, colon);
    for (std::sregex_token_iterator it(names.begin(), names.end(), kSpaces, -1), end; it != end;
         ++it) {
      if (!it->str().empty()) targets.insert(*it);
    }
  }
  return targets;
}

// Every target of `make a b` in a code span or a shell line.
std::vector<Span> make_targets(const Page& page) {
  std::vector<Span> found;
  static const std::regex kSpaces("\\s+"), kName("[a-z][a-z0-9_-]*");
  auto scan = [&](const Span& span) {
    if (!span.text.starts_with("make ")) return;
    const std::string words = span.text.substr(5, span.text.find_first_of("#&|;") - 5);
    for (std::sregex_token_iterator it(words.begin(), words.end(), kSpaces, -1), end; it != end;
         ++it) {
      if (std::regex_match(it->str(), kName)) found.push_back({span.line, *it});
    }
  };
  std::for_each(page.code.begin(), page.code.end(), scan);
  std::for_each(page.shell.begin(), page.shell.end(), scan);
  return found;
}

// ---------------------------------------------------------------------------------------------

std::vector<fs::path> pages() {
  std::vector<fs::path> found;
  for (const char* name : {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "src/README.md",
                           "benchmarks/README.md", "examples/README.md"}) {
    if (fs::exists(kRoot / name)) found.push_back(kRoot / name);
  }
  if (fs::exists(kRoot / "docs")) {
    for (const auto& entry : fs::directory_iterator(kRoot / "docs")) {
      if (entry.path().extension() == ".md") found.push_back(entry.path());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string out;
  for (const std::string& line : lines) out += line + "\n";
  return out;
}

TEST(Docs, HaveAReadme) { EXPECT_TRUE(fs::exists(kRoot / "README.md")); }

TEST(Docs, NamePathsThatExist) {
  for (const fs::path& file : pages()) {
    const auto missing = missing_paths(parse_page(file_text(file)), kRoot);
    EXPECT_TRUE(missing.empty()) << file.filename() << " names what is not there:\n"
                                 << joined(missing);
  }
}

TEST(Docs, LinkToFilesAndHeadingsThatExist) {
  for (const fs::path& file : pages()) {
    const auto broken = broken_links(parse_page(file_text(file)), file);
    EXPECT_TRUE(broken.empty()) << file.filename() << " links to what is not there:\n"
                                << joined(broken);
  }
}

TEST(Docs, NameTargetsOfTheMakefile) {
  const std::set<std::string> targets = targets_of(file_text(kRoot / "Makefile"));
  EXPECT_TRUE(targets.contains("test"));
  for (const fs::path& file : pages()) {
    for (const Span& span : make_targets(parse_page(file_text(file)))) {
      EXPECT_TRUE(targets.contains(span.text))
          << file.filename() << " line " << span.line << ": make " << span.text;
    }
  }
}

TEST(Docs, ShowCommandsThatRun) {
  const TempFolder copy;
  fill_copy(copy.path());
  size_t count = 0;
  for (const fs::path& file : pages()) {
    if (file.filename() == "README.md" && file.parent_path() == kRoot) continue;  // readme_test
    if (kTranscripts.contains(file.filename().string())) continue;  // transcripts_test
    for (const Command& command : commands_of(parse_page(file_text(file)))) {
      const RunResult result = run_program(
          {"-c", command.text},
          {.directory = copy.path().string(), .path_first = LEEWAY_BINARY_DIR, .program = "sh"});
      EXPECT_EQ(result.code, command.exit_code)
          << file.filename() << " line " << command.line << ": " << command.text << "\n"
          << result;
      ++count;
    }
  }
  std::cout << count << " commands\n";
}

TEST(Docs, HoldTheReferencePageThatTheProgramPrints) {
  const fs::path page = kRoot / "docs" / "losses.md";
  ASSERT_TRUE(fs::exists(page));
  const RunResult printed = run_program({"loss", "list", "--markdown"});
  ASSERT_EQ(printed.code, 0) << printed;
  const std::vector<std::string> got = lines_of(file_text(page)), expected = lines_of(printed.out);
  for (size_t i = 0; i < std::max(got.size(), expected.size()); ++i) {
    const std::string a = i < got.size() ? got[i] : "(nothing)";
    const std::string b = i < expected.size() ? expected[i] : "(nothing)";
    ASSERT_EQ(a, b) << "line " << i + 1
                    << "; write it anew with `leeway loss list --markdown > docs/losses.md`";
  }
}

// The lines of a page from a heading to the next of its level, with their numbers.
std::vector<Span> section(const std::string& page, const std::string& heading) {
  std::vector<Span> lines;
  bool inside = false;
  size_t number = 0;
  for (const std::string& line : lines_of(page)) {
    ++number;
    if (line.starts_with("## ")) inside = line == "## " + heading;
    if (inside) lines.push_back({number, line});
  }
  return lines;
}

// What is wrong with a walk through the code: `path`: `name()` says that the function is in the
// file, and each is named once.
std::vector<std::string> wrong_in_walk(const std::vector<Span>& lines, const fs::path& root) {
  static const std::regex kCode("`([^`]+)`"), kFunction(R"(([A-Za-z_:]+)\(\))");
  std::vector<std::string> wrong;
  std::set<std::string> seen;
  std::string file, text;
  for (const Span& line : lines) {
    for (std::sregex_iterator it(line.text.begin(), line.text.end(), kCode), end; it != end; ++it) {
      const std::string code = (*it)[1];
      const std::string place = std::to_string(line.line) + ": " + code;
      if (code.starts_with("src/")) {
        file = code;
        text = fs::is_regular_file(root / file) ? file_text(root / file) : "";
        if (text.empty()) wrong.push_back(place + " is no file");
        continue;
      }
      std::smatch match;
      if (!std::regex_match(code, match, kFunction)) continue;
      const std::string name = match[1];
      if (!seen.insert(name).second) wrong.push_back(place + " is named twice");
      const std::string last = name.substr(name.rfind(':') + 1);
      if (!std::regex_search(text, std::regex("\\b" + last + "\\("))) {
        wrong.push_back(place + " is not in " + file);
      }
    }
  }
  return wrong;
}

TEST(Docs, WalkThroughFunctionsThatExist) {
  const auto walk = section(file_text(kRoot / "docs" / "architecture.md"), "The walk");
  EXPECT_GT(walk.size(), 50u);
  EXPECT_EQ(joined(wrong_in_walk(walk, kRoot)), "");
}

TEST(Docs, AreAllInTheIndex) {
  const Page index = parse_page(file_text(kRoot / "docs" / "README.md"));
  std::set<std::string> linked;
  for (const Span& span : index.links) linked.insert(span.text);
  for (const auto& entry : fs::directory_iterator(kRoot / "docs")) {
    const std::string name = entry.path().filename().string();
    if (name == "README.md" || entry.path().extension() != ".md") continue;
    EXPECT_TRUE(linked.contains(name)) << name;
  }
}

TEST(Docs, HoldTheTableOfOtherCodeBasesKeysThatTheProgramPrints) {
  const RunResult printed = run_program({"config", "--migration"});
  ASSERT_EQ(printed.code, 0) << printed;
  const std::string page = file_text(kRoot / "docs" / "migration.md");
  const std::string begin = printed.out.substr(0, printed.out.find('\n'));
  const std::string end = "<!-- end of keys -->\n";
  const size_t start = page.find(begin), stop = page.find(end);
  ASSERT_TRUE(start != std::string::npos && stop != std::string::npos) << "the markers are gone";
  const std::vector<std::string> got = lines_of(page.substr(start, stop + end.size() - start)),
                                 expected = lines_of(printed.out);
  for (size_t i = 0; i < std::max(got.size(), expected.size()); ++i) {
    ASSERT_EQ(i < got.size() ? got[i] : "(nothing)",
              i < expected.size() ? expected[i] : "(nothing)")
        << "put what `leeway config --migration` prints between the markers of docs/migration.md";
  }
}

// ---------------------------------------------------------------------------------------------
// The checker itself, on a made-up page

const std::string kPage =
    "# The Title: `here`\n"
    "See `src/a.cpp`, `src/gone.cpp:12`, `docs/{b,gone}.md` and `src/*.cpp`; "
    "`tests/NAME_test.cpp`.\n"
    "[good](docs/b.md#part-one) [bad](docs/c.md) [web](https://example.org/x) "
    "[here](#the-title-here)\n"
    "[nowhere](docs/b.md#part-two) `make test` or `make frobnicate JOBS=2`\n"
    "```sh\n"
    "make build\n"
    "leeway loss list\n"
    "leeway loss explain nosuch   # exit 2\n"
    "leeway loss eval --preset is \\\n"
    "  --batch YOURS.json\n"
    "$ leeway loss compare \\\n"
    "  --json\n"
    "leeway loss eval --batch F.json\n"
    "leeway loss eval [--set k=v ..]\n"
    "echo leeway\n"
    "```\n"
    "```text\n"
    "leeway not a command `src/not_a_path.cpp`\n"
    "```\n";

TEST(DocsChecker, FindsWhatAPageNames) {
  const TempFolder folder;
  fs::create_directory(folder / "src");
  fs::create_directory(folder / "docs");
  folder.write("src/a.cpp", "");
  folder.write("docs/b.md", "# B\n## Part one\n");
  const fs::path file = folder.write("README.md", kPage);
  const Page page = parse_page(kPage);
  const std::vector<std::string> missing = missing_paths(page, folder.path());
  EXPECT_EQ(missing, (std::vector<std::string>{"2: `src/gone.cpp:12`", "2: `docs/{b,gone}.md`"}));
  EXPECT_EQ(broken_links(page, file),
            (std::vector<std::string>{"3: docs/c.md", "4: docs/b.md#part-two"}));
  std::vector<std::string> targets;
  for (const Span& span : make_targets(page)) targets.push_back(span.text);
  EXPECT_EQ(targets, (std::vector<std::string>{"test", "frobnicate", "build"}));
  const std::vector<Command> commands = commands_of(page);
  ASSERT_EQ(commands.size(), 3u);
  EXPECT_EQ(commands[0].text, "leeway loss list");
  EXPECT_EQ(commands[0].exit_code, 0);
  EXPECT_EQ(commands[1].exit_code, 2);
  EXPECT_EQ(commands[2].text, "leeway loss compare   --json");
}

TEST(DocsChecker, FindsWhatAWalkGetsWrong) {
  const TempFolder folder;
  fs::create_directory(folder / "src");
  folder.write("src/a.cpp", "void A::go(int) {}\nvoid stay() {}\nint gone;\n");
  const std::string page =
      "# Page\n## Walk\n`src/a.cpp`: `A::go()` and `stay()`, then `gone()`.\n"
      "Again `stay()`; `src/b.cpp`: `go_on()`.\n## More\n`nothing()`\n";
  EXPECT_EQ(
      wrong_in_walk(section(page, "Walk"), folder.path()),
      (std::vector<std::string>{"3: gone() is not in src/a.cpp", "4: stay() is named twice",
                                "4: src/b.cpp is no file", "4: go_on() is not in src/b.cpp"}));
}

TEST(DocsChecker, FindsTheTargetsOfAMakefile) {
  EXPECT_EQ(targets_of("A ?= b\nC := d\n.PHONY: x\nbuild:\n\t@echo a: b\nasan tsan: build\n"),
            (std::set<std::string>{"asan", "build", "tsan"}));
}

}  // namespace
}  // namespace leeway
