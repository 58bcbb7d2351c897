// DeepSeek-V3.1: system messages are moved to the front, tools are not listed, past thinking is
// always dropped.
#include <algorithm>

#include "text/renderers/family.h"
#include "text/renderers/python_strings.h"

namespace leeway {
namespace {

// The family's tokens contain U+FF5C and U+2581.
#define BAR "\xef\xbd\x9c"
#define GAP "\xe2\x96\x81"
constexpr const char* kBegin = "<" BAR "begin" GAP "of" GAP "sentence" BAR ">";
constexpr const char* kEnd = "<" BAR "end" GAP "of" GAP "sentence" BAR ">";
constexpr const char* kUser = "<" BAR "User" BAR ">";
constexpr const char* kAssistant = "<" BAR "Assistant" BAR ">";
constexpr const char* kCallsBegin = "<" BAR "tool" GAP "calls" GAP "begin" BAR ">";
constexpr const char* kCallsEnd = "<" BAR "tool" GAP "calls" GAP "end" BAR ">";
constexpr const char* kCallBegin = "<" BAR "tool" GAP "call" GAP "begin" BAR ">";
constexpr const char* kCallEnd = "<" BAR "tool" GAP "call" GAP "end" BAR ">";
constexpr const char* kSeparator = "<" BAR "tool" GAP "sep" BAR ">";
constexpr const char* kOutputBegin = "<" BAR "tool" GAP "output" GAP "begin" BAR ">";
constexpr const char* kOutputEnd = "<" BAR "tool" GAP "output" GAP "end" BAR ">";
#undef BAR
#undef GAP

class DeepSeekV31 : public FamilyRenderer {
 public:
  DeepSeekV31(const Tokenizer* tokenizer, const ThinkingRetention& retention)
      : FamilyRenderer(
            {.name = "deepseek-v3.1",
             .has_thinking = true,
             .controls = {{kBegin, true},
                          {kEnd, true},
                          {kUser, true},
                          {kAssistant, true},
                          {kCallsBegin},
                          {kCallsEnd},
                          {kCallBegin},
                          {kCallEnd},
                          {kSeparator},
                          {kOutputBegin},
                          {kOutputEnd},
                          {"<think>"},
                          {"</think>"}},
             .stops = {kEnd},
             .close = kEnd,
             .blocks = {{"<think>", "</think>"}, {kCallsBegin, kCallsEnd}, {kCallBegin, kCallEnd}}},
            tokenizer, retention) {}

 protected:
  static bool thinks(const TemplateInput& c) {
    const JsonValue* thinking = c.extra.find("thinking");
    return thinking ? thinking->truthy() : c.options.enable_thinking.value_or(false);
  }

  // The message before `i`, skipping system messages; -1 if there is none.
  static int previous(const TemplateInput& c, size_t i) {
    int before = static_cast<int>(i) - 1;
    while (before >= 0 && c[static_cast<size_t>(before)].role == Role::system) --before;
    return before;
  }
  static bool comes_after(const TemplateInput& c, size_t i, Role role) {
    const int before = previous(c, i);
    return before >= 0 && c[static_cast<size_t>(before)].role == role;
  }

  void write_opening(Script& script, const TemplateInput& c) const override {
    script.literal(kBegin);
    bool first = true;
    for (size_t i = 0; i < c.size(); ++i) {
      if (c[i].role != Role::system) continue;
      refuse_null(c, i);
      script.at(static_cast<int>(i));
      if (!first) script.literal("\n\n");
      script.words(c[i].content);
      first = false;
    }
  }

  void write_message(Script& script, const TemplateInput& c, size_t i) const override {
    const Message& message = c[i];
    switch (message.role) {
      case Role::system:
        if (c.written > 0) refuse(i, "a system message belongs to the front");
        return;
      case Role::user:
        refuse_null(c, i);
        script.literal(kUser);
        return script.words(message.content);
      case Role::tool:
        refuse_null(c, i);
        script.literal(kOutputBegin);
        script.words(message.content);
        return script.literal(kOutputEnd);
      case Role::assistant: return write_assistant(script, c, i);
    }
  }

  void write_assistant(Script& script, const TemplateInput& c, size_t i) const {
    const Message& message = c[i];
    const bool plain = message.tool_calls.empty();
    if (plain) refuse_null(c, i);
    // Thinking is cut out of the content only in plain messages that do not follow a tool's output.
    std::string_view content = message.content, inside;
    if (plain && !comes_after(c, i, Role::tool) && contains(content, "</think>")) {
      inside = after_last(before_first(content, "</think>"), "<think>");
      content = after_first(content, "</think>");
    }
    const std::string_view reasoning = message.reasoning ? *message.reasoning : inside;
    const bool has_header = comes_after(c, i, Role::user);
    const bool kept = !reasoning.empty() && keeps_thinking(c, i);

    // The generation prompt opens the thinking block; with thinking disabled it also closes it.
    if (has_header) script.literal(kAssistant);
    script.sampled(!has_header);
    if (has_header || kept) script.literal("<think>");
    script.sampled(kept || !has_header);
    if (kept) script.words(reasoning);
    if (has_header || kept) script.literal("</think>");
    script.sampled(true);
    script.words(content);
    if (!plain) {
      script.literal(kCallsBegin);
      for (const ToolCall& call : message.tool_calls) {
        script.literal(kCallBegin);
        script.words(call.name);
        script.literal(kSeparator);
        script.words(arguments_json(i, call));
        script.literal(kCallEnd);
      }
      script.literal(kCallsEnd);
    }
    script.literal(kEnd);
  }

  void write_generation_prompt(Script& script, const TemplateInput& c) const override {
    // After a tool's output the model continues without a header.
    if (!comes_after(c, c.size(), Role::user)) return;
    script.literal(kAssistant);
    script.literal("<think>");
    if (!thinks(c)) script.literal("</think>");
  }

  bool prompt_opens_thinking(const TemplateInput& c) const override { return thinks(c); }

  void parse(const Completion& completion, const TemplateInput& c,
             ParsedResponse& out) const override {
    // A finished turn without </think> came after a tool's output, where the prompt does not open a
    // thinking block.
    const Thinking thinking = find_thinking(completion, thinks(c) && !completion.closed());
    if (!thinking.reasoning.value_or("").empty()) out.reasoning = *thinking.reasoning;
    const size_t calls = std::min(completion.find(kCallsBegin, thinking.end), completion.size());
    out.content = std::string(thinking.before);
    out.content += completion.text(thinking.end, calls);
    for (const Block& block : find_blocks(completion, kCallBegin, kCallEnd, calls)) {
      out.tool_calls.push_back(call_of(completion, block));
      ParsedToolCall& parsed = out.tool_calls.back();
      const size_t separator = completion.find(kSeparator, block.inner_begin, block.inner_end);
      const size_t name_end = std::min(separator, block.inner_end);
      parsed.call.name = strip(completion.text(block.inner_begin, name_end));
      if (separator != Completion::kNone) {
        const size_t start = separator + std::string_view(kSeparator).size();
        set_json_arguments(parsed, completion.text(start, block.inner_end));
      } else if (block.closed) {
        parsed.status = ToolCallStatus::malformed;
      }
    }
  }
};

}  // namespace

std::unique_ptr<Renderer> make_deepseek_v3_1(const Tokenizer* tokenizer,
                                             const ThinkingRetention& retention) {
  return std::make_unique<DeepSeekV31>(tokenizer, retention);
}

}  // namespace leeway
