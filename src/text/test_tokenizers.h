// Real vocabularies for tests: NAME/tokenizer.json in the folder that LEEWAY_TOKENIZERS names, else
// what scripts/fetch_tokenizers puts into the build folder.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>

namespace leeway::testing {

inline constexpr const char* kNoRealTokenizers =
    "needs the network, which does not answer, or LEEWAY_TOKENIZERS: see scripts/fetch_tokenizers";

// The path of its tokenizer.json; nothing where it is not here and cannot be fetched.
inline std::optional<std::string> real_tokenizer(const std::string& name) {
  const char* given = std::getenv("LEEWAY_TOKENIZERS");
  const std::string fetched = LEEWAY_BINARY_DIR "/tokenizers";
  for (const std::string& folder : {given ? std::string(given) : fetched, fetched}) {
    const std::string path = folder + "/" + name + "/tokenizer.json";
    if (std::filesystem::exists(path)) return path;
  }
  const std::string command = "'" LEEWAY_SOURCE_DIR "/scripts/fetch_tokenizers' '" + fetched + "'";
  if (std::system(command.c_str()) != 0) return std::nullopt;
  return fetched + "/" + name + "/tokenizer.json";
}

}  // namespace leeway::testing
