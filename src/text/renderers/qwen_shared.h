// What Qwen2.5, Qwen3, Qwen3.5 and Qwen3-Coder have in common.
#pragma once

#include <string_view>
#include <vector>

#include "text/renderers/family.h"

namespace leeway {

// The ChatML tokens and the tags that newer vocabularies have as tokens.
std::vector<Control> qwen_controls(bool has_thinking);

// The JSON-style tool list of Qwen2.5 and Qwen3, up to the end of the system block.
void write_json_tools(Script& script, const TemplateInput& c);
// A tool result; consecutive ones share one user turn.
void write_tool_response(Script& script, const TemplateInput& c, size_t i, bool opens,
                         std::string_view content);
// The last user message that is not a wrapped tool result, or `none` if there is none.
int last_query_index(const TemplateInput& c, bool trimmed, int none);

// Parses the content after the thinking and the <tool_call> blocks with JSON in them.
void parse_json_calls(const Completion& completion, const Thinking& thinking, ParsedResponse& out);

// The end of the XML-style tool list of Qwen3.5 and Qwen3-Coder: how calls are written.
extern const std::string_view kXmlCallFormat;
// <tool_call> with <function=NAME> and one <parameter=KEY> per argument; `arguments` is an object.
void write_xml_call(Script& script, std::string_view name, const JsonValue& arguments);
// Appends the calls in `blocks`, which that function wrote or the model sampled.
void read_xml_calls(const Completion& completion, const std::vector<Block>& blocks,
                    const std::vector<JsonValue>& tools, ParsedResponse& out);

}  // namespace leeway
