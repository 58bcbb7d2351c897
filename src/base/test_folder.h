// A temporary folder for one test, removed afterwards.
#pragma once

#include <stdlib.h>

#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/folders.h"

namespace leeway::testing {

class TestFolder {
 public:
  TestFolder() {
    const char* parent = ::getenv("TMPDIR");
    std::string pattern = std::string(parent == nullptr ? "/tmp" : parent) + "/leeway-XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = pattern;
  }
  ~TestFolder() { remove_tree(path_); }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string at(const std::string& name) const { return path_ + "/" + name; }
  std::string write(const std::string& name, std::string_view bytes) const {
    std::ofstream(at(name), std::ios::binary) << bytes;
    return at(name);
  }
  // Sorted names of its entries.
  std::vector<std::string> names() const { return folder_names(path_); }

 private:
  std::string path_;
};

}  // namespace leeway::testing
