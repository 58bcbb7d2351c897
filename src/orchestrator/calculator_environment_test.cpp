#include <gtest/gtest.h>

#include <set>

#include "base/json.h"
#include "base/rng.h"
#include "orchestrator/environment_factories.h"
#include "orchestrator/environment_test_support.h"

namespace leeway {
namespace {

using ::leeway::testing::parts_of;
using ::leeway::testing::prompt_of;
using ::leeway::testing::rendered_reply;

std::unique_ptr<Environment> calculator(double format_weight = 0.0, uint64_t seed = 1) {
  EnvironmentTable table;
  table.name = "calculator";
  table.operators = "+-*";
  table.terms = 3;
  table.format_weight = format_weight;
  return make_calculator_environment(table, seed);
}

Reply call(const std::string& arguments, const std::string& name = "calculator",
           ToolCallStatus status = ToolCallStatus::ok) {
  Reply reply = rendered_reply("Let me see: 33.");
  ParsedToolCall parsed;
  parsed.call = {"id7", name, arguments};
  parsed.status = status;
  reply.response.tool_calls = {parsed};
  return reply;
}

std::string only_message(const Turn& turn) {
  EXPECT_EQ(turn.kind, Turn::Kind::messages);
  EXPECT_TRUE(turn.rewards.empty());
  EXPECT_EQ(turn.messages.size(), 1u);
  EXPECT_EQ(turn.messages.at(0).role, Role::tool);
  return turn.messages.at(0).content;
}

Example example_of_33() {
  Example example;
  example.answer = "33";
  return example;
}

TEST(CalculatorEnvironment, DeclaresItsTool) {
  const auto environment = calculator();
  EXPECT_TRUE(environment->needs_renderer());
  const Example example = environment->example(Split::train, 5);
  const auto tools = parse_json("tools", example.tools_json);
  ASSERT_TRUE(tools.IsArray());
  const auto& function = tools[0]["function"];
  EXPECT_STREQ(function["name"].GetString(), "calculator");
  EXPECT_STREQ(function["parameters"]["properties"]["expression"]["type"].GetString(), "string");
  EXPECT_TRUE(prompt_of(example).starts_with("What is "));
}

TEST(CalculatorEnvironment, AnswersCallsAndJudgesTheLastNumber) {
  const auto environment = calculator(0.5);
  const auto episode = environment->start(example_of_33());
  const Turn turn = episode->respond(call(R"({"expression": "12+7*3"})"));
  EXPECT_EQ(only_message(turn), "33");
  EXPECT_EQ(turn.messages[0].tool_call_id, "id7");
  EXPECT_EQ(turn.messages[0].tool_name, "calculator");
  EXPECT_EQ(parts_of(episode->respond(rendered_reply("12 and 7 and 3 make 33."))),
            "exact 1 * 1, tool_used 0.5 * 1");
}

TEST(CalculatorEnvironment, RewardsWhatWasSaidInTheEnd) {
  const auto environment = calculator(0.25);
  const Example example = example_of_33();
  const std::vector<std::pair<Reply, std::string>> cases{
      {rendered_reply("33"), "exact 1 * 1, tool_used 0.25 * 0"},
      {rendered_reply("33.0"), "exact 1 * 1, tool_used 0.25 * 0"},
      {rendered_reply("The answer is 34."), "exact 1 * 0, tool_used 0.25 * 0"},
      {rendered_reply("33, no, 34"), "exact 1 * 0, tool_used 0.25 * 0"},
      {rendered_reply("I do not know"), "exact 1 * 0, tool_used 0.25 * 0"},
      {rendered_reply("", false), "exact 1 * 0, tool_used 0.25 * 0"}};
  for (const auto& [reply, parts] : cases) {
    EXPECT_EQ(parts_of(*environment, example, reply), parts) << reply.text;
  }
  EXPECT_EQ(parts_of(*calculator(), example, rendered_reply("33")), "exact 1 * 1");
}

TEST(CalculatorEnvironment, TellsThePolicyWhatIsWrongWithACall) {
  const auto environment = calculator(1.0);
  const auto episode = environment->start(example_of_33());
  const std::vector<std::pair<Reply, std::string>> cases{
      {call("{", "calculator", ToolCallStatus::invalid_json), "invalid_json"},
      {call("{}", "", ToolCallStatus::missing_name), "missing_name"},
      {call("", "calculator", ToolCallStatus::unclosed_block), "unclosed_block"},
      {call(R"({"expression": "1"})", "search"), "no such tool"},
      {call("{}"), "arguments must be"},
      {call(""), "arguments must be"},
      {call("[1]"), "arguments must be"},
      {call("\"1+1\""), "arguments must be"},
      {call(R"({"expression": 5})"), "arguments must be"},
      {call(R"({"expression": "1/0"})"), "division by zero"},
      {call(R"({"expression": ""})"), "ends too early"},
      {call(R"({"expression": "1)" + std::string(100'000, '(') + "\"}"), "longer than"}};
  for (const auto& [reply, words] : cases) {
    const std::string message = only_message(episode->respond(reply));
    EXPECT_TRUE(message.starts_with("error: ")) << message;
    EXPECT_NE(message.find(words), std::string::npos) << message;
  }
  EXPECT_EQ(parts_of(episode->respond(rendered_reply("33"))), "exact 1 * 1, tool_used 1 * 0");
}

TEST(CalculatorEnvironment, AnswersSeveralCallsInTheirOrder) {
  const auto episode = calculator()->start(example_of_33());
  Reply reply = call(R"({"expression": "1+1"})");
  reply.response.tool_calls.push_back(call(R"({"expression": "2*"})").response.tool_calls[0]);
  reply.response.tool_calls.push_back(call(R"({"expression": "2*8"})").response.tool_calls[0]);
  const Turn turn = episode->respond(reply);
  ASSERT_EQ(turn.messages.size(), 3u);
  EXPECT_EQ(turn.messages[0].content, "2");
  EXPECT_EQ(turn.messages[1].content, "error: the expression ends too early");
  EXPECT_EQ(turn.messages[2].content, "16");
}

TEST(CalculatorEnvironment, ItsDemonstrationsPlayOutAndEarnTheFullReward) {
  const auto environment = calculator(0.5);
  for (uint64_t i = 0; i < 200; ++i) {
    const Example example = environment->example(Split::held_out, i);
    ASSERT_EQ(example.demonstration.size(), 3u);
    const Message& asks = example.demonstration[0];
    const Message& told = example.demonstration[1];
    const auto episode = environment->start(example);
    Reply reply = call(asks.tool_calls.at(0).arguments);
    reply.response.tool_calls[0].call.id = asks.tool_calls[0].id;
    const Turn turn = episode->respond(reply);
    EXPECT_EQ(only_message(turn), told.content);
    EXPECT_EQ(turn.messages[0].tool_call_id, told.tool_call_id);
    EXPECT_EQ(turn.messages[0].tool_name, told.tool_name);
    EXPECT_EQ(parts_of(episode->respond(rendered_reply(example.demonstration[2].content))),
              "exact 1 * 1, tool_used 0.5 * 1");
  }
}

TEST(CalculatorEnvironment, KeepsItsSplitsApart) {
  const auto one = calculator(0.0, 1), two = calculator(0.0, 2);
  std::set<std::string> train;
  for (uint64_t i = 0; i < 2000; ++i) train.insert(prompt_of(one->example(Split::train, i)));
  for (uint64_t i = 0; i < 2000; ++i) {
    EXPECT_FALSE(train.contains(prompt_of(two->example(Split::held_out, i))));
  }
}

TEST(CalculatorEnvironment, SurvivesAnyArguments) {
  constexpr std::string_view kAlphabet = "{}[]\":,\\expression0123+-*/( )";
  const auto episode = calculator()->start(example_of_33());
  Rng rng(13);
  for (int round = 0; round < 5000; ++round) {
    std::string arguments = rng.below(2) == 0 ? "{\"expression\": \"" : "";
    for (uint64_t n = rng.below(20); n > 0; --n) {
      arguments += rng.below(20) == 0 ? static_cast<char>(rng.below(256))
                                      : kAlphabet[rng.below(kAlphabet.size())];
    }
    if (rng.below(2) == 0) arguments += "\"}";
    EXPECT_FALSE(only_message(episode->respond(call(arguments))).empty());
  }
}

}  // namespace
}  // namespace leeway
