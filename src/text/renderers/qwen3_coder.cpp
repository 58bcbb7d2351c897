// Qwen3-Coder: ChatML, tools as XML, XML-style tool calls, no thinking.
#include <algorithm>
#include <array>

#include "text/renderers/python_strings.h"
#include "text/renderers/qwen_shared.h"

namespace leeway {
namespace {

using Kind = JsonValue::Kind;

void write_tag(Script& script, std::string_view name, std::string_view text) {
  script.literal("\n<");
  script.words(name);
  script.literal(">");
  script.words(text);
  script.literal("</");
  script.words(name);
  script.literal(">");
}

// The members of `object` beside `handled`, each in its own tag.
template <size_t N>
void write_other_members(Script& script, const JsonValue& object,
                         const std::array<std::string_view, N>& handled) {
  for (const auto& [key, value] : object.members) {
    if (std::find(handled.begin(), handled.end(), key) != handled.end()) continue;
    write_tag(script, key, to_python_text(value));
  }
}

void write_parameter(Script& script, const std::string& name, const JsonValue& fields) {
  script.literal("\n<parameter>");
  write_tag(script, "name", name);
  if (const JsonValue* type = fields.find("type")) write_tag(script, "type", to_python_repr(*type));
  if (const JsonValue* description = fields.find("description")) {
    write_tag(script, "description", strip(to_python_repr(*description)));
  }
  write_other_members(script, fields,
                      std::array<std::string_view, 3>{"name", "type", "description"});
  script.literal("\n</parameter>");
}

void write_tool(Script& script, const JsonValue& given) {
  const JsonValue* inner = given.find("function");
  const JsonValue& tool = inner ? *inner : given;
  script.literal("\n<function>");
  const JsonValue* name = tool.find("name");
  write_tag(script, "name", name ? to_python_repr(*name) : "");
  if (const JsonValue* description = tool.find("description")) {
    write_tag(script, "description", strip(to_python_repr(*description)));
  }
  script.literal("\n<parameters>");
  if (const JsonValue* parameters = tool.find("parameters")) {
    const JsonValue* properties = parameters->find("properties");
    if (properties && properties->is(Kind::object)) {
      for (const auto& [key, fields] : properties->members) write_parameter(script, key, fields);
    }
    write_other_members(script, *parameters, std::array<std::string_view, 2>{"type", "properties"});
  }
  script.literal("\n</parameters>");
  write_other_members(script, tool,
                      std::array<std::string_view, 4>{"type", "name", "description", "parameters"});
  script.literal("\n</function>");
}

class Qwen3Coder : public FamilyRenderer {
 public:
  Qwen3Coder(const Tokenizer* tokenizer, const ThinkingRetention& retention)
      : FamilyRenderer({.name = "qwen3-coder",
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
    if (!has_system && c.tools.empty()) return;
    script.at(has_system ? 0 : -1);
    script.literal("<|im_start|>system\n");
    if (has_system) {
      refuse_null(c, 0);
      script.words(c[0].content);
    } else {
      script.literal(
          "You are Qwen, a helpful AI assistant that can interact with a computer to solve tasks.");
    }
    if (!c.tools.empty()) {
      script.at(-1);
      script.literal("\n\n# Tools\n\nYou have access to the following functions:\n\n<tools>");
      for (const JsonValue& tool : c.tools) write_tool(script, tool);
      script.literal(kXmlCallFormat);
    }
    script.literal("<|im_end|>\n");
  }

  void write_message(Script& script, const TemplateInput& c, size_t i) const override {
    const Message& message = c[i];
    if (message.role == Role::system && i == 0) return;
    if (message.role == Role::tool) return write_tool_message(script, c, i);
    if (message.tool_calls.empty()) refuse_null(c, i);
    script.literal("<|im_start|>");
    script.literal(name_of(message.role));
    script.literal("\n");
    script.sampled(message.role == Role::assistant);
    if (message.tool_calls.empty()) {
      script.words(message.content);
    } else {
      write_calls(script, c, i);
    }
    script.literal("<|im_end|>");
    script.sampled(false);
    script.literal("\n");
  }

  void write_calls(Script& script, const TemplateInput& c, size_t i) const {
    const std::string_view content = strip(c[i].content);
    script.words(content);
    if (!content.empty()) script.literal("\n\n");
    for (const ToolCall& call : c[i].tool_calls) {
      if (&call != &c[i].tool_calls.front()) script.literal("\n");
      JsonValue arguments{.kind = Kind::object};
      if (!call.arguments.empty()) arguments = arguments_of(c, i, call);
      if (!arguments.is(Kind::object)) {
        refuse(i, "the template takes arguments as an object, not as " +
                      std::string(name_of(arguments.kind)));
      }
      write_xml_call(script, call.name, arguments);
    }
  }

  // Consecutive results share one user turn. The template opens none for a result that is the first
  // message after the system message.
  void write_tool_message(Script& script, const TemplateInput& c, size_t i) const {
    const bool is_first = i == 0 || (i == 1 && c.role_is(0, Role::system));
    if (!is_first && !c.follows(i, Role::tool)) script.literal("<|im_start|>user\n");
    script.literal("<tool_response>\n");
    script.words(printed_content(c[i]));
    script.literal("\n</tool_response>\n");
    if (!c.precedes(i, Role::tool)) script.literal("<|im_end|>\n");
  }

  void write_generation_prompt(Script& script, const TemplateInput&) const override {
    script.literal("<|im_start|>assistant\n");
  }
  void write_turn_end(Script& script) const override { script.literal("\n"); }

  void parse(const Completion& completion, const TemplateInput& c,
             ParsedResponse& out) const override {
    const auto blocks = find_blocks(completion, "<tool_call>", "</tool_call>", 0);
    out.content = text_outside(completion, blocks, 0);
    if (!blocks.empty()) out.content = std::string(strip(out.content));
    read_xml_calls(completion, blocks, c.tools, out);
  }
};

}  // namespace

std::unique_ptr<Renderer> make_qwen3_coder(const Tokenizer* tokenizer,
                                           const ThinkingRetention& retention) {
  return std::make_unique<Qwen3Coder>(tokenizer, retention);
}

}  // namespace leeway
