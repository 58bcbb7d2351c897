#include <gtest/gtest.h>

#include <map>
#include <set>

#include "base/rng.h"
#include "orchestrator/environment_factories.h"
#include "orchestrator/environment_test_support.h"

namespace leeway {
namespace {

using ::leeway::testing::expect_refused;
using ::leeway::testing::parts_of;
using ::leeway::testing::plain_reply;
using ::leeway::testing::prompt_of;
using ::leeway::testing::rendered_reply;
using ::leeway::testing::TestFolder;

EnvironmentTable table(const std::string& data, const std::string& eval_data = "",
                       VerifierKind verifier = VerifierKind::exact) {
  EnvironmentTable t;
  t.name = "jsonl";
  t.data = data;
  t.eval_data = eval_data;
  t.verifier = verifier;
  return t;
}

std::string line(const std::string& prompt, const std::string& answer) {
  return fmt::format("{{\"prompt\": \"{}\", \"answer\": \"{}\"}}\n", prompt, answer);
}

std::string lines(int first, int last) {
  std::string text;
  for (int i = first; i < last; ++i) text += line(fmt::format("p{}", i), fmt::format("a{}", i));
  return text;
}

std::map<std::string, std::string> all_of(const Environment& environment, Split split) {
  std::map<std::string, std::string> found;
  for (uint64_t i = 0; i < environment.size(split).value(); ++i) {
    const Example example = environment.example(split, i);
    EXPECT_EQ(example.index, i);
    found[prompt_of(example)] = example.answer;
  }
  return found;
}

TEST(JsonlEnvironment, TrainsOnOneFileAndEvaluatesOnTheOther) {
  const TestFolder folder;
  const auto environment = make_jsonl_environment(
      table(folder.write("train.jsonl", "\n" + lines(0, 3) + "  \r\n" + lines(3, 5)),
            folder.write("eval.jsonl", "{\"prompt\": \"q\", \"answer\": 12.50}")));
  EXPECT_EQ(environment->size(Split::train), 5u);
  EXPECT_EQ(environment->size(Split::held_out), 1u);
  EXPECT_FALSE(environment->needs_renderer());
  EXPECT_EQ(all_of(*environment, Split::train).at("p4"), "a4");
  EXPECT_EQ(environment->example(Split::held_out, 0).answer, "12.50");
  EXPECT_TRUE(environment->example(Split::held_out, 0).demonstration.empty());
}

TEST(JsonlEnvironment, HoldsOutOnePromptInEightWithoutASecondFile) {
  const TestFolder folder;
  // Every prompt occurs twice: both occurrences must be on the same side.
  const std::string path = folder.write("data.jsonl", lines(0, 800) + lines(0, 800));
  const auto environment = make_jsonl_environment(table(path));
  const auto train = all_of(*environment, Split::train);
  const auto held_out = all_of(*environment, Split::held_out);
  EXPECT_EQ(train.size() + held_out.size(), 800u);
  EXPECT_EQ(*environment->size(Split::train) + *environment->size(Split::held_out), 1600u);
  for (const auto& [prompt, answer] : held_out) EXPECT_FALSE(train.contains(prompt));
  EXPECT_NEAR(static_cast<double>(held_out.size()), 100.0, 5 * 9.4);
  // The side does not depend on what else is in the file.
  const auto part = make_jsonl_environment(table(folder.write("part.jsonl", lines(0, 400))));
  for (const auto& [prompt, answer] : all_of(*part, Split::held_out)) {
    EXPECT_TRUE(held_out.contains(prompt));
  }
}

TEST(JsonlEnvironment, HasAPromptOnEachSideAsSoonAsThereAreTwo) {
  const TestFolder folder;
  for (int start = 0; start < 15; ++start) {
    for (const int count : {1, 2, 3}) {
      const auto environment = make_jsonl_environment(
          table(folder.write("data.jsonl", lines(start, start + count) + lines(start, start + 1))));
      const auto train = all_of(*environment, Split::train);
      const auto held_out = all_of(*environment, Split::held_out);
      EXPECT_GE(train.size(), 1u);
      EXPECT_EQ(held_out.empty(), count == 1);
      EXPECT_EQ(train.size() + held_out.size(), static_cast<size_t>(count));
    }
  }
}

TEST(JsonlEnvironment, ReadsConversationsKeysOfOtherNamesAndDemonstrations) {
  const TestFolder folder;
  EnvironmentTable t = table(
      folder.write("data.jsonl",
                   R"({"messages": [{"role": "system", "content": "Be brief."}, )"
                   R"({"role": "user", "content": "2+2?"}], "label": 4, "completion": "It is 4"})"),
      folder.write("eval.jsonl", R"({"messages": "3+3?", "label": "6", "completion": null})"));
  t.prompt_key = "messages";
  t.answer_key = "label";
  const auto environment = make_jsonl_environment(t);
  EXPECT_TRUE(environment->needs_renderer());
  const Example example = environment->example(Split::train, 0);
  ASSERT_EQ(example.messages.size(), 2u);
  EXPECT_EQ(example.messages[0].role, Role::system);
  EXPECT_EQ(example.messages[1].content, "2+2?");
  EXPECT_EQ(example.answer, "4");
  ASSERT_EQ(example.demonstration.size(), 1u);
  EXPECT_EQ(example.demonstration[0].role, Role::assistant);
  EXPECT_EQ(example.demonstration[0].content, "It is 4");
  EXPECT_TRUE(environment->example(Split::held_out, 0).demonstration.empty());
}

TEST(JsonlEnvironment, ToolsOfALineReachTheExample) {
  const TestFolder folder;
  const std::string tools =
      R"([{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}])";
  const auto environment = make_jsonl_environment(table(
      folder.write("data.jsonl", R"({"prompt": "2+2?", "answer": "4", "tools": )" + tools + "}"),
      folder.write("eval.jsonl", R"({"prompt": "3+3?", "answer": "6", "tools": []})")));
  // Only a renderer puts tool schemas into the prompt.
  EXPECT_TRUE(environment->needs_renderer());
  EXPECT_EQ(environment->example(Split::train, 0).tools_json, tools);
  EXPECT_EQ(environment->example(Split::held_out, 0).tools_json, "");
  const auto without = make_jsonl_environment(
      table(folder.write("data.jsonl", R"({"prompt": "2+2?", "answer": "4", "tools": null})"),
            folder.write("eval.jsonl", R"({"prompt": "3+3?", "answer": "6"})")));
  EXPECT_FALSE(without->needs_renderer());
}

TEST(JsonlEnvironment, RewardsByItsVerifierAndForTheFormat) {
  const TestFolder folder;
  struct Case {
    VerifierKind verifier;
    const char* answer;
    Reply reply;
    const char* parts;
  };
  const std::vector<Case> cases{
      {VerifierKind::exact, "Paris", plain_reply("Paris\n"), "exact 1 * 1, format 0.5 * 1"},
      {VerifierKind::exact, "Paris", plain_reply("Paris", true), "exact 1 * 1, format 0.5 * 0"},
      {VerifierKind::exact, "Paris", plain_reply("Rome\n"), "exact 1 * 0, format 0.5 * 1"},
      {VerifierKind::exact, "Paris", plain_reply(""), "exact 1 * 0, format 0.5 * 0"},
      {VerifierKind::numeric, "1,000", rendered_reply("It is 1000."),
       "numeric 1 * 1, format 0.5 * 1"},
      {VerifierKind::numeric, "1", rendered_reply("unknown"), "numeric 1 * 0, format 0.5 * 0"},
      {VerifierKind::numeric, "1", rendered_reply("", false), "numeric 1 * 0, format 0.5 * 0"},
      {VerifierKind::regex, "^(yes|ja)\\\\b", plain_reply("yes!"), "regex 1 * 1, format 0.5 * 1"},
      {VerifierKind::regex, "^(yes|ja)\\\\b", plain_reply("yes!", true),
       "regex 1 * 1, format 0.5 * 0"},
      {VerifierKind::regex, "^(yes|ja)\\\\b", plain_reply("no"), "regex 1 * 0, format 0.5 * 0"},
      {VerifierKind::choice, "B", rendered_reply("(B)"), "choice 1 * 1, format 0.5 * 1"},
      {VerifierKind::choice, "A", rendered_reply("The answer is B"),
       "choice 1 * 0, format 0.5 * 1"},
      {VerifierKind::choice, "A", rendered_reply("unknown"), "choice 1 * 0, format 0.5 * 0"}};
  for (const Case& c : cases) {
    EnvironmentTable t = table(folder.write("data.jsonl", line("p", c.answer)), "", c.verifier);
    const auto bare = make_jsonl_environment(t);
    t.format_weight = 0.5;
    const auto environment = make_jsonl_environment(t);
    const Example example = environment->example(Split::train, 0);
    EXPECT_EQ(parts_of(*environment, example, c.reply), c.parts) << c.reply.text;
    const std::string parts = c.parts;
    EXPECT_EQ(parts_of(*bare, example, c.reply), parts.substr(0, parts.find(',')));
  }
}

TEST(JsonlEnvironment, SaysWhichLineIsWrongAndWhy) {
  const TestFolder folder;
  struct Case {
    VerifierKind verifier;
    std::string text;
    std::vector<std::string> words;
  };
  const std::string good = line("p", "1");
  const std::vector<Case> cases{
      {VerifierKind::exact, good + "\n{\"prompt\": }", {"data.jsonl line 3, column 12: "}},
      {VerifierKind::exact, good + "[1]", {"data.jsonl line 2: ", "object", "list"}},
      {VerifierKind::exact, "7", {"data.jsonl line 1: ", "object"}},
      {VerifierKind::exact, "[\n{}]", {"data.jsonl line 1", "a JSON array?", "jq -c"}},
      {VerifierKind::exact,
       good + "\n{\"prompt\": \"caf\xe9\"}",
       {"data.jsonl line 3: byte 16 is not UTF-8", "iconv"}},
      {VerifierKind::exact, good + "{\"prompt\": \"x\"} trailing", {"line 2, column 17"}},
      {VerifierKind::exact, good + std::string("{\"a\": \"\0\"}", 10), {"line 2, column "}},
      {VerifierKind::exact,
       good + "{\"question\": \"x\", \"answer\": \"1\"}",
       {"line 2: ", "\"prompt\" is missing", "prompt_key", "question, answer"}},
      {VerifierKind::exact,
       good + "{\"prompt\": \"x\"}",
       {"line 2: ", "\"answer\" is missing", "answer_key", "prompt"}},
      {VerifierKind::exact,
       good + "{\"prompt\": 7, \"answer\": \"1\"}",
       {"line 2: prompt", "a number"}},
      {VerifierKind::exact, good + line("", "1"), {"line 2: prompt is empty"}},
      {VerifierKind::exact,
       good + "{\"prompt\": [], \"answer\": \"1\"}",
       {"line 2: prompt is empty"}},
      {VerifierKind::exact,
       good + "{\"prompt\": [{\"role\": \"usr\", \"content\": \"\"}], \"answer\": 1}",
       {"line 2: prompt", "messages[0]", "usr"}},
      {VerifierKind::exact,
       good + "{\"prompt\": [{\"role\": \"assistant\", \"content\": \"x\"}], \"answer\": 1}",
       {"line 2: prompt", "assistant"}},
      {VerifierKind::exact,
       good + "{\"prompt\": \"x\", \"answer\": null}",
       {"line 2: answer", "null"}},
      {VerifierKind::exact,
       good + "{\"prompt\": \"x\", \"answer\": [1]}",
       {"line 2: answer", "list"}},
      {VerifierKind::exact, good + line("x", " "), {"line 2: answer is empty"}},
      {VerifierKind::numeric, good + line("x", "seven"), {"line 2: answer \"seven\"", "number"}},
      {VerifierKind::choice, line("x", "A") + line("y", "Z"), {"line 2: answer \"Z\"", "A to J"}},
      {VerifierKind::regex, good + line("x", "(a"), {"line 2: ", "\"(a\"", "regular expression"}},
      {VerifierKind::exact,
       good + R"({"prompt": "x", "answer": "1", "completion": 5})",
       {"line 2: completion", "a string"}},
      {VerifierKind::exact,
       good + R"({"prompt": "x", "answer": "1", "demonstration": ""})",
       {"line 2: demonstration is empty"}},
      {VerifierKind::exact,
       good + R"({"prompt": "x", "answer": "1", "demonstration": "a", "completion": "b"})",
       {"line 2: ", "give one"}},
      {VerifierKind::exact,
       good + R"({"prompt": "x", "answer": "1", "tools": {"name": "f"}})",
       {"data.jsonl line 2: tools must be a list of tool schemas, not an object"}},
      {VerifierKind::exact,
       good + R"({"prompt": "x", "answer": "1", "tools": ["f"]})",
       {"line 2: tools[0] must be an object, not a string"}},
      {VerifierKind::exact,
       good + R"({"prompt": "x", "answer": "1", "tools": [{"name": "f"}, {"type": "function"}]})",
       {"line 2: tools[1] has no name"}},
      {VerifierKind::exact,
       good + R"({"prompt": "x", "answer": "1", "tools": [{"function": "f"}]})",
       {"line 2: tools[0].function must be an object, not a string"}},
      {VerifierKind::exact,
       good + R"({"prompt": "x", "answer": "1", "tools": [{"name": "f", "parameters": []}]})",
       {"line 2: tools[0]: parameters of f must be an object, not a list"}},
      {VerifierKind::exact,
       good + R"({"prompt": "x", "answer": "1", "tools": [{"name": "f"}, {"name": "f"}]})",
       {"line 2: tools[1]: another tool is called f"}},
      {VerifierKind::exact, "", {"data.jsonl: ", "no examples"}},
      {VerifierKind::exact, "\n \n", {"data.jsonl: ", "no examples"}},
      {VerifierKind::exact, good + std::string(100'000, '['), {"line 2"}}};
  for (const Case& c : cases) {
    const EnvironmentTable t = table(folder.write("data.jsonl", c.text), "", c.verifier);
    expect_refused([&] { make_jsonl_environment(t); }, c.words);
  }
}

TEST(JsonlEnvironment, RefusesMissingFilesAndPromptsOnBothSides) {
  const TestFolder folder;
  const std::string train = folder.write("train.jsonl", lines(0, 5));
  expect_refused([&] { make_jsonl_environment(table("")); }, {"data is missing"});
  expect_refused([&] { make_jsonl_environment(table(folder.at("none.jsonl"))); },
                 {"none.jsonl", "No such file"});
  expect_refused([&] { make_jsonl_environment(table(train, folder.at("none.jsonl"))); },
                 {"none.jsonl", "No such file"});
  expect_refused([&] { make_jsonl_environment(table(train, folder.write("e.jsonl", "\n[]"))); },
                 {"e.jsonl line 2"});
  const std::string eval = folder.write("eval.jsonl", line("new", "1") + lines(3, 4));
  expect_refused([&] { make_jsonl_environment(table(train, eval)); },
                 {"train.jsonl line 4", "eval.jsonl line 2", "same prompt", "line for line"});
  const std::string numbered =
      folder.write("numbered.jsonl", R"({"id": 7, "prompt": "one", "answer": "a"})");
  const std::string again =
      folder.write("again.jsonl", R"({"id": 7, "prompt": "two", "answer": "b"})");
  expect_refused([&] { make_jsonl_environment(table(numbered, again)); },
                 {"numbered.jsonl line 1", "again.jsonl line 1", "same id"});
}

TEST(JsonlEnvironment, APromptIsItsLineOrItsId) {
  const TestFolder folder;
  // One text, 400 tasks, distinguished by their lines.
  std::string lines;
  for (int i = 0; i < 400; ++i) lines += line("Solve it.", std::to_string(i));
  const auto by_line = make_jsonl_environment(table(folder.write("lines.jsonl", lines)));
  EXPECT_NEAR(static_cast<double>(*by_line->size(Split::held_out)), 50.0, 5 * 6.6);
  EXPECT_EQ(*by_line->size(Split::train) + *by_line->size(Split::held_out), 400u);
  // The same id twice is one prompt, whatever else its lines contain, and is on one side.
  std::string twice;
  for (int i = 0; i < 400; ++i) {
    twice += fmt::format(R"({{"id": "{}", "prompt": "p", "answer": "{}"}})", i % 200, i) + "\n";
  }
  const auto by_id = make_jsonl_environment(table(folder.write("ids.jsonl", twice)));
  std::set<int> train;
  for (uint64_t i = 0; i < *by_id->size(Split::train); ++i) {
    train.insert(std::stoi(by_id->example(Split::train, i).answer) % 200);
  }
  EXPECT_GT(*by_id->size(Split::held_out), 0u);
  for (uint64_t i = 0; i < *by_id->size(Split::held_out); ++i) {
    EXPECT_FALSE(train.contains(std::stoi(by_id->example(Split::held_out, i).answer) % 200));
  }
  // The same text with other answers in both files is not a shared prompt.
  EXPECT_NE(make_jsonl_environment(table(folder.write("a.jsonl", line("p", "1")),
                                         folder.write("b.jsonl", line("p", "2")))),
            nullptr);
}

// Valid lines, damaged at random: either an example, or an error with its line.
TEST(JsonlEnvironment, SurvivesAnyLine) {
  const TestFolder folder;
  const std::string good =
      R"({"prompt": [{"role": "user", "content": "a"}], "answer": "B 1", "completion": "\u00e9"})";
  Rng rng(31);
  int taken = 0;
  for (int round = 0; round < 250; ++round) {
    std::string broken = good;
    for (uint64_t n = 1 + rng.below(3); n > 0; --n) {
      const size_t at = rng.below(broken.size());
      switch (rng.below(3)) {
        case 0: broken.erase(at, 1 + rng.below(4)); break;
        case 1: broken[at] = static_cast<char>(rng.below(256)); break;
        default: broken.insert(at, broken.substr(rng.below(broken.size()), rng.below(12)));
      }
    }
    constexpr VerifierKind kVerifiers[] = {VerifierKind::exact, VerifierKind::numeric,
                                           VerifierKind::regex, VerifierKind::choice};
    const EnvironmentTable t = table(folder.write("data.jsonl", line("p", "(B) 1") + broken), "",
                                     kVerifiers[rng.below(4)]);
    try {
      const auto environment = make_jsonl_environment(t);
      const Example example = environment->example(Split::train, 0);
      environment->start(example)->respond(plain_reply(broken));
      ++taken;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("data.jsonl line "), std::string::npos)
          << error.what();
    }
  }
  EXPECT_GT(taken, 3);
}

}  // namespace
}  // namespace leeway
