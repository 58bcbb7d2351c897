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
    script.literal(
        "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO "
        "suffix:\n\n<tool_call>\n<function=example_function_name>\n"
        "<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
        "<parameter=example_parameter_2>\nThis is the value for the second parameter\n"
        "that can span\nmultiple lines\n</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\n"
        "Reminder:\n- Function calls MUST follow the specified format: an inner "
        "<function=...></function> block must be nested within <tool_call></tool_call> XML tags\n"
        "- Required parameters MUST be specified\n- You may provide optional reasoning for your "
        "function call in natural language BEFORE the function call, but NOT after\n- If there is "
        "no function call available, answer the question like normal with your current knowledge "
        "and do not tell the user about function calls\n</IMPORTANT>");
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
    script.literal("<tool_call>\n<function=");
    script.words(call.name);
    script.literal(">\n");
    if (!call.arguments.empty()) {
      const JsonValue arguments = arguments_of(c, i, call);
      if (!arguments.is(JsonValue::Kind::object)) {
        refuse(i, "the template takes arguments as an object, not as " +
                      std::string(name_of(arguments.kind)));
      }
      for (const auto& [name, value] : arguments.members) {
        script.literal("<parameter=");
        script.words(name);
        script.literal(">\n");
        script.words(to_python_text(value));
        script.literal("\n</parameter>\n");
      }
    }
    script.literal("</function>\n</tool_call>");
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
    for (const Block& block : blocks) {
      out.tool_calls.push_back(call_of(completion, block));
      read_call(out.tool_calls.back(), completion.text(block.inner_begin, block.inner_end),
                c.tools);
    }
  }

  // <function=NAME> <parameter=KEY> VALUE </parameter> .. </function>
  static void read_call(ParsedToolCall& parsed, std::string_view text,
                        const std::vector<JsonValue>& tools) {
    const auto broken = [&](ToolCallStatus status) {
      if (parsed.status == ToolCallStatus::ok) parsed.status = status;
    };
    // Takes the text between `mark` and `end` and removes it from the front of `text`.
    const auto take = [&](std::string_view mark, std::string_view end, std::string_view& part) {
      const size_t at = text.find(mark);
      if (at == std::string_view::npos) return false;
      const size_t close = text.find(end, at + mark.size());
      if (close == std::string_view::npos) return false;
      part = text.substr(at + mark.size(), close - at - mark.size());
      text.remove_prefix(close + end.size());
      return true;
    };
    std::string_view name, key, value;
    JsonValue arguments{.kind = JsonValue::Kind::object};
    if (!take("<function=", ">", name)) return broken(ToolCallStatus::malformed);
    parsed.call.name = strip(name);
    while (contains(text, "<parameter=")) {
      if (!take("<parameter=", ">", key) || !take("", "</parameter>", value)) {
        return broken(ToolCallStatus::malformed);
      }
      if (value.starts_with('\n')) value.remove_prefix(1);
      if (value.ends_with('\n')) value.remove_suffix(1);
      arguments.set(key, read_typed(value, parsed.call.name, key, tools));
    }
    parsed.call.arguments = to_json(arguments);
    if (parsed.call.name.empty()) return broken(ToolCallStatus::missing_name);
    if (!contains(text, "</function>")) broken(ToolCallStatus::malformed);
  }
};

}  // namespace

std::unique_ptr<Renderer> make_qwen3_5(const Tokenizer* tokenizer,
                                       const ThinkingRetention& retention) {
  return std::make_unique<Qwen35>(tokenizer, retention);
}

}  // namespace leeway
