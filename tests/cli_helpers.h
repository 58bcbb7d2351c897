// Shared by the tests of the program: a small batch, strict JSON, and checks for success and for
// user errors.
#pragma once

#include <gtest/gtest.h>
#include <rapidjson/document.h>
#include <rapidjson/stringbuffer.h>
#include <rapidjson/writer.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "run_program.h"

namespace leeway {

using rapidjson::Document;
using Json = rapidjson::Value;

inline const std::string kGolden = LEEWAY_SOURCE_DIR "/tests/data/losses_golden.json";

// Every stream; one masked token; advantages per sequence and per token.
inline const std::string kBatch = R"({"sequences": [
  {"pi": [-1.0, -0.5, -2.0], "rollout": [-1.1, -0.4, -2.5], "prox": [-1.05, -0.45, -2.2],
   "ref": [-1.2, -0.6, -2.1], "teacher": [-0.9, -0.3, -1.5], "advantages": 1.0, "mask": [1, 1, 0]},
  {"pi": [-0.3, -1.5], "rollout": [-0.35, -1.0], "prox": [-0.3, -1.2],
   "ref": [-0.4, -1.1], "teacher": [-0.2, -1.4], "advantages": [-0.5, 0.7]}]})";

inline const std::vector<std::string> kStreams = {"pi", "rollout", "prox", "ref", "teacher"};

// Strict JSON: any parser must be able to read the program's output.
inline Document json_of(const std::string& text) {
  Document document;
  document.Parse(text.c_str(), text.size());
  EXPECT_FALSE(document.HasParseError())
      << "offset " << document.GetErrorOffset() << " of " << text;
  return document;
}

inline std::string text_of(const Json& json) {
  rapidjson::StringBuffer buffer;
  rapidjson::Writer<rapidjson::StringBuffer> writer(buffer);
  json.Accept(writer);
  return buffer.GetString();
}

inline std::vector<std::string> strings_of(const Json& list) {
  std::vector<std::string> out;
  for (const Json& item : list.GetArray()) out.emplace_back(item.GetString());
  return out;
}

inline bool has(const std::vector<std::string>& list, const std::string& item) {
  return std::find(list.begin(), list.end(), item) != list.end();
}

inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find('\n', start), text.size());
    lines.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return lines;
}

struct Names {
  std::vector<std::string> native, corrections, foreign;
};

inline const Names& names() {
  static const Names all = [] {
    Names found;
    const Document list = json_of(run_program({"loss", "list", "--json"}).out);
    for (const Json& p : list["presets"].GetArray())
      found.native.emplace_back(p["name"].GetString());
    for (const Json& c : list["corrections"].GetArray()) {
      found.corrections.emplace_back(c["name"].GetString());
    }
    for (const Json& f : list["foreign"].GetArray()) {
      found.foreign.emplace_back(f["name"].GetString());
    }
    return found;
  }();
  return all;
}

inline std::vector<std::string> composed_presets() {
  std::vector<std::string> out;
  for (const std::string& base : names().native) {
    for (const std::string& first : names().corrections) {
      out.push_back(base + "+" + first);
      for (const std::string& second : names().corrections) {
        if (first != second) out.push_back(base + "+" + first + "+" + second);
      }
    }
  }
  return out;
}

inline RunResult eval(const std::string& preset, const std::string& batch,
                      const std::vector<std::string>& sets = {}) {
  std::vector<std::string> args = {"loss", "eval", "--preset", preset, "--batch", "/dev/stdin"};
  for (const std::string& set : sets) args.insert(args.end(), {"--set", set});
  return run_program(args, {.input = batch});
}

// Success: the result on stdout, nothing on stderr.
inline void expect_quiet_success(const RunResult& result) {
  EXPECT_EQ(result.code, 0) << result;
  EXPECT_FALSE(result.out.empty());
  EXPECT_EQ(result.err, "");
}

// A user error: exit code 2, no result, and a message that contains all of `words`.
inline void expect_mistake(const RunResult& result, const std::vector<std::string>& words) {
  EXPECT_EQ(result.code, 2) << result;
  EXPECT_TRUE(result.out.empty());
  EXPECT_TRUE(result.err.starts_with("leeway: ")) << result.err;
  for (const std::string& word : words) {
    EXPECT_TRUE(contains(result.err, word)) << "no \"" << word << "\" in: " << result.err;
  }
}

inline std::string batch_without(const std::set<std::string>& dropped) {
  Document batch = json_of(kBatch);
  for (Json& sequence : batch["sequences"].GetArray()) {
    for (const std::string& key : dropped) sequence.RemoveMember(key.c_str());
  }
  return text_of(batch);
}

}  // namespace leeway
