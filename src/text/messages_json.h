// Conversations as JSON: the input of `leeway render` and of `leeway generate --messages`.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/renderer.h"

namespace leeway {

struct RenderRequest {
  std::vector<Message> messages;
  RenderOptions options;
};

// {"messages": [..], "tools": [..]?, "add_generation_prompt": bool?, "options": {..}?}. Messages
// use OpenAI's keys: role, content (a string or null), reasoning_content, tool_calls, tool_call_id,
// name. Types are checked strictly; other keys are ignored. Throws Error with `name` and the line
// for invalid JSON, and with the index of the message for invalid messages.
RenderRequest read_render_request(const std::string& name, std::string_view json);

// Either of the two forms: a list of messages, or the object above. Throws Error also if there is
// no message.
RenderRequest read_conversation(const std::string& name, std::string_view json);

// Only the list of messages.
std::vector<Message> read_messages(const std::string& name, std::string_view json);

// The inverse of read_messages.
std::string write_messages(const std::vector<Message>& messages);

}  // namespace leeway
