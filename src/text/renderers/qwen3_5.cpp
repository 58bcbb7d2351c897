// Qwen3.5: ChatML, XML-style tool calls, a generation prompt that opens the thinking block.
#include "text/renderers/python_strings.h"
#include "text/renderers/qwen_shared.h"

namespace leeway {
namespace {

class Qwen35 : public FamilyRenderer {
 public:
  Qwen35(const Tokenizer* tokenizer, const ThinkingRetention& retention)
      : FamilyRenderer({.name = "qwen3.5",
                        .has_thinking = true,
                        .controls = qwen_controls(true),
                        .stops = {"<|im_end|>", "<|endoftext|>"},
                        .close = "<|im_end|>",
                        .blocks = {{"<think>", "</think>"}, {"<tool_call>", "</tool_call>"}}},
                       tokenizer, retention) {}

 protected:
  void prepare(TemplateInput& c) const override {
    c.last_query = last_query_index(c, true, -1);
    if (c.last_query < 0 && c.written == 0) refuse(0, "there is no user message");
  }

  void write_opening(Script& script, const TemplateInput& c) const override {
    const bool has_system = c.role_is(0, Role::system);
    const std::string_view system = has_system ? strip(c[0].content) : std::string_view();
    if (c.tools.empty() && !has_system) return;
    script.at(c.tools.empty() ? 0 : -1);
    script.literal("<|im_start|>system\n");
    if (!c.tools.empty()) write_tools(script, c);
    if (!c.tools.empty() && !system.empty()) script.literal("\n\n");
    script.at(has_system ? 0 : -1);
    script.words(system);
    script.literal("<|im_end|>\n");
  }

  void write_tools(Script& script, const TemplateInput& c) const {
    script.literal("# Tools\n\nYou have access to the following functions:\n\n<tools>");
    for (const JsonValue& tool : c.tools) {
      script.literal("\n");
      script.words(to_json(tool));
    }
    script.literal(kXmlCallFormat);
  }

  void write_message(Script& script, const TemplateInput& c, size_t i) const override {
    const Message& message = c[i];
    switch (message.role) {
      case Role::system:
        if (i > 0) refuse(i, "a system message must come first");
        return;
      case Role::tool:
        return write_tool_response(script, c, i, i > 0 && !c.follows(i, Role::tool),
                                   strip(message.content));
      case Role::user:
        script.literal("<|im_start|>user\n");
        script.words(strip(message.content));
        break;
      case Role::assistant:
        script.literal("<|im_start|>assistant\n");
        write_assistant(script, c, i);
        break;
    }
    script.literal("<|im_end|>");
    script.sampled(false);
    script.literal("\n");
  }

  void write_assistant(Script& script, const TemplateInput& c, size_t i) const {
    const Parts parts = split_thinking(c[i], strip(c[i].content));
    const std::string_view content = parts.content;
    const std::string_view reasoning = strip(parts.reasoning);
    const bool template_keeps = static_cast<int>(i) > c.last_query;
    if (template_keeps || (!reasoning.empty() && keeps_thinking(c, i))) {
      // The generation prompt opens the thinking block; with thinking disabled it also closes it.
      script.literal("<think>\n");
      script.sampled(!(reasoning.empty() && c.thinking_disabled()));
      script.words(reasoning);
      script.literal("\n</think>\n\n");
    }
    script.sampled(true);
    script.words(content);
    for (const ToolCall& call : c[i].tool_calls) {
      const bool first = &call == &c[i].tool_calls.front();
      script.literal(!first ? "\n" : strip(content).empty() ? "" : "\n\n");
      write_call(script, c, i, call);
    }
  }

  void write_call(Script& script, const TemplateInput& c, size_t i, const ToolCall& call) const {
    JsonValue arguments{.kind = JsonValue::Kind::object};
    if (!call.arguments.empty()) arguments = arguments_of(c, i, call);
    if (!arguments.is(JsonValue::Kind::object)) {
      refuse(i, "the template takes arguments as an object, not as " +
                    std::string(name_of(arguments.kind)));
    }
    write_xml_call(script, call.name, arguments);
  }

  void write_generation_prompt(Script& script, const TemplateInput& c) const override {
    script.literal("<|im_start|>assistant\n<think>\n");
    if (c.thinking_disabled()) script.literal("\n</think>\n\n");
  }
  void write_turn_end(Script& script) const override { script.literal("\n"); }

  bool prompt_opens_thinking(const TemplateInput& c) const override {
    return !c.thinking_disabled();
  }

  void parse(const Completion& completion, const TemplateInput& c,
             ParsedResponse& out) const override {
    const Thinking thinking = find_thinking(completion, prompt_opens_thinking(c));
    const std::string_view reasoning = strip(thinking.reasoning.value_or(""));
    if (!reasoning.empty()) out.reasoning = reasoning;
    const auto blocks = find_blocks(completion, "<tool_call>", "</tool_call>", thinking.end);
    out.content =
        strip(std::string(thinking.before) + text_outside(completion, blocks, thinking.end));
    read_xml_calls(completion, blocks, c.tools, out);
  }
};

}  // namespace

std::unique_ptr<Renderer> make_qwen3_5(const Tokenizer* tokenizer,
                                       const ThinkingRetention& retention) {
  return std::make_unique<Qwen35>(tokenizer, retention);
}

}  // namespace leeway
