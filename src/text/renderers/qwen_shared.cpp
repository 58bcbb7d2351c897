#include "text/renderers/qwen_shared.h"

#include "text/renderers/python_strings.h"

namespace leeway {
namespace {

// <function=NAME> <parameter=KEY> VALUE </parameter> .. </function>
void read_xml_call(ParsedToolCall& parsed, std::string_view text,
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

}  // namespace

const std::string_view kXmlCallFormat =
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
    "and do not tell the user about function calls\n</IMPORTANT>";

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

void write_xml_call(Script& script, std::string_view name, const JsonValue& arguments) {
  script.literal("<tool_call>\n<function=");
  script.words(name);
  script.literal(">\n");
  for (const auto& [key, value] : arguments.members) {
    script.literal("<parameter=");
    script.words(key);
    script.literal(">\n");
    script.words(to_python_text(value));
    script.literal("\n</parameter>\n");
  }
  script.literal("</function>\n</tool_call>");
}

void read_xml_calls(const Completion& completion, const std::vector<Block>& blocks,
                    const std::vector<JsonValue>& tools, ParsedResponse& out) {
  for (const Block& block : blocks) {
    out.tool_calls.push_back(call_of(completion, block));
    read_xml_call(out.tool_calls.back(), completion.text(block.inner_begin, block.inner_end),
                  tools);
  }
}

}  // namespace leeway
