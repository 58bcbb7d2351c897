#include "text/messages_json.h"

#include <fmt/format.h>

#include "base/utf8.h"
#include "leeway/error.h"
#include "text/renderers/json_value.h"

namespace leeway {
namespace {

using Kind = JsonValue::Kind;

// Throws Error with the position in the input in front of the problem.
[[noreturn]] void wrong(const std::string& where, const std::string& what) {
  throw Error(where + ": " + what);
}

// The member, or null if it is absent or null. Throws Error if it has another kind.
const JsonValue* optional_member(const JsonValue& object, const char* key, Kind kind,
                                 const std::string& where) {
  const JsonValue* member = object.find(key);
  if (!member || member->is(Kind::null)) return nullptr;
  if (!member->is(kind)) {
    wrong(where, fmt::format("{} must be {}, not {}", key, name_of(kind), name_of(member->kind)));
  }
  return member;
}

std::string optional_text(const JsonValue& object, const char* key, const std::string& where) {
  const JsonValue* member = optional_member(object, key, Kind::string, where);
  return member ? member->text : "";
}

Role role_of(const JsonValue& message, const std::string& where) {
  const JsonValue* role = optional_member(message, "role", Kind::string, where);
  if (!role) wrong(where, "role is missing; it is one of system, user, assistant, tool");
  for (const Role known : {Role::system, Role::user, Role::assistant, Role::tool}) {
    if (role->text == name_of(known)) return known;
  }
  constexpr size_t kMostBytes = 60;
  std::string_view given = std::string_view(role->text).substr(0, kMostBytes);
  given = given.substr(0, valid_utf8_prefix(given));
  wrong(where, fmt::format("unknown role {}{}; roles are system, user, assistant, tool",
                           to_json(given), given.size() < role->text.size() ? ".." : ""));
}

// {"id"?, "function": {"name", "arguments"}}, or the inner function object alone.
ToolCall read_call(const JsonValue& value, const std::string& where) {
  if (!value.is(Kind::object)) {
    wrong(where, fmt::format("must be an object, not {}", name_of(value.kind)));
  }
  const JsonValue* function = optional_member(value, "function", Kind::object, where);
  if (!function) function = &value;
  ToolCall call;
  call.id = optional_text(value, "id", where);
  call.name = optional_text(*function, "name", where);
  if (call.name.empty()) wrong(where, "the call has no name");
  if (const JsonValue* arguments = function->find("arguments")) {
    if (arguments->is(Kind::number) || arguments->is(Kind::boolean)) {
      wrong(where, fmt::format("arguments must be an object or a string, not {}",
                               name_of(arguments->kind)));
    }
    call.arguments = to_json(*arguments);
  }
  return call;
}

Message read_message(const JsonValue& value, const std::string& where) {
  if (!value.is(Kind::object)) {
    wrong(where, fmt::format("must be an object, not {}", name_of(value.kind)));
  }
  Message message;
  message.role = role_of(value, where);
  if (const JsonValue* calls = optional_member(value, "tool_calls", Kind::array, where)) {
    if (message.role != Role::assistant && !calls->items.empty()) {
      wrong(where, "only an assistant message has tool_calls");
    }
    for (size_t i = 0; i < calls->items.size(); ++i) {
      message.tool_calls.push_back(
          read_call(calls->items[i], fmt::format("{}.tool_calls[{}]", where, i)));
    }
  }
  const JsonValue* content = value.find("content");
  if (!content && message.tool_calls.empty()) wrong(where, "content is missing");
  if (content && content->is(Kind::null)) {
    message.content_is_null = true;
  } else if (content && !content->is(Kind::string)) {
    wrong(where, fmt::format("content must be a string or null, not {}", name_of(content->kind)));
  } else if (content) {
    message.content = content->text;
  }
  if (const auto* thinking = optional_member(value, "reasoning_content", Kind::string, where)) {
    message.reasoning = thinking->text;
  }
  message.tool_call_id = optional_text(value, "tool_call_id", where);
  message.tool_name = optional_text(value, "name", where);
  const JsonValue* prefix = value.find("prefix");
  if (prefix && prefix->truthy()) wrong(where, "prefix is not supported: leave it out");
  return message;
}

std::vector<Message> read_list(const JsonValue& list, const std::string& where) {
  if (!list.is(Kind::array)) {
    wrong(where, fmt::format("must be a list, not {}", name_of(list.kind)));
  }
  std::vector<Message> messages;
  for (size_t i = 0; i < list.items.size(); ++i) {
    messages.push_back(read_message(list.items[i], fmt::format("{}[{}]", where, i)));
  }
  return messages;
}

RenderOptions read_options(const JsonValue& root, const std::string& name) {
  RenderOptions options;
  if (const JsonValue* tools = optional_member(root, "tools", Kind::array, name)) {
    for (size_t i = 0; i < tools->items.size(); ++i) {
      if (tools->items[i].is(Kind::object)) continue;
      wrong(name,
            fmt::format("tools[{}] must be an object, not {}", i, name_of(tools->items[i].kind)));
    }
    options.tools_json = to_json(*tools);
  }
  if (const auto* add = optional_member(root, "add_generation_prompt", Kind::boolean, name)) {
    options.add_generation_prompt = add->truth;
  }
  if (const JsonValue* given = optional_member(root, "options", Kind::object, name)) {
    JsonValue extra{.kind = Kind::object};
    if (const auto* thinks = optional_member(*given, "enable_thinking", Kind::boolean, name)) {
      options.enable_thinking = thinks->truth;
    }
    for (const auto& [key, value] : given->members) {
      if (key != "enable_thinking") extra.members.emplace_back(key, value);
    }
    if (!extra.members.empty()) options.extra_json = to_json(extra);
  }
  return options;
}

void write_member(std::string& out, const char* key, std::string_view value) {
  if (!value.empty()) out += fmt::format(", \"{}\": {}", key, to_json(value));
}

std::string write_call(const ToolCall& call) {
  std::string out = "{\"type\": \"function\"";
  write_member(out, "id", call.id);
  out += fmt::format(", \"function\": {{\"name\": {}", to_json(call.name));
  if (!call.arguments.empty()) out += ", \"arguments\": " + call.arguments;
  return out + "}}";
}

}  // namespace

namespace {

RenderRequest read_request(const std::string& name, const JsonValue& root) {
  if (!root.is(Kind::object)) {
    wrong(name, fmt::format("must be an object with \"messages\", not {}", name_of(root.kind)));
  }
  const JsonValue* messages = root.find("messages");
  if (!messages) wrong(name, "messages are missing");
  return {read_list(*messages, name + ": messages"), read_options(root, name)};
}

}  // namespace

RenderRequest read_render_request(const std::string& name, std::string_view json) {
  return read_request(name, read_json(name, json));
}

RenderRequest read_conversation(const std::string& name, std::string_view json) {
  const JsonValue root = read_json(name, json);
  RenderRequest request;
  if (root.is(Kind::array)) {
    request.messages = read_list(root, name + ": messages");
  } else {
    request = read_request(name, root);
  }
  if (request.messages.empty()) wrong(name, "messages: the list is empty");
  return request;
}

std::vector<Message> read_messages(const std::string& name, std::string_view json) {
  return read_list(read_json(name, json), name + ": messages");
}

std::string write_messages(const std::vector<Message>& messages) {
  std::string out = "[";
  for (const Message& message : messages) {
    if (out.size() > 1) out += ", ";
    out += fmt::format("{{\"role\": \"{}\", \"content\": {}", name_of(message.role),
                       message.content_is_null ? "null" : to_json(message.content));
    if (message.reasoning) {
      out += fmt::format(", \"reasoning_content\": {}", to_json(*message.reasoning));
    }
    write_member(out, "tool_call_id", message.tool_call_id);
    write_member(out, "name", message.tool_name);
    for (const ToolCall& call : message.tool_calls) {
      out += &call == &message.tool_calls.front() ? ", \"tool_calls\": [" : ", ";
      out += write_call(call);
    }
    if (!message.tool_calls.empty()) out += "]";
    out += "}";
  }
  return out + "]";
}

}  // namespace leeway
