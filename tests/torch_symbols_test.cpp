// What the built files import from PyTorch's libraries. PyTorch's wheels export functions of the
// C++ library they were built with (std::filesystem, time zones): a file of ours that refers to one
// of those names may, depending on library order, be bound to a version that does not match this
// compiler's headers, and crash. So nothing that links PyTorch refers to them, and the program does
// not link PyTorch.

#include <gtest/gtest.h>

#include <set>
#include <sstream>

#include "run_program.h"

namespace leeway {
namespace {

// The standard library's names among the symbols that nm prints, of the given kinds ("TDBR":
// defined and not weak; "U": undefined). Weak ones are template instances, which every file that
// uses them defines itself.
std::set<std::string> standard_symbols(const std::string& nm_text, const std::string& kinds) {
  std::set<std::string> found;
  std::istringstream lines(nm_text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::vector<std::string> fields;
    for (std::string word; words >> word;) fields.push_back(word);
    if (fields.size() < 2 || fields[fields.size() - 2].size() != 1) continue;
    std::string name = fields.back();
    name = name.substr(0, name.find('@'));
    const bool standard =
        name.starts_with("_ZNSt") || name.starts_with("_ZNKSt") || name.starts_with("_ZSt");
    if (standard && kinds.find(fields[fields.size() - 2]) != std::string::npos) found.insert(name);
  }
  return found;
}

bool is_file_system(const std::string& name) {
  return name.find("St10filesystem") != std::string::npos;
}

// Functions that take no object of the library (they throw, or set up the streams), and those that
// count the references of an exception, whose layout is the ABI's, since exceptions cross
// libraries: they are the same in every version. A compiler with a static libstdc++ takes them from
// wherever they are found first.
bool is_the_same_in_every_version(const std::string& name) {
  const std::string counts = "_ZNSt15__exception_ptr13exception_ptr";
  if (name == counts + "10_M_releaseEv" || name == counts + "9_M_addrefEv") return true;
  return name.starts_with("_ZSt") && (name.find("__throw_") != std::string::npos ||
                                      name.find("ios_base_library_init") != std::string::npos);
}

// Undefined in our file, and either defined by PyTorch or a name that its wheels are known to
// define.
std::set<std::string> wrongly_bound(const std::string& ours,
                                    const std::vector<std::string>& torch) {
  std::set<std::string> offered, wrong;
  for (const std::string& text : torch) offered.merge(standard_symbols(text, "TDBR"));
  for (const std::string& name : standard_symbols(ours, "U")) {
    if (is_the_same_in_every_version(name)) continue;
    if (offered.contains(name) || is_file_system(name)) wrong.insert(name);
  }
  return wrong;
}

std::string output_of(const std::string& program, const std::vector<std::string>& arguments) {
  const RunResult result = run_program(arguments, {.program = program});
  EXPECT_EQ(result.code, 0) << program << " " << arguments.back() << result;
  return result.out;
}

// The PyTorch libraries that our file is loaded with.
std::vector<std::string> torch_libraries(const std::string& file) {
  std::vector<std::string> found;
  std::istringstream lines(output_of("ldd", {file}));
  for (std::string line; std::getline(lines, line);) {
    if (!contains(line, "libtorch") && !contains(line, "libc10")) continue;
    const size_t arrow = line.find("=> ");
    if (arrow == std::string::npos) continue;
    const std::string path = line.substr(arrow + 3, line.rfind(" (") - arrow - 3);
    if (path.starts_with("/")) found.push_back(path);
  }
  return found;
}

// Files of a build that link PyTorch, where there is one.
constexpr const char* kLinked[] = {
    "libleeway_cuda.so",  "libleeway_ops.so",    "ops_test",
    "torch_decoder_test", "torch_sampling_test", "torch_training_test"};

TEST(TorchSymbols, ANameThatBothHaveIsSeen) {
  const std::string torch =
      "00000000000012ab T _ZNSt10filesystem6removeERKNS_7__cxx114pathE\n"
      "00000000000012ac T _ZNSt6chrono11reload_tzdbEv\n"
      "00000000000012ad W _ZNSt6vectorIiSaIiEE17_M_realloc_insertEv\n"
      "00000000000012ae T _ZN3c105ErrorC1Ev\n"
      "00000000000012af T _ZSt28__throw_bad_array_new_lengthv\n"
      "00000000000012b0 T _ZNSt15__exception_ptr13exception_ptr10_M_releaseEv\n";
  EXPECT_EQ(wrongly_bound("                 U _ZNSt6chrono11reload_tzdbEv@GLIBCXX_3.4.31\n"
                          "                 U _ZNSt6vectorIiSaIiEE17_M_realloc_insertEv\n"
                          "                 U _ZN3c105ErrorC1Ev\n"
                          "                 U _ZSt28__throw_bad_array_new_lengthv\n"
                          "       U _ZNSt15__exception_ptr13exception_ptr10_M_releaseEv\n"
                          "                 U _ZNSo9_M_insertIdEERSoT_@GLIBCXX_3.4.9\n",
                          {torch}),
            std::set<std::string>{"_ZNSt6chrono11reload_tzdbEv"});
  EXPECT_EQ(wrongly_bound("   U _ZNKSt10filesystem7__cxx114path11parent_pathEv\n", {}).size(), 1u)
      << "also where this PyTorch does not export it";
}

TEST(TorchSymbols, TheProgramDoesNotLinkPyTorch) {
  EXPECT_EQ(torch_libraries(leeway_program()), std::vector<std::string>{});
}

// With two versions in one process operators run, and autograd does not see that they have inputs
// with gradients.
TEST(TorchSymbols, NothingLoadsTwoVersionsOfPyTorch) {
  for (const char* name : kLinked) {
    const std::string file = std::string(LEEWAY_BINARY_DIR) + "/" + name;
    if (!std::filesystem::exists(file)) continue;
    std::set<std::string> folders;
    for (const std::string& library : torch_libraries(file)) {
      folders.insert(std::filesystem::canonical(library).parent_path().string());
    }
    EXPECT_EQ(folders.size(), 1u) << name << " loads PyTorch from "
                                  << ::testing::PrintToString(folders);
  }
}

TEST(TorchSymbols, NothingThatLinksPyTorchTakesTheStandardLibraryFromIt) {
  int looked_at = 0;
  for (const char* name : kLinked) {
    const std::string file = std::string(LEEWAY_BINARY_DIR) + "/" + name;
    if (!std::filesystem::exists(file)) continue;
    ++looked_at;
    const std::vector<std::string> libraries = torch_libraries(file);
    EXPECT_FALSE(libraries.empty()) << name;
    std::vector<std::string> texts;
    for (const std::string& library : libraries) {
      texts.push_back(output_of("nm", {"-D", "--defined-only", library}));
    }
    for (const std::string& symbol :
         wrongly_bound(output_of("nm", {"-D", "--undefined-only", file}), texts)) {
      ADD_FAILURE() << name << " refers to " << symbol;
    }
  }
  if (looked_at == 0) GTEST_SKIP() << "this build has no PyTorch";
}

}  // namespace
}  // namespace leeway
