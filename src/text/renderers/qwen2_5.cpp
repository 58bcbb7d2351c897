// Qwen2.5: ChatML with a default system message, JSON tool calls, no thinking.
#include "text/renderers/qwen_shared.h"

namespace leeway {
namespace {

constexpr std::string_view kDefaultSystem =
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.";

class Qwen25 : public FamilyRenderer {
 public:
  Qwen25(const Tokenizer* tokenizer, const ThinkingRetention& retention)
      : FamilyRenderer({.name = "qwen2.5",
                        .has_thinking = false,
                        .controls = qwen_controls(false),
                        .stops = {"<|im_end|>", "<|endoftext|>"},
                        .close = "<|im_end|>",
                        .blocks = {{"<tool_call>", "</tool_call>"}}},
                       tokenizer, retention) {}

 protected:
  void write_opening(Script& script, const TemplateInput& c) const override {
    if (c.size() == 0) refuse(0, "there are no messages");
    const bool has_system = c.role_is(0, Role::system);
    script.at(has_system ? 0 : -1);
    script.literal("<|im_start|>system\n");
    if (has_system && c.tools.empty()) refuse_null(c, 0);
    script.words(has_system ? printed_content(c[0]) : kDefaultSystem);
    if (c.tools.empty()) return script.literal("<|im_end|>\n");
    script.at(-1);
    script.literal("\n\n");
    write_json_tools(script, c);
  }

  void write_message(Script& script, const TemplateInput& c, size_t i) const override {
    const Message& message = c[i];
    if (message.role == Role::tool) {
      return write_tool_response(script, c, i, !c.follows(i, Role::tool), printed_content(message));
    }
    if (message.role == Role::system && i == 0) return;
    if (message.tool_calls.empty()) refuse_null(c, i);
    script.literal("<|im_start|>");
    script.literal(name_of(message.role));
    script.literal("\n");
    script.sampled(message.role == Role::assistant);
    script.words(message.content);
    for (const ToolCall& call : message.tool_calls) {
      // Without content, the header's line break is also that of the first call.
      const bool first = &call == &message.tool_calls.front();
      if (!first || !message.content.empty()) script.literal("\n");
      script.literal("<tool_call>\n{\"name\": \"");
      script.words(call.name);
      script.literal("\", \"arguments\": ");
      script.words(arguments_json(i, call));
      script.literal("}\n</tool_call>");
    }
    script.literal("<|im_end|>");
    script.sampled(false);
    script.literal("\n");
  }

  void write_generation_prompt(Script& script, const TemplateInput&) const override {
    script.literal("<|im_start|>assistant\n");
  }
  void write_turn_end(Script& script) const override { script.literal("\n"); }

  void parse(const Completion& completion, const TemplateInput&,
             ParsedResponse& out) const override {
    parse_json_calls(completion, {}, out);
  }
};

}  // namespace

std::unique_ptr<Renderer> make_qwen2_5(const Tokenizer* tokenizer,
                                       const ThinkingRetention& retention) {
  return std::make_unique<Qwen25>(tokenizer, retention);
}

}  // namespace leeway
