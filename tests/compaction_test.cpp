// How many training samples a compacting agent produces: renderers, bridge and splitter together.
//
// The agent takes four tool turns per segment, with thinking in each; a user turn then asks for a
// summary, and the context is rebuilt from it.

#include <gtest/gtest.h>

#include "text/renderer.h"
#include "text/renderers/toy_tokenizer.h"
#include "text/trajectory.h"

namespace leeway {
namespace {

enum class Prompting { render, bridge };

struct Agent {
  const Renderer& renderer;
  Prompting prompting;
  std::vector<TrajectoryStep> steps;
  int call = 0;

  // One call of the policy: prompt ids, then what a model with this template would sample.
  void sample(std::vector<Message>& messages, std::vector<int32_t> prompt, bool with_tool) {
    Message answer;
    answer.role = Role::assistant;
    answer.reasoning = "thinking " + std::to_string(call);
    answer.content = with_tool ? "" : "done " + std::to_string(call);
    if (with_tool)
      answer.tool_calls.push_back({"", "look", "{\"at\": " + std::to_string(call) + "}"});
    ++call;
    std::vector<Message> with = messages;
    with.push_back(answer);
    const Rendered rendered = renderer.render(with, {});
    TrajectoryStep step;
    step.prompt = std::move(prompt);
    const int32_t index = static_cast<int32_t>(messages.size());
    for (size_t i = 0; i < rendered.ids.size(); ++i) {
      if (rendered.message_index[i] == index && rendered.sampled[i]) {
        step.completion.push_back(rendered.ids[i]);
      }
    }
    // GLM ends a turn with the next role's marker, which a finished render does not contain yet.
    const auto stops = renderer.stop_token_ids();
    if (std::find(stops.begin(), stops.end(), step.completion.back()) == stops.end()) {
      step.completion.push_back(stops.back());
    }
    step.logprobs.assign(step.completion.size(), -1.0f);
    steps.push_back(std::move(step));
    messages.push_back(std::move(answer));
  }

  std::vector<int32_t> next_prompt(const std::vector<Message>& messages, const Message& added) {
    RenderOptions options;
    options.add_generation_prompt = true;
    if (prompting == Prompting::bridge) {
      const auto bridged = renderer.bridge_to_next_turn(steps.back().prompt,
                                                        steps.back().completion, {added}, options);
      if (bridged) return bridged->ids;
    }
    return renderer.render(messages, options).ids;
  }

  void run(int compactions) {
    RenderOptions options;
    options.add_generation_prompt = true;
    for (int segment = 0; segment <= compactions; ++segment) {
      std::vector<Message> messages(1);
      messages[0].content = "task, summary " + std::to_string(segment);
      std::vector<int32_t> prompt = renderer.render(messages, options).ids;
      for (int turn = 0; turn < 4; ++turn) {
        sample(messages, prompt, true);
        Message result;
        result.role = Role::tool;
        result.tool_name = "look";
        result.content = "seen " + std::to_string(call);
        messages.push_back(result);
        prompt = next_prompt(messages, result);
      }
      sample(messages, prompt, false);
      if (segment == compactions) return;
      Message ask;
      ask.content = "summarize";
      messages.push_back(ask);
      sample(messages, next_prompt(messages, ask), false);
    }
  }
};

size_t samples(const char* name, int compactions, Prompting prompting,
               ThinkingRetention retention) {
  const ToyTokenizer tokenizer;
  const auto renderer = make_renderer(name, &tokenizer, retention);
  Agent agent{*renderer, prompting, {}, 0};
  agent.run(compactions);
  return split_trajectory(agent.steps).samples.size();
}

TEST(Compaction, CostsTwoSamplesEachWhenTheTemplateStripsThinkingAndOneWhenItIsKept) {
  for (size_t c = 0; c <= 3; ++c) {
    const int n = static_cast<int>(c);
    EXPECT_EQ(samples("qwen3", n, Prompting::render, {}), 1 + 2 * c);
    // Keeping it only between tool calls does not help: the user's request makes everything before
    // it past.
    EXPECT_EQ(
        samples("qwen3", n, Prompting::render, {.preserve_thinking_between_tool_calls = true}),
        1 + 2 * c);
    EXPECT_EQ(samples("qwen3", n, Prompting::render, {.preserve_all_thinking = true}), 1 + c);
    EXPECT_EQ(samples("qwen3", n, Prompting::bridge, {}), 1 + c);
  }
}

}  // namespace
}  // namespace leeway
