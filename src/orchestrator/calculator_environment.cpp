#include <fmt/format.h>

#include <optional>

#include "base/json.h"
#include "leeway/error.h"
#include "orchestrator/environment_factories.h"
#include "orchestrator/expression.h"
#include "orchestrator/generated_environment.h"
#include "orchestrator/verifiers.h"

namespace leeway {
namespace {

constexpr const char* kTool = "calculator";
constexpr const char* kToolsJson =
    R"([{"type": "function", "function": {"name": "calculator", )"
    R"("description": "Evaluates an arithmetic expression.", )"
    R"("parameters": {"type": "object", "properties": {"expression": {"type": "string", )"
    R"("description": "Numbers, + - * / and parentheses, for example (3+4)*2"}}, )"
    R"("required": ["expression"]}}}])";

// The expression of a call, or the problem with the call.
Evaluation expression_of(const ParsedToolCall& parsed) {
  if (parsed.status != ToolCallStatus::ok) {
    return {false, fmt::format("the tool call cannot be read ({})", name_of(parsed.status))};
  }
  if (parsed.call.name != kTool) {
    return {false, fmt::format("there is no such tool; the only one is {}", kTool)};
  }
  const Evaluation misfit{false, "the arguments must be {\"expression\": \"..\"}"};
  try {
    const rapidjson::Document arguments = parse_json("arguments", parsed.call.arguments);
    if (!arguments.IsObject()) return misfit;
    const auto member = arguments.FindMember("expression");
    if (member == arguments.MemberEnd() || !member->value.IsString()) return misfit;
    return {true, {member->value.GetString(), member->value.GetStringLength()}};
  } catch (const Error&) {
    return misfit;
  }
}

class CalculatorEpisode : public Episode {
 public:
  CalculatorEpisode(std::string answer, double format_weight)
      : answer_(std::move(answer)), format_weight_(format_weight) {}

  Turn respond(const Reply& reply) override {
    Turn turn;
    if (!reply.response.tool_calls.empty()) {
      turn.kind = Turn::Kind::messages;
      for (const ParsedToolCall& call : reply.response.tool_calls) {
        turn.messages.push_back(result_of(call));
      }
      return turn;
    }
    const Verdict verdict = verify_numeric(judged_text(reply), answer_);
    turn.rewards = {{"exact", 1.0, verdict.right ? 1.0 : 0.0}};
    if (format_weight_ > 0.0) {
      turn.rewards.push_back({"tool_used", format_weight_, tool_used_ ? 1.0 : 0.0});
    }
    return turn;
  }

 private:
  Message result_of(const ParsedToolCall& parsed) {
    Evaluation value = expression_of(parsed);
    if (value.ok) value = evaluate_expression(value.text);
    tool_used_ = tool_used_ || value.ok;
    return {.role = Role::tool,
            .content = value.ok ? value.text : "error: " + value.text,
            .tool_call_id = parsed.call.id,
            .tool_name = parsed.call.name};
  }

  std::string answer_;
  double format_weight_;
  bool tool_used_ = false;
};

Example make_example(Rng& rng, const EnvironmentTable& table) {
  const std::string expression = random_expression(rng, table);
  const Evaluation value = evaluate_expression(expression);
  LEEWAY_CHECK(value.ok, expression + ": " + value.text);
  Example example;
  example.messages = {
      {.role = Role::user, .content = fmt::format("What is {}? Use the calculator.", expression)}};
  example.tools_json = kToolsJson;
  example.answer = value.text;
  ToolCall call;
  call.id = "functions.calculator:0";  // in the form of the family whose template shows ids
  call.name = kTool;
  call.arguments = fmt::format("{{\"expression\": \"{}\"}}", expression);
  example.demonstration = {
      {.role = Role::assistant, .tool_calls = {call}},
      {.role = Role::tool, .content = value.text, .tool_call_id = call.id, .tool_name = kTool},
      {.role = Role::assistant, .content = fmt::format("The answer is {}.", value.text)}};
  return example;
}

}  // namespace

std::unique_ptr<Environment> make_calculator_environment(const EnvironmentTable& table,
                                                         uint64_t seed) {
  check_expression_keys(table);
  Generator generator;
  generator.make = [table](Rng& rng) { return make_example(rng, table); };
  generator.start = [weight = table.format_weight](const Example& example) {
    return std::make_unique<CalculatorEpisode>(example.answer, weight);
  };
  generator.needs_renderer = true;
  generator.keys = expression_keys(table);
  return make_generated_environment(std::move(generator), seed);
}

}  // namespace leeway
