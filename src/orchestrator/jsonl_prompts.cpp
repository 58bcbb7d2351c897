#include "orchestrator/jsonl_prompts.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/files.h"
#include "base/utf8.h"
#include "leeway/error.h"
#include "orchestrator/split.h"
#include "orchestrator/verifiers.h"
#include "text/messages_json.h"

namespace leeway {
namespace {

using Kind = JsonValue::Kind;

// A prompt, its place in the file, and the text that identifies it.
struct Line {
  JsonlPrompt prompt;
  std::string place, identity;
};

// The value of `id` (a string or a number) or else the whole line: two lines with the same prompt
// may be two tasks.
std::string identity_of(const JsonValue& object) {
  const JsonValue* id = object.find("id");
  const bool named = id != nullptr && (id->is(Kind::string) || id->is(Kind::number));
  return named ? "id " + to_json(*id) : "line " + to_json(object);
}

std::vector<Message> prompt_of(const JsonValue& object, const std::string& key) {
  const JsonValue& value = jsonl_member(object, key, "prompt_key");
  if (value.is(Kind::string)) {
    if (value.text.empty()) throw Error(fmt::format("{} is empty", key));
    return {{.role = Role::user, .content = value.text}};
  }
  if (!value.is(Kind::array)) {
    throw Error(
        fmt::format("{} must be a string or a list of messages, not {}", key, name_of(value.kind)));
  }
  std::vector<Message> messages = read_messages(key, to_json(value));
  if (messages.empty()) throw Error(fmt::format("{} is empty", key));
  if (messages.back().role == Role::assistant) {
    throw Error(fmt::format("{} ends in an assistant message: it is the policy's turn", key));
  }
  return messages;
}

// The name of the tool at `place`, which must be a schema.
std::string tool_name(const JsonValue& tool, const std::string& place) {
  if (!tool.is(Kind::object)) {
    throw Error(fmt::format("{} must be an object, not {}", place, name_of(tool.kind)));
  }
  const JsonValue* function = tool.find("function");
  if (function && !function->is(Kind::object)) {
    throw Error(
        fmt::format("{}.function must be an object, not {}", place, name_of(function->kind)));
  }
  if (!function) function = &tool;
  const JsonValue* name = function->find("name");
  if (!name || !name->is(Kind::string) || name->text.empty()) {
    throw Error(fmt::format("{} has no name, a string", place));
  }
  const JsonValue* parameters = function->find("parameters");
  if (parameters && !parameters->is(Kind::object)) {
    throw Error(fmt::format("{}: parameters of {} must be an object, not {}", place, name->text,
                            name_of(parameters->kind)));
  }
  return name->text;
}

std::string tools_of(const JsonValue& object) {
  const JsonValue* tools = object.find("tools");
  if (!tools || tools->is(Kind::null)) return "";
  if (!tools->is(Kind::array)) {
    throw Error(fmt::format("tools must be a list of tool schemas, not {}", name_of(tools->kind)));
  }
  std::set<std::string> names;
  for (size_t i = 0; i < tools->items.size(); ++i) {
    const std::string place = fmt::format("tools[{}]", i);
    const std::string name = tool_name(tools->items[i], place);
    if (!names.insert(name).second) {
      throw Error(fmt::format("{}: another tool is called {}, too", place, name));
    }
  }
  return names.empty() ? "" : to_json(*tools);
}

std::string demonstration_of(const JsonValue& object, const std::vector<std::string>& keys) {
  std::string found;
  for (const std::string& key : keys) {
    const JsonValue* value = object.find(key);
    if (!value || value->is(Kind::null)) continue;
    if (!value->is(Kind::string)) {
      throw Error(fmt::format("{} must be a string, not {}", key, name_of(value->kind)));
    }
    if (!found.empty()) {
      throw Error(fmt::format("{} mean the same: give one", fmt::join(keys, " and ")));
    }
    if (value->text.empty()) throw Error(fmt::format("{} is empty: leave it out", key));
    found = value->text;
  }
  return found;
}

// Parses one line, with its identity; errors do not say which line.
Line read_prompt(std::string_view json, const JsonlReader& reader) {
  if (const size_t valid = valid_utf8_prefix(json); valid < json.size()) {
    throw Error(
        fmt::format("byte {} is not UTF-8; convert the file, as with iconv -f LATIN1 -t "
                    "UTF-8",
                    valid + 1));
  }
  const JsonValue object = read_json("JSON", json);
  if (!object.is(Kind::object)) {
    throw Error(fmt::format("a line must be an object, not {}", name_of(object.kind)));
  }
  Line line;
  line.prompt = {.messages = prompt_of(object, reader.prompt_key),
                 .tools_json = tools_of(object),
                 .demonstration = demonstration_of(object, reader.demonstration_keys),
                 .kept = reader.keep(object)};
  line.identity = identity_of(object);
  return line;
}

// The part of an error after "FILE line N": read_json counts from the start of the line, so its
// "JSON line 1, column C" is column C of that line.
std::string without_first_line(const std::string& message) {
  constexpr std::string_view kFirstLine = "JSON line 1";
  return message.starts_with(kFirstLine) ? message.substr(kFirstLine.size()) : ": " + message;
}

std::vector<Line> read_lines(const std::string& path, const JsonlReader& reader) {
  std::vector<Line> lines;
  for_each_line(read_file(path), [&](size_t number, std::string_view line) {
    std::string place = fmt::format("{} line {}", path, number);
    try {
      lines.push_back(read_prompt(line, reader));
      lines.back().place = place;
    } catch (const Error& error) {
      const size_t first = line.find_first_not_of(" \t");
      const bool is_array = lines.empty() && first != line.npos && line[first] == '[';
      throw Error(
          place + without_first_line(error.what()) +
          (is_array ? " (a JSON array? a line has one object, as jq -c '.[]' writes them)" : ""));
    }
  });
  if (lines.empty()) throw Error(fmt::format("{}: there are no examples in it", path));
  return lines;
}

void refuse_shared_prompts(const std::vector<Line>& train, const std::vector<Line>& held_out) {
  std::map<std::string_view, const Line*> trained;
  for (const Line& line : train) trained.emplace(line.identity, &line);
  for (const Line& line : held_out) {
    const auto shared = trained.find(line.identity);
    if (shared == trained.end()) continue;
    throw Error(fmt::format(
        "{} and {} are the same prompt, {}: take it out of data or of eval_data, since a held-out "
        "prompt is never trained on",
        shared->second->place, line.place,
        line.identity.starts_with("id ") ? "with the same id" : "line for line"));
  }
}

// Splits by the hash of each prompt, but with at least one prompt on each side if there are two.
std::map<std::string_view, Split> split_prompts(const std::vector<Line>& lines) {
  std::map<std::string_view, Split> splits;
  size_t held_out = 0;
  std::string_view lowest = lines.front().identity, highest = lowest;
  for (const Line& line : lines) {
    const Split split = is_held_out(line.identity) ? Split::held_out : Split::train;
    if (splits.emplace(line.identity, split).second) held_out += split == Split::held_out;
    if (prompt_hash(line.identity) < prompt_hash(lowest)) lowest = line.identity;
    if (prompt_hash(line.identity) > prompt_hash(highest)) highest = line.identity;
  }
  if (held_out == splits.size()) splits[highest] = Split::train;
  if (held_out == 0 && splits.size() > 1) splits[lowest] = Split::held_out;
  return splits;
}

}  // namespace

const JsonValue& jsonl_member(const JsonValue& object, const std::string& key,
                              const char* named_by) {
  if (const JsonValue* value = object.find(key)) return *value;
  std::vector<std::string> keys;
  for (const auto& [name, value] : object.members) keys.push_back(name);
  throw Error(fmt::format("the key \"{}\" is missing ({} names it); this line has: {}", key,
                          named_by, fmt::join(keys, ", ")));
}

Example JsonlPrompts::example(Split split, uint64_t index) const {
  LEEWAY_CHECK(index < of(split).size(), "an example beyond the size of its split");
  const JsonlPrompt& prompt = of(split)[index];
  Example example{.index = index, .messages = prompt.messages, .tools_json = prompt.tools_json};
  if (!prompt.demonstration.empty()) {
    example.demonstration = {{.role = Role::assistant, .content = prompt.demonstration}};
  }
  return example;
}

JsonlPrompts read_jsonl_prompts(const std::string& data, const std::string& eval_data,
                                const JsonlReader& reader) {
  if (data.empty()) throw Error("data is missing: it names the JSONL file to train on");
  JsonlPrompts prompts;
  const auto keep = [&](Line& line, Split split) {
    const std::vector<Message>& messages = line.prompt.messages;
    const bool is_text = messages.size() == 1 && messages.front().role == Role::user;
    if (!is_text || !line.prompt.tools_json.empty()) prompts.needs_renderer = true;
    (split == Split::train ? prompts.train : prompts.held_out).push_back(std::move(line.prompt));
  };
  std::vector<Line> lines = read_lines(data, reader);
  if (eval_data.empty()) {
    const auto splits = split_prompts(lines);
    for (Line& line : lines) keep(line, splits.at(line.identity));
    return prompts;
  }
  std::vector<Line> held_out = read_lines(eval_data, reader);
  refuse_shared_prompts(lines, held_out);
  for (Line& line : lines) keep(line, Split::train);
  for (Line& line : held_out) keep(line, Split::held_out);
  return prompts;
}

}  // namespace leeway
