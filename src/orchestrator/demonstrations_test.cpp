#include "orchestrator/demonstrations.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "orchestrator/environment_test_support.h"
#include "text/messages_json.h"

namespace leeway {
namespace {

using namespace leeway::testing;

TEST(Demonstrations, AreReadInBothForms) {
  const TestFolder folder;
  const std::string path = folder.write(
      "data.jsonl",
      "{\"prompt\": \"2+2=\", \"completion\": \"4\\n\"}\n"
      "\n"
      " \t\r\n"
      "{\"messages\": [{\"role\": \"system\", \"content\": \"Be brief.\"}, "
      "{\"role\": \"user\", \"content\": \"hi\"}, {\"role\": \"assistant\", \"content\": \"ho\"}, "
      "{\"role\": \"user\", \"content\": \"bye\"}, {\"role\": \"assistant\", \"content\": "
      "\"so\"}], "
      "\"tools\": [{\"type\": \"function\"}]}\r\n"
      "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}, {\"role\": \"assistant\", "
      "\"tool_calls\": [{\"function\": {\"name\": \"add\", \"arguments\": {\"a\": 1}}}]}]}");
  const std::vector<Example> examples = load_demonstrations(path);
  ASSERT_EQ(examples.size(), 3u);
  for (size_t i = 0; i < examples.size(); ++i) EXPECT_EQ(examples[i].index, i);

  EXPECT_EQ(write_messages(examples[0].messages), "[{\"role\": \"user\", \"content\": \"2+2=\"}]");
  EXPECT_EQ(write_messages(examples[0].demonstration),
            "[{\"role\": \"assistant\", \"content\": \"4\\n\"}]");
  EXPECT_TRUE(examples[0].tools_json.empty());

  ASSERT_EQ(examples[1].messages.size(), 2u);
  EXPECT_EQ(examples[1].messages[0].role, Role::system);
  ASSERT_EQ(examples[1].demonstration.size(), 3u);
  EXPECT_EQ(examples[1].demonstration[0].content, "ho");
  EXPECT_EQ(examples[1].demonstration[2].content, "so");
  EXPECT_EQ(examples[1].tools_json, "[{\"type\": \"function\"}]");

  ASSERT_EQ(examples[2].demonstration.size(), 1u);
  ASSERT_EQ(examples[2].demonstration[0].tool_calls.size(), 1u);
  EXPECT_EQ(examples[2].demonstration[0].tool_calls[0].name, "add");
}

TEST(Demonstrations, ThatCannotBeReadAreNamedByFileAndLine) {
  struct Case {
    std::string line;
    std::vector<std::string> words;
  };
  const std::vector<Case> cases = {
      {"{\"prompt\": ", {"JSON"}},
      {"nonsense", {"JSON"}},
      {"[1, 2]", {"not a JSON object"}},
      {"{}", {"\"prompt\"", "\"messages\""}},
      {R"({"prompt": "a"})", {"\"completion\""}},
      {R"({"completion": "a"})", {"\"prompt\""}},
      {R"({"prompt": 1, "completion": "a"})", {"\"prompt\" must be a string"}},
      {R"({"prompt": "a", "completion": ""})", {"\"completion\"", "not empty"}},
      {R"({"messages": null})", {"must be a list"}},
      {R"({"messages": []})", {"no assistant message"}},
      {R"({"messages": [{"role": "user", "content": "a"}]})", {"no assistant message"}},
      {R"({"messages": [{"role": "assistant", "content": "a"}]})", {"begins with an assistant"}},
      {R"({"messages": [{"role": "wizard", "content": "a"}]})", {"wizard", "messages[0]"}},
      {R"({"messages": [{"role": "user", "content": 7}]})", {"content", "messages[0]"}},
      {R"({"messages": [], "tools": {}})", {"tools"}},
      {std::string(100000, '['), {"JSON"}},
  };
  const std::string good = "{\"prompt\": \"a\", \"completion\": \"b\"}\n";
  for (const Case& c : cases) {
    const TestFolder folder;
    const std::string path = folder.write("bad.jsonl", good + "\n" + c.line + "\n" + good);
    std::vector<std::string> words = c.words;
    words.push_back(path + " line 3:");
    SCOPED_TRACE(c.line.substr(0, 80));
    expect_refused([&] { load_demonstrations(path); }, words);
  }
}

TEST(Demonstrations, NeedALine) {
  const TestFolder folder;
  for (const char* bytes : {"", "\n\n", "  \n\t"}) {
    const std::string path = folder.write("empty.jsonl", bytes);
    expect_refused([&] { load_demonstrations(path); }, {path, "no demonstration"});
  }
  expect_refused([&] { load_demonstrations(folder.at("missing.jsonl")); }, {"missing.jsonl"});
}

TEST(Demonstrations, OfDamagedFilesAreReadOrRefused) {
  const std::string whole =
      "{\"prompt\": \"a\\u00e9\", \"completion\": \"b\"}\n"
      "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}, {\"role\": \"assistant\", "
      "\"content\": null, \"tool_calls\": [{\"name\": \"f\", \"arguments\": \"{}\"}]}], "
      "\"tools\": []}\n";
  const TestFolder folder;
  Rng rng(17);
  int refused = 0;
  for (int i = 0; i < 500; ++i) {
    std::string bytes = whole;
    for (uint64_t change = 1 + rng.below(3); change > 0; --change) {
      const size_t place = rng.below(bytes.size());
      switch (rng.below(4)) {
        case 0: bytes[place] = static_cast<char>(rng.below(256)); break;
        case 1: bytes.erase(place, 1 + rng.below(8)); break;
        case 2: bytes.insert(place, 1, "{}[]\",:\\\n\0"[rng.below(10)]); break;
        default: bytes.resize(place + 1);
      }
    }
    const std::string path = folder.write("fuzz.jsonl", bytes);
    try {
      for (const Example& example : load_demonstrations(path)) {
        EXPECT_FALSE(example.messages.empty());
        ASSERT_FALSE(example.demonstration.empty());
        EXPECT_EQ(example.demonstration.front().role, Role::assistant);
      }
    } catch (const Error& error) {
      ++refused;
      EXPECT_NE(std::string(error.what()).find("fuzz.jsonl"), std::string::npos) << error.what();
    }
  }
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace leeway
