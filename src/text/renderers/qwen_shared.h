// What Qwen2.5, Qwen3 and Qwen3.5 have in common.
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

}  // namespace leeway
