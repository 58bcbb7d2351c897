#include "text/renderers/completion.h"

#include <algorithm>
#include <tuple>

#include "leeway/error.h"
#include "text/renderers/python_strings.h"

namespace leeway {
namespace {

std::optional<JsonValue> try_json(std::string_view text) {
  try {
    return read_json("arguments", text);
  } catch (const Error&) {
    return std::nullopt;
  }
}

// The "type" that a tool's schema gives an argument, or null if unknown.
const JsonValue* schema_type(std::string_view function, std::string_view argument,
                             const std::vector<JsonValue>& tools) {
  for (const JsonValue& tool : tools) {
    const JsonValue* schema = tool.find("function");
    if (!schema) schema = &tool;
    const JsonValue* name = schema->find("name");
    if (!name || name->text != function) continue;
    const JsonValue* at = schema->find("parameters");
    if (at) at = at->find("properties");
    if (at) at = at->find(argument);
    return at ? at->find("type") : nullptr;
  }
  return nullptr;
}

}  // namespace

Completion::Completion(std::span<const int32_t> ids, const Tokenizer& tokenizer,
                       const std::vector<Control>& controls, std::span<const int32_t> stops) {
  for (const int32_t id : ids) {
    closed_ = std::find(stops.begin(), stops.end(), id) != stops.end();
    if (closed_) break;
    for (const Control& control : controls) {
      if (control.id == id) marks_.push_back({text_.size(), control.text});
    }
    try {
      text_ += tokenizer.decode({&id, 1});
    } catch (const Error&) {
      text_ += "\xef\xbf\xbd";
    }
    token_ends_.push_back(text_.size());
  }
  for (const Control& control : controls) {
    if (control.id >= 0) continue;
    for (size_t at = text_.find(control.text); at != kNone; at = text_.find(control.text, at + 1)) {
      marks_.push_back({at, control.text});
    }
  }
  std::stable_sort(marks_.begin(), marks_.end(),
                   [](const Mark& a, const Mark& b) { return a.at < b.at; });
}

size_t Completion::find(std::string_view control, size_t from, size_t to) const {
  auto mark = std::lower_bound(marks_.begin(), marks_.end(), from,
                               [](const Mark& m, size_t at) { return m.at < at; });
  for (; mark != marks_.end() && mark->at < to; ++mark) {
    if (mark->text == control) return mark->at;
  }
  return kNone;
}

std::pair<size_t, size_t> Completion::tokens(size_t begin, size_t end) const {
  const auto token_at = [&](size_t byte) {
    return static_cast<size_t>(std::upper_bound(token_ends_.begin(), token_ends_.end(), byte) -
                               token_ends_.begin());
  };
  if (end <= begin) return {token_at(begin), token_at(begin)};
  return {token_at(begin), token_at(end - 1) + 1};
}

Thinking find_thinking(const Completion& completion, bool prompt_opens) {
  constexpr std::string_view kOpen = "<think>", kClose = "</think>";
  const size_t open = completion.find(kOpen);
  const size_t close = completion.find(kClose);
  Thinking thinking;
  if (open != Completion::kNone && (close == Completion::kNone || open < close)) {
    const size_t begin = open + kOpen.size();
    const size_t end = std::min(close, completion.size());
    // If the prompt opened the block, everything before a second opening tag belongs to it.
    if (prompt_opens) {
      thinking.reasoning = completion.text(0, end);
    } else {
      thinking.before = completion.text(0, open);
      thinking.reasoning = completion.text(begin, end);
    }
  } else if (close != Completion::kNone) {
    thinking.reasoning = completion.text(0, close);
  } else if (prompt_opens) {
    thinking.reasoning = completion.text();
  } else {
    return thinking;
  }
  thinking.open = close == Completion::kNone;
  thinking.end = thinking.open ? completion.size() : close + kClose.size();
  return thinking;
}

std::vector<Block> find_blocks(const Completion& completion, std::string_view open,
                               std::string_view close, size_t from, size_t to) {
  to = std::min(to, completion.size());
  std::vector<Block> blocks;
  for (size_t at = completion.find(open, from, to); at < to;) {
    const size_t inner = at + open.size();
    const size_t next = std::min(completion.find(open, inner, to), to);
    const size_t end = completion.find(close, inner, next);
    const bool closed = end < next;
    blocks.push_back(closed ? Block{at, inner, end, end + close.size(), true}
                            : Block{at, inner, next, next, false});
    at = next;
  }
  return blocks;
}

std::string text_outside(const Completion& completion, const std::vector<Block>& blocks,
                         size_t from) {
  const size_t first = blocks.empty() ? completion.size() : blocks.front().begin;
  std::string outside(completion.text(from, first));
  for (size_t i = 0; i < blocks.size(); ++i) {
    const size_t next = i + 1 < blocks.size() ? blocks[i + 1].begin : completion.size();
    const std::string_view between = completion.text(blocks[i].end, next);
    if (!strip(between).empty()) outside += between;
  }
  return outside;
}

ParsedToolCall call_of(const Completion& completion, const Block& block) {
  ParsedToolCall parsed;
  parsed.raw = completion.text(block.begin, block.end);
  std::tie(parsed.first_token, parsed.last_token) = completion.tokens(block.begin, block.end);
  if (!block.closed) parsed.status = ToolCallStatus::unclosed_block;
  return parsed;
}

void set_json_arguments(ParsedToolCall& parsed, std::string_view arguments) {
  parsed.call.arguments = strip(arguments);
  if (parsed.status != ToolCallStatus::ok) return;
  const std::optional<JsonValue> value = try_json(parsed.call.arguments);
  if (!value) {
    parsed.status = ToolCallStatus::invalid_json;
  } else if (!value->is(JsonValue::Kind::object)) {
    parsed.status = ToolCallStatus::malformed;
  } else if (parsed.call.name.empty()) {
    parsed.status = ToolCallStatus::missing_name;
  }
}

void read_json_call(ParsedToolCall& parsed, std::string_view json, std::string_view arguments_key) {
  const std::optional<JsonValue> value = try_json(strip(json));
  const auto set_status = [&](ToolCallStatus status) {
    if (parsed.status == ToolCallStatus::ok) parsed.status = status;
  };
  if (!value) return set_status(ToolCallStatus::invalid_json);
  if (!value->is(JsonValue::Kind::object)) return set_status(ToolCallStatus::malformed);
  const JsonValue* name = value->find("name");
  if (name && name->is(JsonValue::Kind::string)) parsed.call.name = name->text;
  const JsonValue* arguments = value->find(arguments_key);
  parsed.call.arguments = arguments ? std::string(raw_member(json, arguments_key)) : "{}";
  if (parsed.call.arguments.empty()) parsed.call.arguments = to_json(*arguments);
  if (parsed.call.name.empty()) return set_status(ToolCallStatus::missing_name);
  if (arguments && !arguments->is(JsonValue::Kind::object)) {
    set_status(ToolCallStatus::malformed);
  }
}

JsonValue read_typed(std::string_view text, std::string_view function, std::string_view argument,
                     const std::vector<JsonValue>& tools) {
  const JsonValue* type = schema_type(function, argument, tools);
  const auto is_text = [](const JsonValue& t) { return t.text == "string"; };
  if (type && (is_text(*type) || std::any_of(type->items.begin(), type->items.end(), is_text))) {
    return JsonValue::of_string(text);
  }
  // Templates write these three the way Python does.
  if (text == "True" || text == "False") {
    return {.kind = JsonValue::Kind::boolean, .truth = text == "True"};
  }
  if (text == "None") return {};
  std::optional<JsonValue> value = try_json(text);
  // A quoted string keeps its quotes: templates write strings without them.
  if (!value || value->is(JsonValue::Kind::string)) return JsonValue::of_string(text);
  return std::move(*value);
}

}  // namespace leeway
