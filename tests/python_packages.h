// Python with packages of PyPI, in virtual environments that lie in the build folder and are made
// once. The tests that use them run alone (SERIAL).
#pragma once

#include <chrono>
#include <csignal>
#include <filesystem>
#include <string>
#include <vector>

#include "base/files.h"
#include "cli_helpers.h"

namespace leeway {

inline RunResult python(const std::vector<std::string>& args,
                        const std::string& program = "python3",
                        std::chrono::seconds limit = std::chrono::seconds(120)) {
  return run_program(args, {.time_limit = limit, .program = program});
}

inline bool have_python() { return python({"-c", "1"}).code == 0; }

// True if pip could not reach the packages, which is not the tests' fault.
inline bool is_network_trouble(const RunResult& pip) {
  if (pip.code == -SIGKILL) return true;  // beyond its time
  for (const char* words :
       {"onnection", "imed out", "imeout", "emporary failure", "nreachable", "HTTP error"}) {
    if (contains(pip.err, words)) return true;
  }
  return false;
}

// Whether pip would take a build of this torch for CPUs. One for CUDA brings gigabytes, and the
// operators cannot be compiled for it without CUDA's compiler.
inline bool has_torch_for_cpus(const std::string& program, const std::string& torch) {
  const RunResult plan =
      python({"-m", "pip", "install", "-q", "--disable-pip-version-check", "--dry-run", "--no-deps",
              "--timeout=15", "--retries=1", "--report", "-", torch},
             program);
  return plan.code == 0 && contains(plan.out, "+cpu\"");
}

struct PythonPackages {
  std::string program;  // the interpreter; empty: there is none, because of `skip`, or a failure
  std::string skip;
};

// The environment of this name with these packages, and others without what they depend on.
inline PythonPackages python_packages(const std::string& name,
                                      const std::vector<std::string>& packages,
                                      const std::vector<std::string>& alone = {}) {
  namespace fs = std::filesystem;
  if (!have_python()) return {"", "there is no python3"};
  const fs::path folder = fs::path(LEEWAY_BINARY_DIR) / name;
  const std::string program = folder / "bin/python";
  std::string words = "has";
  for (const std::string& package : packages) words += "_" + package;
  for (const std::string& package : alone) words += "_" + package;
  if (fs::exists(folder / words)) return {program, ""};
  fs::remove_all(folder);
  const RunResult made = python({"-m", "venv", folder.string()});
  EXPECT_EQ(made.code, 0) << "python3-venv is needed: " << made;
  if (made.code != 0) return {};
  for (const std::string& package : packages) {
    if (package.starts_with("torch==") && !has_torch_for_cpus(program, package)) {
      return {"", "needs the network: no build of " + package + " for CPUs answers"};
    }
  }
  std::vector<std::string> args = {"-m",
                                   "pip",
                                   "install",
                                   "-q",
                                   "--no-compile",
                                   "--disable-pip-version-check",
                                   "--prefer-binary",
                                   "--timeout=15",
                                   "--retries=1"};
  std::vector<std::string> rest = args;
  args.insert(args.end(), packages.begin(), packages.end());
  RunResult pip = python(args, program, std::chrono::seconds(240));
  if (pip.code == 0 && !alone.empty()) {
    rest.push_back("--no-deps");
    rest.insert(rest.end(), alone.begin(), alone.end());
    pip = python(rest, program, std::chrono::seconds(240));
  }
  if (pip.code != 0 && is_network_trouble(pip)) {
    return {"", "needs the network: packages for Python could not be fetched"};
  }
  EXPECT_EQ(pip.code, 0) << pip;
  if (pip.code != 0) return {};
  write_file_atomically(folder / words, "");
  return {program, ""};
}

// Where environments of real packages are tested, and served ones: 0.3.1 is the last version of
// verifiers with v0 environments, and has v1 tasksets too.
inline PythonPackages environment_packages() {
  return python_packages("python_packages", {"reasoning-gym==0.1.25", "verifiers==0.3.1"});
}

}  // namespace leeway
