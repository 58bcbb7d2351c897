#include "run/run_state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/rng.h"
#include "leeway/error.h"

namespace leeway {
namespace {

RunState full_state() {
  return {.trained_tokens = 123456,
          .sft_steps = 40,
          .sft_seconds = 1.5,
          .initial_checksum = 0xfedcba98,
          .before = {{"eval/all/reward/mean", 0.25}, {"eval/all/greedy/mean", std::nan("")}}};
}

std::string error_of(const std::string& json) {
  try {
    parse_run_state("run.json", json);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(RunState, ComesBackAsItWasWritten) {
  const RunState wanted = full_state();
  const RunState found = parse_run_state("run.json", run_state_json(wanted));
  EXPECT_EQ(found.trained_tokens, wanted.trained_tokens);
  EXPECT_EQ(found.sft_steps, wanted.sft_steps);
  EXPECT_EQ(found.sft_seconds, wanted.sft_seconds);
  EXPECT_EQ(found.initial_checksum, wanted.initial_checksum);
  ASSERT_EQ(found.before.size(), 2u);
  EXPECT_EQ(found.before[0], wanted.before[0]);
  EXPECT_EQ(found.before[1].first, "eval/all/greedy/mean");
  EXPECT_TRUE(std::isnan(found.before[1].second));
}

TEST(RunState, NamesTheKeyWhoseValueCannotBe) {
  const std::string json = run_state_json(full_state());
  const auto with = [&](const std::string& key, const std::string& value) {
    const size_t begin = json.find("\"" + key + "\": ") + key.size() + 4;
    const size_t end = key == "before" ? json.rfind('}') : json.find(',', begin);
    return json.substr(0, begin) + value + json.substr(end);
  };
  for (const char* key :
       {"trained_tokens", "sft_steps", "sft_seconds", "initial_checksum", "before"}) {
    for (const char* value : {"\"x\"", "null", "[]", "true", "-1", "1e300", "NaN", "Infinity"}) {
      const bool good = key == std::string("sft_seconds") && value == std::string("1e300");
      const std::string error = error_of(with(key, value));
      EXPECT_EQ(error.empty(), good) << key << " = " << value;
      if (!good) {
        EXPECT_NE(error.find(std::string("run.json: \"") + key + "\""), std::string::npos)
            << key << " = " << value << ": " << error;
      }
    }
    std::string missing = json;
    missing.replace(missing.find(key), 1, "X");
    EXPECT_EQ(error_of(missing), std::string("run.json: has no \"") + key + "\"");
  }
  EXPECT_NE(error_of(with("sft_steps", "1.5")).find("not an integer"), std::string::npos);
  EXPECT_NE(error_of(with("initial_checksum", "4294967296")), "");
  EXPECT_NE(error_of(with("before", "{\"a\": \"x\"}")).find("\"a\""), std::string::npos);
  for (const char* text : {"", "[]", "1", "null", "{", "{}"}) EXPECT_NE(error_of(text), "") << text;
  EXPECT_NE(error_of(with("before", std::string(100000, '['))).find("nested"), std::string::npos);
}

TEST(RunState, ReadsOrRefusesAnyText) {
  Rng rng(7);
  int64_t read = 0, refused = 0;
  const char* words[] = {"-", "0", "9e99", "[", "]", "{", "}", "\"", "null", ",", "1.5", "NaN"};
  for (int round = 0; round < 20000; ++round) {
    std::string json = run_state_json(full_state());
    if (rng.below(8) == 0) json.resize(rng.below(json.size()));
    for (uint64_t change = rng.below(4); change > 0 && !json.empty(); --change) {
      const size_t at = rng.below(json.size());
      switch (rng.below(3)) {
        case 0: json[at] = static_cast<char>(rng.below(256)); break;
        case 1: json.insert(at, words[rng.below(12)]); break;
        default: json.erase(at, 1 + rng.below(20));
      }
    }
    ++(error_of(json).empty() ? read : refused);
  }
  EXPECT_GT(std::min(read, refused), 2000);
}

}  // namespace
}  // namespace leeway
