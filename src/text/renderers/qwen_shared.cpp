#include "text/renderers/qwen_shared.h"

#include "text/renderers/python_strings.h"

namespace leeway {

std::vector<Control> qwen_controls(bool has_thinking) {
  std::vector<Control> controls = {
      {"<|im_start|>", true}, {"<|im_end|>", true}, {"<|endoftext|>"},   {"<tool_call>"},
      {"</tool_call>"},       {"<tool_response>"},  {"</tool_response>"}};
  if (has_thinking) {
    controls.push_back({"<think>"});
    controls.push_back({"</think>"});
  }
  return controls;
}

void write_json_tools(Script& script, const TemplateInput& c) {
  script.literal(
      "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
      "You are provided with function signatures within <tools></tools> XML tags:\n<tools>");
  for (const JsonValue& tool : c.tools) {
    script.literal("\n");
    script.words(to_json(tool));
  }
  script.literal(
      "\n</tools>\n\nFor each function call, return a json object with function name and "
      "arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
      "{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n");
}

void write_tool_response(Script& script, const TemplateInput& c, size_t i, bool opens,
                         std::string_view content) {
  if (opens) script.literal("<|im_start|>user");
  script.literal("\n<tool_response>\n");
  script.words(content);
  script.literal("\n</tool_response>");
  if (!c.precedes(i, Role::tool)) script.literal("<|im_end|>\n");
}

int last_query_index(const TemplateInput& c, bool trimmed, int none) {
  for (size_t i = c.size(); i-- > 0;) {
    if (c[i].role != Role::user) continue;
    const std::string_view content = trimmed ? strip(c[i].content) : c[i].content;
    if (!content.starts_with("<tool_response>") || !content.ends_with("</tool_response>")) {
      return static_cast<int>(i);
    }
  }
  return none;
}

void parse_json_calls(const Completion& completion, const Thinking& thinking, ParsedResponse& out) {
  const auto blocks = find_blocks(completion, "<tool_call>", "</tool_call>", thinking.end);
  std::string content = text_outside(completion, blocks, thinking.end);
  if (!blocks.empty() && content.ends_with('\n')) content.pop_back();
  if (thinking.reasoning) content = lstrip_newlines(content);
  out.content = std::string(thinking.before) + content;
  for (const Block& block : blocks) {
    out.tool_calls.push_back(call_of(completion, block));
    read_json_call(out.tool_calls.back(), completion.text(block.inner_begin, block.inner_end),
                   "arguments");
  }
}

}  // namespace leeway
