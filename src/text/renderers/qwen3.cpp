// Qwen3: ChatML, JSON tool calls, thinking kept after the last query. Two texts of the template are
// published, which differ in null content: the later one, which writes nothing for it, is followed.
#include "text/renderers/python_strings.h"
#include "text/renderers/qwen_shared.h"

namespace leeway {
namespace {

class Qwen3 : public FamilyRenderer {
 public:
  Qwen3(const Tokenizer* tokenizer, const ThinkingRetention& retention)
      : FamilyRenderer({.name = "qwen3",
                        .has_thinking = true,
                        .controls = qwen_controls(true),
                        .stops = {"<|im_end|>", "<|endoftext|>"},
                        .close = "<|im_end|>",
                        .blocks = {{"<think>", "</think>"}, {"<tool_call>", "</tool_call>"}}},
                       tokenizer, retention) {}

 protected:
  void prepare(TemplateInput& c) const override {
    c.last_query = last_query_index(c, false, static_cast<int>(c.size()) - 1);
  }

  void write_opening(Script& script, const TemplateInput& c) const override {
    if (c.size() == 0) refuse(0, "there are no messages");
    const bool has_system = c.role_is(0, Role::system);
    if (!has_system && c.tools.empty()) return;
    script.at(has_system ? 0 : -1);
    script.literal("<|im_start|>system\n");
    if (has_system) {
      refuse_null(c, 0);
      script.words(c[0].content);
      if (c.tools.empty()) return script.literal("<|im_end|>\n");
      script.at(-1);
      script.literal("\n\n");
    }
    write_json_tools(script, c);
  }

  void write_message(Script& script, const TemplateInput& c, size_t i) const override {
    const Message& message = c[i];
    if (message.role == Role::tool) {
      return write_tool_response(script, c, i, !c.follows(i, Role::tool), message.content);
    }
    if (message.role == Role::system && i == 0) return;
    script.literal("<|im_start|>");
    script.literal(name_of(message.role));
    script.literal("\n");
    if (message.role == Role::assistant) {
      write_assistant(script, c, i);
    } else {
      script.words(message.content);
    }
    script.literal("<|im_end|>");
    script.sampled(false);
    script.literal("\n");
  }

  void write_assistant(Script& script, const TemplateInput& c, size_t i) const {
    const auto [reasoning, content] = split_thinking(c[i], c[i].content);
    const bool template_keeps =
        static_cast<int>(i) > c.last_query && (c.is_last(i) || !reasoning.empty());
    if (template_keeps || (!reasoning.empty() && keeps_thinking(c, i))) {
      // With thinking disabled, the empty block is part of the generation prompt.
      script.sampled(!(reasoning.empty() && c.thinking_disabled()));
      script.literal("<think>\n");
      script.words(strip_newlines(reasoning));
      script.literal("\n</think>\n\n");
      script.sampled(true);
      script.words(lstrip_newlines(content));
    } else {
      script.sampled(true);
      script.words(content);
    }
    for (const ToolCall& call : c[i].tool_calls) {
      const bool first = &call == &c[i].tool_calls.front();
      if (!first || !content.empty()) script.literal("\n");
      script.literal("<tool_call>\n{\"name\": \"");
      script.words(call.name);
      script.literal("\", \"arguments\": ");
      script.words(arguments_text(c, i, call));
      script.literal("}\n</tool_call>");
    }
  }

  void write_generation_prompt(Script& script, const TemplateInput& c) const override {
    script.literal("<|im_start|>assistant\n");
    if (c.thinking_disabled()) script.literal("<think>\n\n</think>\n\n");
  }
  void write_turn_end(Script& script) const override { script.literal("\n"); }

  void parse(const Completion& completion, const TemplateInput&,
             ParsedResponse& out) const override {
    const Thinking thinking = find_thinking(completion, false);
    const std::string_view reasoning = strip_newlines(thinking.reasoning.value_or(""));
    if (!reasoning.empty()) out.reasoning = reasoning;
    parse_json_calls(completion, thinking, out);
  }
};

}  // namespace

std::unique_ptr<Renderer> make_qwen3(const Tokenizer* tokenizer,
                                     const ThinkingRetention& retention) {
  return std::make_unique<Qwen3>(tokenizer, retention);
}

}  // namespace leeway
