#include "text/renderers/family.h"

#include <fmt/format.h>

#include <algorithm>

#include "leeway/error.h"
#include "text/renderers/python_strings.h"

namespace leeway {
namespace {

// Whether the text ends inside a UTF-8 character.
bool ends_inside_character(std::string_view text) {
  size_t tail = 0;
  while (tail < 3 && tail < text.size() && (text[text.size() - 1 - tail] & 0xc0) == 0x80) ++tail;
  if (tail == text.size()) return false;
  const auto lead = static_cast<unsigned char>(text[text.size() - 1 - tail]);
  const size_t needed = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : lead >= 0xc0 ? 1 : 0;
  return tail < needed;
}

}  // namespace

Parts split_thinking(const Message& message, std::string_view content) {
  if (message.reasoning) return {*message.reasoning, content};
  if (!contains(content, "</think>")) return {{}, content};
  const std::string_view head = rstrip_newlines(before_first(content, "</think>"));
  return {lstrip_newlines(after_last(head, "<think>")),
          lstrip_newlines(after_last(content, "</think>"))};
}

FamilyRenderer::FamilyRenderer(FamilySpec spec, const Tokenizer* tokenizer,
                               const ThinkingRetention& retention)
    : spec_(std::move(spec)), tokenizer_(tokenizer), retention_(retention) {
  const bool asked =
      retention.preserve_all_thinking || retention.preserve_thinking_between_tool_calls;
  if (asked && !spec_.has_thinking) {
    throw Error(fmt::format("renderer {} has no thinking: {} has no effect; remove it", spec_.name,
                            retention.preserve_all_thinking
                                ? "preserve_all_thinking (thinking_retention = \"all\")"
                                : "preserve_thinking_between_tool_calls (thinking_retention = "
                                  "\"between_tool_calls\")"));
  }
  if (!tokenizer_) return;
  for (Control& control : spec_.controls) {
    control.id = tokenizer_->token_id(control.text).value_or(-1);
    if (control.id < 0 && control.required) {
      throw Error(fmt::format("renderer {} needs the token {}, which the tokenizer does not have",
                              spec_.name, control.text));
    }
  }
  for (const char* stop : spec_.stops) {
    if (const auto id = tokenizer_->token_id(stop)) stops_.push_back(*id);
  }
}

int32_t FamilyRenderer::control_id(std::string_view text) const {
  for (const Control& control : spec_.controls) {
    if (control.text == text) return control.id;
  }
  return -1;
}

TemplateInput FamilyRenderer::open(const std::vector<Message>& messages,
                                   const RenderOptions& options) const {
  TemplateInput c{.messages = messages, .options = options};
  if (!options.tools_json.empty()) {
    JsonValue tools = read_json("tools", options.tools_json);
    if (!tools.is(JsonValue::Kind::array)) throw Error("tools must be a list");
    c.tools = std::move(tools.items);
  }
  if (!options.extra_json.empty()) c.extra = read_json("options", options.extra_json);
  return c;
}

Script FamilyRenderer::write(const std::vector<Message>& messages,
                             const RenderOptions& options) const {
  TemplateInput c = open(messages, options);
  prepare(c);
  Script script(spec_.controls);
  write_opening(script, c);
  for (size_t i = 0; i < messages.size(); ++i) {
    script.at(static_cast<int>(i));
    write_message(script, c, i);
    script.sampled(false);
  }
  script.at(-1);
  if (options.add_generation_prompt) write_generation_prompt(script, c);
  return script;
}

std::string FamilyRenderer::render_text(const std::vector<Message>& messages,
                                        const RenderOptions& options) const {
  return write(messages, options).text();
}

Rendered FamilyRenderer::render(const std::vector<Message>& messages,
                                const RenderOptions& options) const {
  LEEWAY_CHECK(tokenizer_, "a renderer without a tokenizer can only render text");
  Rendered rendered;
  write(messages, options).encode(*tokenizer_, rendered);
  return rendered;
}

ParsedResponse FamilyRenderer::parse_response(std::span<const int32_t> ids,
                                              const RenderOptions& options) const {
  LEEWAY_CHECK(tokenizer_, "a renderer without a tokenizer can only render text");
  const Completion completion(ids, *tokenizer_, spec_.controls, stops_);
  ParsedResponse response;
  response.closed = completion.closed();
  const std::vector<Message> no_messages;
  parse(completion, open(no_messages, options), response);
  return response;
}

bool FamilyRenderer::can_follow(int32_t, const Message&) const { return true; }

std::optional<Rendered> FamilyRenderer::bridge_to_next_turn(
    std::span<const int32_t> prompt, std::span<const int32_t> completion,
    const std::vector<Message>& new_messages, const RenderOptions& options) const {
  LEEWAY_CHECK(tokenizer_, "a renderer without a tokenizer can only render text");
  const bool has_assistant =
      std::any_of(new_messages.begin(), new_messages.end(),
                  [](const Message& m) { return m.role == Role::assistant; });
  if (new_messages.empty() || has_assistant) return std::nullopt;

  // The sampled turn is represented by its own tokens in front of the new messages; it is not
  // rendered again.
  const ParsedResponse turn = parse_response(completion, options);
  std::vector<Message> messages(1);
  messages[0].role = Role::assistant;
  messages[0].content = turn.content;
  for (const ParsedToolCall& call : turn.tool_calls) messages[0].tool_calls.push_back(call.call);
  messages.insert(messages.end(), new_messages.begin(), new_messages.end());

  TemplateInput c = open(messages, options);
  c.written = 1;
  Rendered out;
  try {
    prepare(c);
    const Completion read(completion, *tokenizer_, spec_.controls, stops_);
    // A stop token anywhere but at the end is followed by tokens that no template writes.
    const auto is_stop = [&](int32_t id) {
      return std::find(stops_.begin(), stops_.end(), id) != stops_.end();
    };
    const auto stop = std::find_if(completion.begin(), completion.end(), is_stop);
    if (turn.closed && stop + 1 != completion.end()) return std::nullopt;
    const auto close = turn.closed ? std::optional<std::string>("") : closing(read, turn, c);
    if (!close) return std::nullopt;
    if (!can_follow(turn.closed ? completion.back() : -1, new_messages.front())) {
      return std::nullopt;
    }
    c.close_is_written = turn.closed;

    out.ids.assign(prompt.begin(), prompt.end());
    out.ids.insert(out.ids.end(), completion.begin(), completion.end());
    out.message_index.assign(out.ids.size(), -1);
    out.sampled.assign(prompt.size(), 0);
    out.sampled.resize(out.ids.size(), 1);
    out.loss_mask = out.sampled;
    out.text = tokenizer_->decode(out.ids);

    Script script(spec_.controls);
    script.literal(*close);
    write_turn_end(script);
    for (size_t i = 1; i < messages.size(); ++i) {
      script.at(static_cast<int>(i) - 1);
      write_message(script, c, i);
      script.sampled(false);
    }
    script.at(-1);
    write_generation_prompt(script, c);
    script.encode(*tokenizer_, out);
  } catch (const Error&) {
    // The template refuses these messages, or an id is not in the vocabulary: the bridge declines.
    return std::nullopt;
  }
  return out;
}

std::optional<std::string> FamilyRenderer::closing(const Completion& read,
                                                   const ParsedResponse& turn,
                                                   const TemplateInput& c) const {
  for (const auto& [open_token, close_token] : spec_.blocks) {
    bool inside = std::string_view(open_token) == "<think>" && prompt_opens_thinking(c);
    for (size_t at = 0; at != Completion::kNone;) {
      at = read.find(inside ? close_token : open_token, at);
      if (at != Completion::kNone) inside = !inside;
    }
    if (inside) return std::nullopt;
  }
  const auto unclosed = [](const ParsedToolCall& call) {
    return call.status == ToolCallStatus::unclosed_block;
  };
  if (std::any_of(turn.tool_calls.begin(), turn.tool_calls.end(), unclosed)) return std::nullopt;
  if (ends_inside_character(read.text())) return std::nullopt;
  return spec_.close;
}

bool FamilyRenderer::keeps_thinking(const TemplateInput& c, size_t i) const {
  if (retention_.preserve_all_thinking) return true;
  if (!retention_.preserve_thinking_between_tool_calls) return false;
  size_t after_last_user = c.size();
  while (after_last_user > 0 && c[after_last_user - 1].role != Role::user) --after_last_user;
  if (i < after_last_user) return false;
  for (size_t j = after_last_user; j < c.size(); ++j) {
    if (c[j].role == Role::tool) return true;
  }
  return false;
}

void FamilyRenderer::refuse(size_t message, const std::string& why) const {
  throw Error(fmt::format("messages[{}]: {} (renderer {})", message, why, spec_.name));
}

void FamilyRenderer::refuse_null(const TemplateInput& c, size_t i) const {
  if (c[i].content_is_null) refuse(i, "the template does not accept null content; use a string");
}

const std::string& FamilyRenderer::arguments_json(size_t i, const ToolCall& call) const {
  if (call.arguments.empty()) refuse(i, fmt::format("call of {} without arguments", call.name));
  return call.arguments;
}

JsonValue FamilyRenderer::arguments_of(const TemplateInput&, size_t i, const ToolCall& call) const {
  return read_json(fmt::format("messages[{}]: arguments of {}", i, call.name), call.arguments);
}

std::string FamilyRenderer::arguments_text(const TemplateInput& c, size_t i,
                                           const ToolCall& call) const {
  const std::string& json = arguments_json(i, call);
  if (!json.starts_with('"')) return json;
  return arguments_of(c, i, call).text;
}

}  // namespace leeway
