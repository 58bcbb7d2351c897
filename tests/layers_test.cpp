// The rules of the source tree: which layer may include which, the form of files, where tests are
// placed, and that a type name has one meaning. The build's target links enforce most of this too,
// but this test names the mistake.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <regex>
#include <set>

#include "run_program.h"
#include "type_definitions.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

const fs::path kRoot = LEEWAY_SOURCE_DIR;
constexpr size_t kMostLines = 800;

struct SourceFile {
  std::string path;  // from the repository's root, e.g. src/core/spec.cpp
  std::string text;
};

// What each layer may include besides itself, as in the architecture diagram: dependencies only go
// downwards. `cli` wires everything together.
const std::map<std::string, std::set<std::string>> kMayInclude = {
    {"base", {}},
    {"data", {"base"}},
    {"kernels", {"base"}},
    {"core", {"kernels", "base"}},
    {"config", {"core", "kernels", "base"}},
    {"text", {"data", "base"}},
    {"report", {"base"}},
    {"ranks", {"base"}},
    {"cuda", {"core", "kernels", "base"}},
    {"model", {"core", "kernels", "config", "data", "base"}},
    {"gguf", {"model", "text", "core", "kernels", "config", "data", "base"}},
    {"engine", {"model", "core", "kernels", "config", "data", "base"}},
    {"server",
     {"generate", "engine", "text", "model", "core", "kernels", "config", "data", "base"}},
    {"trainer", {"ranks", "model", "core", "kernels", "config", "data", "base"}},
    {"torch",
     {"trainer", "engine", "ranks", "cuda", "model", "core", "kernels", "config", "data", "base"}},
    {"orchestrator", {"text", "config", "data", "base"}},
    {"pool", {"orchestrator", "text", "model", "core", "kernels", "config", "data", "base"}},
    {"run",
     {"pool", "orchestrator", "trainer", "engine", "torch", "model", "core", "kernels", "config",
      "text", "ranks", "report", "data", "base"}},
    {"generate",
     {"run", "trainer", "engine", "model", "core", "kernels", "config", "text", "data", "base"}},
    {"sweep",
     {"run", "orchestrator", "trainer", "model", "core", "config", "report", "data", "base"}},
};
// The only folders that may include torch: its headers are slow to compile, and a program that
// needs no GPU starts without it.
const std::vector<std::string> kTorchFolders = {"src/torch/"};
// Third-party libraries whose documentation asks for quotes.
const std::set<std::string> kQuotedLibraries = {"hwy"};
// Layers that do not see core use only the public headers that belong to base.
const std::set<std::string> kWithoutCore = {"base", "data", "kernels", "ranks", "report", "text"};
const std::set<std::string> kHeadersOfBase = {"leeway/error.h", "leeway/metric_list.h"};

std::string layer_of(const std::string& path) {
  if (!path.starts_with("src/")) return "";
  const size_t end = path.find('/', 4);
  return end == std::string::npos ? "" : path.substr(4, end - 4);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find('\n', start), text.size());
    lines.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return lines;
}

bool is_code(const std::string& path) {
  const std::string extension = fs::path(path).extension().string();
  return extension == ".h" || extension == ".cpp" || extension == ".cu" || extension == ".cuh";
}

void check_include(const SourceFile& file, const std::string& where, const std::string& target,
                   bool quoted, std::vector<std::string>& problems) {
  const std::string layer = layer_of(file.path);
  const std::string folder = target.substr(0, target.find('/'));
  const std::set<std::string> torch = {"torch", "ATen", "c10", "caffe2"};
  const bool may_use_torch =
      std::any_of(kTorchFolders.begin(), kTorchFolders.end(),
                  [&](const std::string& prefix) { return file.path.starts_with(prefix); });
  if (!quoted && torch.contains(folder) && !may_use_torch) {
    problems.push_back(where + ": torch belongs to src/torch");
    return;
  }
  if (!quoted || kQuotedLibraries.contains(folder)) return;
  const bool is_public = file.path.starts_with("include/");
  if (folder == "leeway") {
    if (kWithoutCore.contains(layer) && !kHeadersOfBase.contains(target)) {
      problems.push_back(where + ": " + layer + " does not see core: " + target + " belongs to it");
    }
    return;
  }
  if (is_public) {
    problems.push_back(where + ": a public header includes public headers alone");
    return;
  }
  if (layer == "cli" || folder == layer) return;
  const auto allowed = kMayInclude.find(layer);
  if (allowed == kMayInclude.end()) {
    problems.push_back(where + ": the layer " + layer + " is not known to this test");
  } else if (!kMayInclude.contains(folder) && folder != "cli") {
    problems.push_back(where + ": includes are written from src/ or include/, with their folder");
  } else if (!allowed->second.contains(folder)) {
    problems.push_back(where + ": " + layer + " must not include " + folder);
  }
}

// foo_test.cpp, or foo_some_aspect_test.cpp, is next to foo.cpp or foo.h, or tests the public
// header foo.h. A test of a whole folder has the folder's name.
bool lies_beside_its_source(const fs::path& test, const std::set<std::string>& paths) {
  std::string name = test.stem().string();
  name.resize(name.size() - std::string_view("_test").size());
  if (name == test.parent_path().filename()) return true;
  while (true) {
    const std::string beside = (test.parent_path() / name).string();
    for (const std::string& source : {beside + ".cpp", beside + ".h", beside + ".cu",
                                      beside + "-inl.h", "include/leeway/" + name + ".h"}) {
      if (paths.contains(source)) return true;
    }
    const size_t word = name.rfind('_');
    if (word == std::string::npos) return false;
    name.resize(word);
  }
}

// Two types with one name in one namespace are undefined behaviour as soon as a program contains
// both, and the linker does not report it. Types in anonymous namespaces are local to their file.
void check_type_names(const std::vector<SourceFile>& files, std::vector<std::string>& problems) {
  std::map<std::string, std::string> known;  // name -> path of the first definition
  for (const SourceFile& file : files) {
    if (!is_code(file.path)) continue;
    for (const TypeDefinition& type : type_definitions(file.text)) {
      const auto [first, is_new] = known.emplace(type.name, file.path);
      if (is_new || first->second == file.path) continue;
      problems.push_back(file.path + ":" + std::to_string(type.line) + ": " + type.name +
                         " is defined in " + first->second + " too");
    }
  }
}

// Every violation, as "path:line: problem".
std::vector<std::string> problems_of(const std::vector<SourceFile>& files) {
  std::vector<std::string> problems;
  std::set<std::string> paths;
  for (const SourceFile& file : files) paths.insert(file.path);
  const std::regex include(R"(^\s*#\s*include\s*([<"])([^>"]+)[>"])");
  for (const SourceFile& file : files) {
    const std::vector<std::string> lines = lines_of(file.text);
    for (size_t i = 0; i < lines.size(); ++i) {
      const std::string where = file.path + ":" + std::to_string(i + 1);
      const auto odd = std::find_if(lines[i].begin(), lines[i].end(), [](char c) {
        return static_cast<unsigned char>(c) >= 0x80 || c == '\r';
      });
      if (odd != lines[i].end()) problems.push_back(where + ": a byte that is not ASCII");
      std::smatch match;
      const bool in_layer = file.path.starts_with("src/") || file.path.starts_with("include/");
      if (in_layer && is_code(file.path) && std::regex_search(lines[i], match, include)) {
        check_include(file, where, match[2], match[1] == "\"", problems);
      }
    }
    if (lines.size() > kMostLines) {
      problems.push_back(file.path + ": " + std::to_string(lines.size()) + " lines, at most " +
                         std::to_string(kMostLines) + " are readable");
    }
    const fs::path path = file.path;
    // Such a header is included several times, for example once per instruction set.
    const bool included_again =
        contains(file.text, "defined(HWY_TARGET_TOGGLE)") || path.stem().string().ends_with("-inl");
    if (path.extension() == ".h" && !included_again &&
        std::find(lines.begin(), lines.end(), "#pragma once") == lines.end()) {
      problems.push_back(file.path + ": a header without #pragma once");
    }
    if (file.path.starts_with("src/") && path.stem().string().ends_with("_test") &&
        !lies_beside_its_source(path, paths)) {
      problems.push_back(file.path + ": what it is named after does not lie beside it");
    }
  }
  check_type_names(files, problems);
  return problems;
}

std::vector<SourceFile> tree() {
  std::vector<SourceFile> files;
  for (const char* folder :
       {"src", "include", "tests", "benchmarks", "examples", "cmake", "scripts"}) {
    if (!fs::exists(kRoot / folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(kRoot / folder)) {
      if (!entry.is_regular_file()) continue;
      const std::string path = fs::relative(entry.path(), kRoot).string();
      const std::string name = entry.path().filename().string();
      const bool script = path.starts_with("scripts/") && entry.path().extension().empty();
      if (is_code(path) || name == "CMakeLists.txt" || name.ends_with(".cmake") || script) {
        files.push_back({path, file_text(entry.path())});
      }
    }
  }
  return files;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string out;
  for (const std::string& line : lines) out += line + "\n";
  return out;
}

TEST(SourceTree, KeepsItsRules) {
  const std::vector<SourceFile> files = tree();
  ASSERT_GT(files.size(), 50u);
  const std::vector<std::string> problems = problems_of(files);
  EXPECT_TRUE(problems.empty()) << joined(problems);
}

// ---------------------------------------------------------------------------------------------
// The checker itself, on made-up files

std::vector<std::string> problems_in(const std::string& path, const std::string& text) {
  return problems_of({{path, text}});
}

TEST(LayerChecker, AllowsWhatTheArchitectureAllows) {
  for (const auto& [path, text] : std::vector<std::pair<std::string, std::string>>{
           {"src/base/a.cpp",
            "#include \"base/a.h\"\n#include <vector>\n#include \"leeway/error.h\"\n"},
           {"src/core/a.cpp", "#include \"base/a.h\"\n#include \"core/foreign/b.h\"\n"},
           {"src/core/foreign/a.cpp", "#include \"core/b.h\"\n#include \"leeway/loss.h\"\n"},
           {"src/config/a.cpp", "#include \"core/a.h\"\n#include \"base/a.h\"\n"},
           {"src/report/a.cpp", "#include \"base/a.h\"\n#include \"leeway/error.h\"\n"},
           {"src/torch/ops/a.cpp", "#include <torch/torch.h>\n#include \"kernels/a.h\"\n"},
           {"src/torch/a.cpp", "#include <torch/torch.h>\n#include \"model/a.h\"\n"},
           {"src/cli/a.cpp", "#include \"report/a.h\"\n#include \"engine/a.h\"\n"},
           {"include/leeway/a.h", "#pragma once\n#include \"leeway/b.h\"\n"}}) {
    EXPECT_TRUE(problems_in(path, text).empty()) << path << ": " << joined(problems_in(path, text));
  }
}

TEST(LayerChecker, FindsAnIncludeThatGoesBack) {
  for (const auto& [path, text] : std::vector<std::pair<std::string, std::string>>{
           {"src/base/a.cpp", "\n#include \"core/b.h\"\n"},
           {"src/base/a.cpp", "\n#include \"leeway/loss.h\"\n"},
           {"src/core/a.cpp", "\n  #  include \"config/b.h\"\n"},
           {"src/core/cpu/a.cpp", "\n#include \"report/b.h\"\n"},
           {"src/core/a.cpp", "\n#include \"cli/b.h\"\n"},
           {"src/config/a.cpp", "\n#include \"report/b.h\"\n"},
           {"src/report/a.cpp", "\n#include \"core/b.h\"\n"},
           {"src/report/a.cpp", "\n#include \"leeway/presets.h\"\n"},
           {"src/orchestrator/a.cpp", "\n#include \"engine/b.h\"\n"},
           {"src/kernels/a.cpp", "\n#include \"core/b.h\"\n"},
           {"src/model/a.cpp", "\n#include \"engine/b.h\"\n"},
           {"src/core/a.cpp", "\n#include \"beside.h\"\n"},
           {"src/nowhere/a.cpp", "\n#include \"base/b.h\"\n"},
           {"include/leeway/a.h", "#pragma once\n#include \"core/b.h\"\n"}}) {
    const std::vector<std::string> problems = problems_in(path, text);
    ASSERT_EQ(problems.size(), 1u) << path << ": " << joined(problems);
    EXPECT_TRUE(problems[0].starts_with(path + ":2: ")) << problems[0];
  }
}

TEST(LayerChecker, FindsTorchWhereItDoesNotBelong) {
  for (const char* header : {"<torch/torch.h>", "<ATen/ATen.h>", "<c10/core/Device.h>"}) {
    for (const char* path : {"src/core/a.cpp", "src/base/a.h", "src/model/a.cpp"}) {
      const auto problems =
          problems_in(path, std::string("#pragma once\n#include ") + header + "\n");
      ASSERT_EQ(problems.size(), 1u) << path;
      EXPECT_TRUE(contains(problems[0], "torch")) << problems[0];
    }
  }
}

TEST(LayerChecker, FindsFilesThatAreLongOddOrUnguarded) {
  std::string lines;
  for (size_t i = 0; i < kMostLines; ++i) lines += "// line\n";
  EXPECT_TRUE(problems_in("src/core/a.cpp", lines).empty());
  EXPECT_EQ(problems_in("src/core/a.cpp", lines + "// one more\n").size(), 1u);
  EXPECT_EQ(problems_in("src/core/a.cpp", "// caf\xc3\xa9\n").size(), 1u);
  EXPECT_EQ(problems_in("src/core/a.cpp", "int a;\r\n").size(), 1u);
  EXPECT_EQ(problems_in("src/core/a.h", "// #pragma once is missing\n").size(), 1u);
}

TEST(LayerChecker, FindsATestThatIsNotBesideItsSource) {
  EXPECT_EQ(problems_in("src/core/a_test.cpp", "int a;\n").size(), 1u);
  EXPECT_TRUE(problems_of({{"src/core/a_test.cpp", ""}, {"src/core/a.cpp", ""}}).empty());
  EXPECT_TRUE(
      problems_of({{"src/core/a_test.cpp", ""}, {"src/core/a.h", "#pragma once\n"}}).empty());
  EXPECT_TRUE(
      problems_of({{"src/core/a_test.cpp", ""}, {"include/leeway/a.h", "#pragma once\n"}}).empty());
  EXPECT_TRUE(problems_of({{"src/core/a_b_test.cpp", ""}, {"src/core/a.cpp", ""}}).empty());
  EXPECT_TRUE(problems_of({{"src/core/core_test.cpp", ""}}).empty());
  EXPECT_EQ(problems_of({{"src/core/a_test.cpp", ""}, {"src/base/a.cpp", ""}}).size(), 1u);
}

TEST(LayerChecker, FindsATypeNameThatIsDefinedTwice) {
  const std::string first = "namespace leeway {\nstruct Twice {\n  int a;\n};\n}\n";
  for (const char* text :
       {"namespace leeway {\nclass Twice {};\n}", "namespace leeway {\nenum class Twice { a };\n}",
        "namespace leeway {\nclass Twice final : public Base, Other<int, 2> {};\n}",
        "namespace leeway {\ntemplate <class T, int n> struct Twice {};\n}",
        "namespace leeway {\nenum Twice : int { a };\n}",
        "namespace leeway {\nstruct [[nodiscard]] alignas(16) Twice {};\n}",
        "namespace leeway { namespace { struct A { int b; }; }\nunion Twice { int a; };\n}",
        "namespace leeway { extern \"C\" { void f(); }\nstruct Twice {};\n}",
        "namespace leeway { char c = '{', *s = \"{\", *r = R\"x({)x\"; /* { */ // {\nstruct Twice "
        "{};\n}",
        "namespace leeway { constexpr int n = 1'000; const char* f() { return \"'\"; }\nstruct "
        "Twice "
        "{};\n}",
        "namespace leeway {\n#define OPEN { \\\n  {\nstruct Twice {};\n}"}) {
    const auto problems = problems_of({{"src/core/a.cpp", first}, {"src/run/b.cpp", text}});
    ASSERT_EQ(problems.size(), 1u) << text << "\n" << joined(problems);
    EXPECT_TRUE(problems[0].starts_with("src/run/b.cpp:")) << problems[0];
    EXPECT_TRUE(contains(problems[0], "leeway::Twice is defined in src/core/a.cpp too"))
        << problems[0];
  }
  EXPECT_TRUE(contains(joined(problems_of({{"src/core/a.cpp", first},
                                           {"tests/b.cpp",
                                            "\n\nnamespace leeway {\nstruct Twice "
                                            "{};\n}\n"}})),
                       "tests/b.cpp:4: "));
}

TEST(LayerChecker, LetsTypesShareANameWhereTheyAreNotTheSame) {
  const std::string first = "namespace leeway {\nstruct Once {\n  struct Inner {};\n};\n}\n";
  for (const char* text :
       {"namespace leeway { namespace {\nstruct Once {};\n} }",
        "namespace leeway::other {\nstruct Once {};\n}",
        "namespace leeway { namespace other {\nstruct Once {};\n} }", "struct Once {};",
        "namespace leeway {\nstruct Once;\nclass Once; enum class Mode : int;\n}",
        "namespace leeway {\nstruct Outer {\n  struct Once {};\n};\nstruct Outer2 { struct Inner "
        "{}; };\n}",
        "namespace leeway {\nvoid f() {\n  struct Once {};\n}\n}",
        "namespace leeway {\nstruct Once make(struct Once a, int b) { return a; }\n}",
        "namespace leeway {\nstruct Once value = {};\ntemplate <class Once> void g() {}\n}",
        "namespace leeway {\ntemplate <>\nstruct Once<int> {};\n}",
        "namespace leeway {\n// struct Once {};\n/* struct Once {}; */\n}",
        "namespace leeway {\nconst char* s = \"struct Once {\";\n}"}) {
    const auto problems = problems_of({{"src/core/a.cpp", first}, {"src/run/b.cpp", text}});
    EXPECT_TRUE(problems.empty()) << text << "\n" << joined(problems);
  }
  // With #if a file may contain it twice.
  EXPECT_TRUE(
      problems_in("src/core/a.cpp", "#if A\nstruct B {};\n#else\nstruct B {};\n#endif\n").empty());
}

// ---------------------------------------------------------------------------------------------

// Other versions of clang-format format the same style differently.
constexpr const char* kFormatVersion = "version 14.";

TEST(SourceTree, IsFormatted) {
  const RunResult version = run_program({"--version"}, {.program = "clang-format"});
  if (version.code != 0) GTEST_SKIP() << "clang-format is not installed";
  if (!contains(version.out, kFormatVersion)) {
    GTEST_SKIP() << "clang-format is not " << kFormatVersion << ": " << version.out;
  }
  const RunResult listed = run_program({"ls-files", "*.h", "*.cpp", "*.cu", "*.cuh"},
                                       {.directory = kRoot.string(), .program = "git"});
  if (listed.code != 0) GTEST_SKIP() << "git does not list the sources: " << listed.err;
  std::vector<std::string> args = {"--dry-run", "-Werror"};
  for (const std::string& path : lines_of(listed.out)) {
    // A deleted file that is not committed yet is still listed.
    if (fs::exists(kRoot / path)) args.push_back(path);
  }
  ASSERT_GT(args.size(), 2u);
  const RunResult result =
      run_program(args, {.directory = kRoot.string(), .program = "clang-format"});
  std::set<std::string> unformatted;
  for (const std::string& line : lines_of(result.err)) {
    if (contains(line, "clang-format-violations"))
      unformatted.insert(line.substr(0, line.find(':')));
  }
  EXPECT_EQ(result.code, 0) << "run `make format`:\n"
                            << joined({unformatted.begin(), unformatted.end()});
}

}  // namespace
}  // namespace leeway
