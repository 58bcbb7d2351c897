#include "orchestrator/demonstrations.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/files.h"
#include "leeway/error.h"
#include "text/messages_json.h"
#include "text/renderers/json_value.h"

namespace leeway {
namespace {

std::string text_of(const JsonValue& object, const char* key) {
  const JsonValue* value = object.find(key);
  if (value == nullptr) {
    throw Error(fmt::format(
        "has no \"{}\"; a line holds \"messages\", or \"prompt\" and \"completion\"", key));
  }
  if (!value->is(JsonValue::Kind::string) || value->text.empty()) {
    throw Error(fmt::format("\"{}\" must be a string that is not empty", key));
  }
  return value->text;
}

Example read_demonstration(std::string_view line) {
  const JsonValue object = read_json("JSON", line);
  if (!object.is(JsonValue::Kind::object)) throw Error("is not a JSON object");
  Example example;
  if (object.find("messages") == nullptr) {
    example.messages = {{.role = Role::user, .content = text_of(object, "prompt")}};
    example.demonstration = {{.role = Role::assistant, .content = text_of(object, "completion")}};
    return example;
  }
  RenderRequest request = read_render_request("JSON", line);
  const auto first =
      std::find_if(request.messages.begin(), request.messages.end(),
                   [](const Message& message) { return message.role == Role::assistant; });
  if (first == request.messages.end()) {
    throw Error("\"messages\" has no assistant message: there is nothing to learn");
  }
  if (first == request.messages.begin()) {
    throw Error("\"messages\" begins with an assistant message: nothing predicts it");
  }
  example.demonstration.assign(first, request.messages.end());
  example.messages.assign(request.messages.begin(), first);
  example.tools_json = request.options.tools_json;
  return example;
}

}  // namespace

std::vector<Example> load_demonstrations(const std::string& path) {
  std::vector<Example> examples;
  for_each_line(read_file(path), [&](size_t number, std::string_view line) {
    try {
      examples.push_back(read_demonstration(line));
      examples.back().index = examples.size() - 1;
    } catch (const Error& error) {
      throw Error(fmt::format("{} line {}: {}", path, number, error.what()));
    }
  });
  if (examples.empty()) throw Error(path + ": contains no demonstration");
  return examples;
}

}  // namespace leeway
