#include <gtest/gtest.h>

#include "orchestrator/environment_factories.h"
#include "orchestrator/environment_test_support.h"
#include "orchestrator/process_test_support.h"
#include "text/renderers/json_value.h"

namespace leeway {
namespace {

using ::leeway::testing::answer;
using ::leeway::testing::answering;
using ::leeway::testing::count_children;
using ::leeway::testing::expect_refused;
using ::leeway::testing::parts_of;
using ::leeway::testing::plain_reply;
using ::leeway::testing::prompt_of;
using ::leeway::testing::rendered_reply;
using ::leeway::testing::TestFolder;
using ::leeway::testing::text_of_file;
using ::leeway::testing::wait_for;

class ProcessEnvironmentTest : public ::testing::Test {
 protected:
  EnvironmentTable table(const std::string& body,
                         const std::string& data = R"({"prompt": "2+2=", "answer": 4})") const {
    EnvironmentTable t;
    t.name = "process";
    t.data = folder_.write("data.jsonl", data);
    t.command = answering(body);
    t.processes = 1;
    t.turn_timeout = 10.0;
    return t;
  }
  static Turn respond(Episode& episode, const Reply& reply) {
    const Turn turn = episode.respond(reply);
    return turn.kind == Turn::Kind::pending ? wait_for([&] { return episode.poll(); }) : turn;
  }
  // The first example's first turn.
  static Turn first_turn(const EnvironmentTable& table, const Reply& reply = plain_reply("4\n")) {
    const auto environment = make_process_environment(table);
    return respond(*environment->start(environment->example(Split::train, 0)), reply);
  }
  Turn answered(const std::string& members, const Reply& reply = plain_reply("4\n")) const {
    return first_turn(table(answer(members)), reply);
  }

  TestFolder folder_;
};

TEST_F(ProcessEnvironmentTest, RewardsAreWhatTheProgramSays) {
  EXPECT_EQ(parts_of(answered(R"("reward": 1)")), "reward 1 * 1");
  EXPECT_EQ(parts_of(answered(R"("reward": -2.5e-1, "note": [1])")), "reward 1 * -0.25");
  EXPECT_EQ(
      parts_of(answered(R"("rewards": {"exact": 1, "style": {"value": 0.3, "weight": 0.1}})")),
      "exact 1 * 1, style 0.1 * 0.3");
  EXPECT_EQ(parts_of(answered(R"("rewards": {"a-b.c_1": {"value": 2}})")), "a-b.c_1 1 * 2");
  // As a comparison in Python.
  EXPECT_EQ(parts_of(answered(R"("reward": true)")), "reward 1 * 1");
  EXPECT_EQ(parts_of(answered(R"("rewards": {"exact": false})")), "exact 1 * 0");
}

TEST_F(ProcessEnvironmentTest, AnErrorOfTheProgramIsAFailureAndNoReward) {
  const Turn turn = answered(R"("error": "no database")");
  EXPECT_EQ(turn.kind, Turn::Kind::failed);
  EXPECT_EQ(turn.failure_kind, FailureKind::environment_error);
  EXPECT_NE(turn.failure.find("no database"), std::string::npos);
}

TEST_F(ProcessEnvironmentTest, AnswersThatMakeNoSenseAreBad) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"("reward": NaN)", "finite"},
      {R"("reward": -Infinity)", "finite"},
      {R"("reward": 1e999)", "too big"},
      {R"("reward": "1")", "reward must be a number, not a string"},
      {R"("reward": null)", "a number"},
      {R"("rewrad": 1)", "one of reward, rewards, messages, error"},
      {R"("reward": 1, "error": "x")", "reward and error: give one"},
      {R"("rewards": {})", "rewards must be"},
      {R"("rewards": 1)", "rewards must be"},
      {R"("rewards": {"mean": 1})", "part"},
      {R"("rewards": {"a/b": 1})", "a/b"},
      {R"("rewards": {"a": {"weight": 1}})", "rewards.a has no value"},
      {R"("rewards": {"a": {"value": NaN}})", "rewards.a.value"},
      {R"("rewards": {"a": {"value": 1, "weight": "x"}})", "rewards.a.weight"},
      {R"("messages": [])", "messages is empty"},
      {R"("messages": "hello")", "list"},
      {R"("messages": [{"role": "assistant", "content": "x"}])", "assistant"},
      {R"("messages": [{"role": "system", "content": "x"}])", "system"},
      {R"("messages": [{"role": "user", "content": 3}])", "content"},
      {R"("messages": [{"role": "user", "content": null}])", "content"},
      {R"("error": 5)", "error must be a string"},
  };
  for (const auto& [members, words] : cases) {
    const Turn turn = answered(members, rendered_reply("4"));
    EXPECT_EQ(turn.kind, Turn::Kind::failed) << members;
    EXPECT_STREQ(name_of(turn.failure_kind), "bad_answer") << members;
    EXPECT_NE(turn.failure.find(words), std::string::npos) << members << ": " << turn.failure;
  }
}

TEST_F(ProcessEnvironmentTest, TheProgramIsToldEverything) {
  const std::string data =
      R"({"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}], )"
      R"("tests": [1.50, {"deep": "\u00e9\n"}], "completion": "4"})";
  const std::string seen = folder_.at("seen");
  EnvironmentTable t =
      table("printf '%s\\n' \"$line\" >> " + seen + "; case $line in *'\"turn\": 1,'*) " +
                answer(R"("messages": [{"role": "tool", "content": "4", "name": "sum"}])") +
                ";; *) " + answer(R"("reward": 1)") + ";; esac",
            data);
  const auto environment = make_process_environment(t);
  EXPECT_TRUE(environment->needs_renderer());
  const Example example = environment->example(Split::train, 0);
  ASSERT_EQ(example.demonstration.size(), 1u);
  EXPECT_EQ(example.demonstration[0].content, "4");

  const auto episode = environment->start(example);
  // What a policy samples need not be UTF-8, and JSON may have line ends between its tokens.
  Reply reply = rendered_reply("let \xff me\nsee");
  reply.response.tool_calls = {
      {.call = {.id = "c1", .name = "sum", .arguments = "{\"of\":\n[2,\r\n2]}"}, .raw = "<a>"},
      {.call = {.name = "s"}, .status = ToolCallStatus::invalid_json, .raw = "{\"of"}};
  const Turn first = respond(*episode, reply);
  ASSERT_EQ(first.kind, Turn::Kind::messages) << first.failure;
  ASSERT_EQ(first.messages.size(), 1u);
  EXPECT_EQ(first.messages[0].role, Role::tool);
  EXPECT_EQ(first.messages[0].content, "4");
  EXPECT_EQ(first.messages[0].tool_name, "sum");
  EXPECT_EQ(parts_of(respond(*episode, rendered_reply("4", false))), "reward 1 * 1");

  const std::string requests = text_of_file(seen);
  const size_t end = requests.find('\n');
  const JsonValue one = read_json("one", requests.substr(0, end)),
                  two = read_json("two", requests.substr(end + 1));
  EXPECT_EQ(to_json(*one.find("type")), "\"turn\"");
  EXPECT_EQ(to_json(*one.find("turn")), "1");
  EXPECT_EQ(to_json(*two.find("turn")), "2");
  EXPECT_EQ(to_json(*one.find("example")), to_json(read_json("data", data)));
  const JsonValue& told = *one.find("reply");
  EXPECT_EQ(told.find("content")->text, "let \xEF\xBF\xBD me\nsee");
  EXPECT_TRUE(told.find("text")->text.ends_with("see<|im_end|>"));
  EXPECT_FALSE(told.find("truncated")->truth);
  EXPECT_TRUE(two.find("reply")->find("truncated")->truth);
  const JsonValue& calls = *told.find("tool_calls");
  EXPECT_EQ(
      to_json(calls.items.at(0)),
      R"({"status": "ok", "name": "sum", "id": "c1", "arguments": {"of": [2, 2]}, "raw": "<a>"})");
  EXPECT_EQ(to_json(calls.items.at(1)),
            R"({"status": "invalid_json", "name": "s", "raw": "{\"of"})");
  // All messages so far, the reply last.
  const JsonValue& messages = *two.find("messages");
  std::string roles;
  for (const JsonValue& message : messages.items) roles += message.find("role")->text + " ";
  EXPECT_EQ(roles, "system user assistant tool assistant ");
  EXPECT_EQ(messages.items[3].find("content")->text, "4");
  EXPECT_EQ(messages.items[2].find("tool_calls")->items.size(), 1u);
}

TEST_F(ProcessEnvironmentTest, RespondDoesNotWait) {
  // It answers when a file is there, and counts the turns that it was asked for.
  const TestFolder folder;
  const auto environment = make_process_environment(
      table("echo >> " + folder.at("turns") + "; until [ -e " + folder.at("go") +
            " ]; do sleep 0.01; done; " + answer(R"("reward": 1)")));
  const Example example = environment->example(Split::train, 0);
  std::vector<std::unique_ptr<Episode>> episodes;
  for (int i = 0; i < 50; ++i) {
    episodes.push_back(environment->start(example));
    EXPECT_EQ(episodes.back()->respond(plain_reply("4\n")).kind, Turn::Kind::pending);
  }
  // Those that go take their requests with them, but for one that is already with the program.
  episodes.erase(episodes.begin(), episodes.end() - 1);
  folder.write("go", "");
  EXPECT_EQ(parts_of(wait_for([&] { return episodes[0]->poll(); })), "reward 1 * 1");
  EXPECT_LE(text_of_file(folder.at("turns")).size(), 2u);
}

TEST_F(ProcessEnvironmentTest, EpisodesMayOutliveTheEnvironment) {
  auto environment = make_process_environment(table(answer(R"("reward": 1)")));
  auto episode = environment->start(environment->example(Split::train, 0));
  environment.reset();
  EXPECT_EQ(parts_of(respond(*episode, plain_reply("4\n"))), "reward 1 * 1");
  EXPECT_EQ(count_children(), 1);
  episode.reset();
  EXPECT_EQ(count_children(), 0);
}

TEST_F(ProcessEnvironmentTest, PromptsAreHeldOutAsThoseOfJsonl) {
  std::string lines;
  for (int i = 0; i < 100; ++i) {
    lines += fmt::format("{{\"q\": \"p{}\", \"answer\": \"a\"}}\n", i);
  }
  EnvironmentTable t = table(answer(R"("reward": 1)"), lines);
  t.prompt_key = "q";
  const auto environment = make_process_environment(t);
  EXPECT_FALSE(environment->needs_renderer());
  EnvironmentTable other;
  other.prompt_key = "q";
  other.data = folder_.write("other.jsonl", lines);
  const auto jsonl = make_jsonl_environment(other);
  for (const Split split : {Split::train, Split::held_out}) {
    ASSERT_EQ(environment->size(split), jsonl->size(split));
    for (uint64_t i = 0; i < *jsonl->size(split); ++i) {
      EXPECT_EQ(prompt_of(environment->example(split, i)), prompt_of(jsonl->example(split, i)));
    }
  }
}

TEST_F(ProcessEnvironmentTest, ToolsOfALineReachTheExample) {
  const EnvironmentTable t =
      table(answer(R"("reward": 1)"), R"({"prompt": "2+2?", "tools": [{"name": "calc"}]})"
                                      "\n"
                                      R"({"prompt": "3+3?", "tools": [{"name": "calc"}]})");
  const auto environment = make_process_environment(t);
  EXPECT_TRUE(environment->needs_renderer());
  EXPECT_EQ(environment->example(Split::train, 0).tools_json, R"([{"name": "calc"}])");
  const EnvironmentTable wrong =
      table(answer(R"("reward": 1)"), R"({"prompt": "2+2?", "tools": "calc"})");
  expect_refused([&] { make_process_environment(wrong); },
                 {"line 1: tools must be a list of tool schemas, not a string"});
}

TEST_F(ProcessEnvironmentTest, BadTablesAreRefused) {
  const EnvironmentTable good = table(answer(R"("reward": 1)"));
  const auto refused = [&](auto change, const std::vector<std::string>& words) {
    EnvironmentTable t = good;
    change(t);
    expect_refused([&] { make_environment(t, 1); }, words);
  };
  refused([](EnvironmentTable& t) { t.command = ""; }, {"command is missing"});
  refused([](EnvironmentTable& t) { t.processes = 0; }, {"processes = 0"});
  refused([](EnvironmentTable& t) { t.turn_timeout = 0.0; }, {"turn_timeout = 0"});
  refused([](EnvironmentTable& t) { t.max_output_bytes = 0; }, {"max_output_bytes = 0"});
  refused([](EnvironmentTable& t) { t.data = ""; }, {"data is missing"});
  refused([](EnvironmentTable& t) { t.prompt_key = "q"; },
          {"data.jsonl line 1", "\"q\"", "prompt_key"});
  refused([](EnvironmentTable& t) { t.name = "proces"; }, {"did you mean process?"});
  EXPECT_NE(make_environment(good, 1), nullptr);
}

}  // namespace
}  // namespace leeway
