// Kimi-K2 and Kimi-K2-Thinking: a default system message and tool calls with ids; the latter keeps
// thinking after the last plain answer, and declares tools in JSON without spaces.
#include <fmt/format.h>

#include <algorithm>
#include <deque>

#include "text/renderers/family.h"
#include "text/renderers/python_strings.h"

namespace leeway {
namespace {

constexpr const char* kSectionBegin = "<|tool_calls_section_begin|>";
constexpr const char* kSectionEnd = "<|tool_calls_section_end|>";
constexpr const char* kCallBegin = "<|tool_call_begin|>";
constexpr const char* kCallEnd = "<|tool_call_end|>";
constexpr const char* kArguments = "<|tool_call_argument_begin|>";

class KimiK2 : public FamilyRenderer {
 public:
  KimiK2(bool thinks, const Tokenizer* tokenizer, const ThinkingRetention& retention)
      : FamilyRenderer(spec(thinks), tokenizer, retention), thinks_(thinks) {}

 protected:
  static FamilySpec spec(bool thinks) {
    FamilySpec made{.name = thinks ? "kimi-k2-thinking" : "kimi-k2",
                    .has_thinking = thinks,
                    .controls = {{"<|im_user|>", true},
                                 {"<|im_assistant|>", true},
                                 {"<|im_system|>", true},
                                 {"<|im_middle|>", true},
                                 {"<|im_end|>", true},
                                 {kSectionBegin},
                                 {kSectionEnd},
                                 {kCallBegin},
                                 {kCallEnd},
                                 {kArguments}},
                    .stops = {"<|im_end|>"},
                    .close = "<|im_end|>",
                    .blocks = {{kSectionBegin, kSectionEnd}, {kCallBegin, kCallEnd}}};
    if (!thinks) return made;
    made.controls.insert(made.controls.end(), {{"<think>"}, {"</think>"}});
    made.blocks.insert(made.blocks.begin(), {"<think>", "</think>"});
    return made;
  }

  void prepare(TemplateInput& c) const override {
    for (size_t i = 0; i < c.size(); ++i) {
      if (c[i].role == Role::assistant && c[i].tool_calls.empty()) {
        c.last_query = static_cast<int>(i);
      }
    }
    // The templates write the ids of the messages. Where one has none, a call gets the next number,
    // and a result answers the calls in the order they were made.
    std::deque<std::string> waiting;
    int made = 0;
    c.call_ids.resize(c.size());
    for (size_t i = 0; i < c.size(); ++i) {
      for (const ToolCall& call : c[i].tool_calls) {
        const std::string id =
            call.id.empty() ? fmt::format("functions.{}:{}", call.name, made++) : call.id;
        c.call_ids[i].push_back(id);
        waiting.push_back(id);
      }
      if (c[i].role != Role::tool) continue;
      if (!c[i].tool_call_id.empty()) {
        std::erase(waiting, c[i].tool_call_id);
        c.call_ids[i].push_back(c[i].tool_call_id);
      } else if (waiting.empty()) {
        // Calls of earlier turns are not known here, and their count is part of the id.
        if (c.written > 0) refuse(i, "there is no call for this result to answer");
        const std::string name = c[i].tool_name.empty() ? "unknown" : c[i].tool_name;
        c.call_ids[i].push_back(fmt::format("functions.{}:{}", name, made));
      } else {
        c.call_ids[i].push_back(waiting.front());
        waiting.pop_front();
      }
    }
  }

  void write_opening(Script& script, const TemplateInput& c) const override {
    if (!c.tools.empty()) {
      script.literal("<|im_system|>tool_declare<|im_middle|>");
      const JsonValue tools{.kind = JsonValue::Kind::array, .items = c.tools};
      script.words(thinks_ ? to_compact_json(tools) : to_json(tools));
      script.literal("<|im_end|>");
    }
    if (c.role_is(0, Role::system) || (c.size() == 0 && !thinks_)) return;
    script.literal(
        "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot "
        "AI.<|im_end|>");
    if (!thinks_) script.literal("\n");
  }

  void write_message(Script& script, const TemplateInput& c, size_t i) const override {
    const Message& message = c[i];
    script.literal(message.role == Role::user        ? "<|im_user|>"
                   : message.role == Role::assistant ? "<|im_assistant|>"
                                                     : "<|im_system|>");
    script.words(message.tool_name.empty() ? name_of(message.role) : message.tool_name);
    script.literal("<|im_middle|>");
    if (message.role == Role::assistant) {
      write_assistant(script, c, i);
    } else if (message.role == Role::tool) {
      script.literal("## Return of ");
      script.words(c.call_ids[i].front());
      script.literal("\n");
      script.words(message.content);
    } else {
      script.words(message.content);
    }
    script.literal("<|im_end|>");
  }

  void write_assistant(Script& script, const TemplateInput& c, size_t i) const {
    const Message& message = c[i];
    const std::string reasoning = message.reasoning.value_or("");
    const bool kept =
        static_cast<int>(i) > c.last_query || (!reasoning.empty() && keeps_thinking(c, i));
    if (thinks_) {
      // An empty block that replaces dropped thinking was not sampled by the model.
      script.sampled(kept || reasoning.empty());
      script.literal("<think>");
      if (kept) script.words(reasoning);
      script.literal("</think>");
    }
    script.sampled(true);
    script.words(message.content);
    if (message.tool_calls.empty()) return;
    script.literal(kSectionBegin);
    for (size_t k = 0; k < message.tool_calls.size(); ++k) {
      script.literal(kCallBegin);
      script.words(c.call_ids[i][k]);
      script.literal(kArguments);
      script.words(arguments_text(c, i, message.tool_calls[k]));
      script.literal(kCallEnd);
    }
    script.literal(kSectionEnd);
  }

  void write_generation_prompt(Script& script, const TemplateInput&) const override {
    script.literal("<|im_assistant|>assistant<|im_middle|>");
  }

  void parse(const Completion& completion, const TemplateInput&,
             ParsedResponse& out) const override {
    const Thinking thinking = thinks_ ? find_thinking(completion, false) : Thinking();
    if (!thinking.reasoning.value_or("").empty()) out.reasoning = *thinking.reasoning;
    const size_t calls = std::min(completion.find(kSectionBegin, thinking.end), completion.size());
    out.content = std::string(thinking.before);
    out.content += completion.text(thinking.end, calls);
    for (const Block& block : find_blocks(completion, kCallBegin, kCallEnd, calls)) {
      out.tool_calls.push_back(call_of(completion, block));
      ParsedToolCall& parsed = out.tool_calls.back();
      const size_t separator = completion.find(kArguments, block.inner_begin, block.inner_end);
      const size_t id_end = std::min(separator, block.inner_end);
      parsed.call.id = strip(completion.text(block.inner_begin, id_end));
      parsed.call.name = name_in(parsed.call.id);
      if (separator != Completion::kNone) {
        const size_t start = separator + std::string_view(kArguments).size();
        set_json_arguments(parsed, completion.text(start, block.inner_end));
      } else if (block.closed) {
        parsed.status = ToolCallStatus::malformed;
      }
    }
  }

  // functions.NAME:3
  static std::string_view name_in(std::string_view id) {
    constexpr std::string_view kPrefix = "functions.";
    if (id.starts_with(kPrefix)) id.remove_prefix(kPrefix.size());
    const size_t colon = id.rfind(':');
    const bool numbered = colon != std::string_view::npos &&
                          id.find_first_not_of("0123456789", colon + 1) == std::string_view::npos;
    return numbered ? id.substr(0, colon) : id;
  }

 private:
  bool thinks_;
};

}  // namespace

std::unique_ptr<Renderer> make_kimi_k2(const Tokenizer* tokenizer,
                                       const ThinkingRetention& retention) {
  return std::make_unique<KimiK2>(false, tokenizer, retention);
}

std::unique_ptr<Renderer> make_kimi_k2_thinking(const Tokenizer* tokenizer,
                                                const ThinkingRetention& retention) {
  return std::make_unique<KimiK2>(true, tokenizer, retention);
}

}  // namespace leeway
