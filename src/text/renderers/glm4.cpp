// GLM-4.5 and GLM-4.6: no close token (the next role's marker ends a turn), XML-style tool calls,
// an empty thinking block where past thinking is dropped. Their templates differ in one thing: that
// of GLM-4.5 refuses a call without arguments.
#include <algorithm>

#include "text/renderers/family.h"
#include "text/renderers/python_strings.h"

namespace leeway {
namespace {

class Glm4 : public FamilyRenderer {
 public:
  Glm4(const char* name, bool needs_arguments, const Tokenizer* tokenizer,
       const ThinkingRetention& retention)
      : FamilyRenderer({.name = name,
                        .has_thinking = true,
                        .controls = {{"[gMASK]", true},
                                     {"<sop>", true},
                                     {"<|system|>", true},
                                     {"<|user|>", true},
                                     {"<|assistant|>", true},
                                     {"<|observation|>", true},
                                     {"<|endoftext|>"},
                                     {"<think>"},
                                     {"</think>"},
                                     {"<tool_call>"},
                                     {"</tool_call>"},
                                     {"<tool_response>"},
                                     {"</tool_response>"},
                                     {"<arg_key>"},
                                     {"</arg_key>"},
                                     {"<arg_value>"},
                                     {"</arg_value>"},
                                     {"/nothink"}},
                        .stops = {"<|endoftext|>", "<|user|>", "<|observation|>"},
                        .close = "",
                        .blocks = {{"<think>", "</think>"}, {"<tool_call>", "</tool_call>"}}},
                       tokenizer, retention),
        needs_arguments_(needs_arguments) {}

 protected:
  void prepare(TemplateInput& c) const override {
    for (size_t i = 0; i < c.size(); ++i) {
      if (c[i].role == Role::user) c.last_query = static_cast<int>(i);
    }
  }

  void write_opening(Script& script, const TemplateInput& c) const override {
    script.literal("[gMASK]<sop>");
    if (c.tools.empty()) return;
    script.literal(
        "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user "
        "query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n"
        "<tools>\n");
    for (const JsonValue& tool : c.tools) {
      script.words(to_json(tool));
      script.literal("\n");
    }
    script.literal(
        "</tools>\n\nFor each function call, output the function name and arguments within the "
        "following XML format:\n<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n"
        "<arg_value>{arg-value-1}</arg_value>\n<arg_key>{arg-key-2}</arg_key>\n"
        "<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>");
  }

  // The role marker that the model itself writes to end its turn.
  void write_stop(Script& script, const TemplateInput& c, size_t i, const char* marker) const {
    const bool joins = c.written > 0 && i == c.written;
    if (joins && c.close_is_written) return;
    const bool is_stop = c.follows(i, Role::assistant) && !joins;
    if (is_stop) script.at(static_cast<int>(i) - 1);
    script.sampled(is_stop);
    script.literal(marker);
    script.sampled(false);
    script.at(static_cast<int>(c.written > 0 ? i - c.written : i));
  }

  void write_message(Script& script, const TemplateInput& c, size_t i) const override {
    const Message& message = c[i];
    switch (message.role) {
      case Role::user:
        write_stop(script, c, i, "<|user|>");
        script.literal("\n");
        script.words(printed_content(message));
        if (c.thinking_disabled() && !message.content.ends_with("/nothink")) {
          script.literal("/nothink");
        }
        return;
      case Role::assistant: return write_assistant(script, c, i);
      case Role::tool:
        if (message.content_is_null) refuse(i, "a tool message needs content");
        if (!c.follows(i, Role::tool)) write_stop(script, c, i, "<|observation|>");
        script.literal("\n<tool_response>\n");
        script.words(message.content);
        script.literal("\n</tool_response>");
        return;
      case Role::system:
        script.literal("<|system|>\n");
        script.words(printed_content(message));
        return;
    }
  }

  void write_assistant(Script& script, const TemplateInput& c, size_t i) const {
    const auto [reasoning, content] = split_thinking(c[i], printed_content(c[i]));
    const bool kept =
        !reasoning.empty() && (static_cast<int>(i) > c.last_query || keeps_thinking(c, i));
    script.literal("<|assistant|>");
    // An empty block counts as sampled only where the model could have thought and did not.
    script.sampled(kept || (reasoning.empty() && !c.thinking_disabled()));
    script.literal("\n<think>");
    if (kept) script.words(strip(reasoning));
    script.literal("</think>");
    script.sampled(true);
    if (!strip(content).empty()) {
      script.literal("\n");
      script.words(strip(content));
    }
    for (const ToolCall& call : c[i].tool_calls) write_call(script, c, i, call);
  }

  void write_call(Script& script, const TemplateInput& c, size_t i, const ToolCall& call) const {
    script.literal("\n<tool_call>");
    script.words(call.name);
    script.literal("\n");
    JsonValue arguments;
    if (!call.arguments.empty()) arguments = arguments_of(c, i, call);
    if ((needs_arguments_ || arguments.truthy()) && !arguments.is(JsonValue::Kind::object)) {
      refuse(i, "the template takes arguments as an object, not as " +
                    std::string(name_of(arguments.kind)));
    }
    for (const auto& [name, value] : arguments.members) {
      script.literal("<arg_key>");
      script.words(name);
      script.literal("</arg_key>\n<arg_value>");
      script.words(value.is(JsonValue::Kind::string) ? value.text : to_json(value));
      script.literal("</arg_value>\n");
    }
    script.literal("</tool_call>");
  }

  void write_generation_prompt(Script& script, const TemplateInput& c) const override {
    script.literal("<|assistant|>");
    if (c.thinking_disabled()) script.literal("\n<think></think>");
  }

  bool can_follow(int32_t close_id, const Message& next) const override {
    if (close_id < 0) return true;
    if (close_id == control_id("<|user|>")) return next.role == Role::user;
    return close_id == control_id("<|observation|>") && next.role == Role::tool;
  }

  void parse(const Completion& completion, const TemplateInput& c,
             ParsedResponse& out) const override {
    const Thinking thinking = find_thinking(completion, false);
    const std::string_view reasoning = strip(thinking.reasoning.value_or(""));
    if (!reasoning.empty()) out.reasoning = reasoning;
    const auto blocks = find_blocks(completion, "<tool_call>", "</tool_call>", thinking.end);
    out.content =
        strip(std::string(thinking.before) + text_outside(completion, blocks, thinking.end));
    for (const Block& block : blocks) {
      out.tool_calls.push_back(call_of(completion, block));
      read_call(out.tool_calls.back(), completion, block, c.tools);
    }
  }

  // NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ..
  static void read_call(ParsedToolCall& parsed, const Completion& completion, const Block& block,
                        const std::vector<JsonValue>& tools) {
    const auto broken = [&](ToolCallStatus status) {
      if (parsed.status == ToolCallStatus::ok) parsed.status = status;
    };
    size_t at =
        std::min(completion.find("<arg_key>", block.inner_begin, block.inner_end), block.inner_end);
    parsed.call.name = strip(completion.text(block.inner_begin, at));
    JsonValue arguments{.kind = JsonValue::Kind::object};
    bool complete = true;
    const auto take = [&](std::string_view open, std::string_view close) {
      const size_t begin = completion.find(open, at, block.inner_end);
      const size_t end = completion.find(close, std::min(begin, block.inner_end), block.inner_end);
      complete = complete && begin != Completion::kNone && end != Completion::kNone;
      if (!complete) return std::string_view();
      at = end + close.size();
      return completion.text(begin + open.size(), end);
    };
    while (complete && completion.find("<arg_key>", at, block.inner_end) != Completion::kNone) {
      const std::string_view key = strip(take("<arg_key>", "</arg_key>"));
      const std::string_view value = take("<arg_value>", "</arg_value>");
      if (complete) arguments.set(key, read_typed(value, parsed.call.name, key, tools));
    }
    parsed.call.arguments = to_json(arguments);
    if (!complete) return broken(ToolCallStatus::malformed);
    if (parsed.call.name.empty()) broken(ToolCallStatus::missing_name);
  }

 private:
  bool needs_arguments_;
};

}  // namespace

std::unique_ptr<Renderer> make_glm4_5(const Tokenizer* tokenizer,
                                      const ThinkingRetention& retention) {
  return std::make_unique<Glm4>("glm4.5", true, tokenizer, retention);
}

std::unique_ptr<Renderer> make_glm4_6(const Tokenizer* tokenizer,
                                      const ThinkingRetention& retention) {
  return std::make_unique<Glm4>("glm4.6", false, tokenizer, retention);
}

}  // namespace leeway
