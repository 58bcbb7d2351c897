// gpt-oss: the harmony format. A turn is several messages: thinking in the channel analysis, a call
// in commentary, the answer in final. The system message is the template's own; the user's is a
// developer message, with the tools.
#include <fmt/format.h>

#include <algorithm>

#include "leeway/error.h"
#include "text/renderers/family.h"
#include "text/renderers/gpt_oss_tools.h"
#include "text/renderers/python_strings.h"

namespace leeway {
namespace {

// The template writes the day of rendering. A rendering here depends on its input alone, so the day
// is the option current_date or this one.
constexpr std::string_view kDate = "2025-08-05";
constexpr std::string_view kIdentity = "You are ChatGPT, a large language model trained by OpenAI.";
constexpr std::string_view kMessage = "<|message|>", kEnd = "<|end|>", kStart = "<|start|>",
                           kChannel = "<|channel|>";

// One message of a completion.
struct Part {
  std::string_view header;
  Block block;  // begins at the header, the inner part is the text
  bool is_last = false;

  // The word after `mark` in the header.
  std::string_view word(std::string_view mark) const {
    const size_t at = header.find(mark);
    if (at == std::string_view::npos) return {};
    const std::string_view rest = header.substr(at + mark.size());
    return rest.substr(0, rest.find_first_of(" <\n\t"));
  }
  std::string_view channel() const { return word(kChannel); }
  std::string_view recipient() const { return word("to="); }
};

std::vector<Part> parts_of(const Completion& completion) {
  std::vector<Part> parts;
  for (size_t at = 0; at < completion.size();) {
    const size_t mark = completion.find(kMessage, at);
    if (mark == Completion::kNone) {
      // A header that is not finished, or text without any.
      const std::string_view rest = completion.text(at, completion.size());
      const bool is_header = contains(rest, kStart) || contains(rest, kChannel);
      const size_t text = is_header ? completion.size() : at;
      parts.push_back({.header = completion.text(at, text),
                       .block = {at, text, completion.size(), completion.size(), false}});
      break;
    }
    const size_t begin = mark + kMessage.size();
    const size_t end = completion.find(kEnd, begin);
    const size_t stop = std::min({end, completion.find(kStart, begin), completion.size()});
    const bool ended = stop == end;
    parts.push_back({.header = completion.text(at, mark),
                     .block = {at, begin, stop, ended ? stop + kEnd.size() : stop, ended}});
    at = parts.back().block.end;
  }
  if (!parts.empty()) {
    parts.back().is_last = true;
    parts.back().block.closed |= completion.closed();
  }
  return parts;
}

class GptOss : public FamilyRenderer {
 public:
  GptOss(const Tokenizer* tokenizer, const ThinkingRetention& retention)
      : FamilyRenderer({.name = "gpt-oss",
                        .has_thinking = true,
                        .controls = {{"<|start|>", true},
                                     {"<|end|>", true},
                                     {"<|message|>", true},
                                     {"<|channel|>", true},
                                     {"<|constrain|>"},
                                     {"<|return|>", true},
                                     {"<|call|>", true}},
                        .stops = {"<|return|>", "<|call|>"},
                        .close = "<|end|>",
                        .blocks = {}},
                       tokenizer, retention) {}

 protected:
  void prepare(TemplateInput& c) const override {
    std::string called;
    c.call_ids.resize(c.size());
    for (size_t i = 0; i < c.size(); ++i) {
      const Message& message = c[i];
      if (message.role == Role::assistant) {
        if (message.tool_calls.size() > 1) refuse(i, "the template writes one call per message");
        called = message.tool_calls.empty() ? "" : message.tool_calls.front().name;
      } else if (message.role == Role::tool) {
        if (called.empty()) refuse(i, "there is no call for this result to answer");
        c.call_ids[i] = {called};
      }
    }
  }

  // A text option, or what the template takes without it.
  static std::string option(const TemplateInput& c, const char* key, std::string_view otherwise) {
    const JsonValue* value = c.extra.find(key);
    if (!value) return std::string(otherwise);
    if (!value->is(JsonValue::Kind::string)) {
      throw Error(fmt::format("the option {} must be a string, not {} (renderer gpt-oss)", key,
                              name_of(value->kind)));
    }
    return value->text;
  }

  static std::string date(const TemplateInput& c) {
    std::string date = option(c, "current_date", kDate);
    std::string shape = date;
    for (char& letter : shape) letter = letter >= '0' && letter <= '9' ? '0' : letter;
    if (shape == "0000-00-00") return date;
    throw Error(fmt::format(
        "the option current_date must be a day such as {}, not \"{}\" (renderer gpt-oss)", kDate,
        date));
  }

  void write_opening(Script& script, const TemplateInput& c) const override {
    if (c.size() == 0) refuse(0, "there are no messages");
    const JsonValue* builtin = c.extra.find("builtin_tools");
    if (builtin && builtin->truthy()) {
      throw Error("the option builtin_tools is not supported: leave it out (renderer gpt-oss)");
    }
    script.literal("<|start|>system<|message|>");
    script.words(option(c, "model_identity", kIdentity));
    script.words(fmt::format("\nKnowledge cutoff: 2024-06\nCurrent date: {}\n\nReasoning: {}\n\n",
                             date(c), option(c, "reasoning_effort", "medium")));
    script.literal(
        "# Valid channels: analysis, commentary, final. Channel must be included for every "
        "message.");
    if (!c.tools.empty()) {
      script.literal("\nCalls to these tools must go to the commentary channel: 'functions'.");
    }
    script.literal("<|end|>");

    const bool instructed = c.role_is(0, Role::system) && !c[0].content.empty();
    if (!instructed && c.tools.empty()) return;
    script.literal("<|start|>developer<|message|>");
    if (instructed) {
      script.at(0);
      script.literal("# Instructions\n\n");
      script.words(c[0].content);
      script.literal("\n\n");
      script.at(-1);
    }
    if (!c.tools.empty()) {
      script.literal("# Tools\n\n");
      script.words(typescript_namespace(c.tools));
    }
    script.literal("<|end|>");
  }

  void write_message(Script& script, const TemplateInput& c, size_t i) const override {
    const Message& message = c[i];
    switch (message.role) {
      case Role::system:
        if (i > 0 || c.written > 0)
          refuse(i, "the template drops a system message after the first");
        return;
      case Role::user:
        refuse_null(c, i);
        script.literal("<|start|>user<|message|>");
        script.words(message.content);
        return script.literal("<|end|>");
      case Role::tool:
        script.literal("<|start|>functions.");
        script.words(c.call_ids[i].front());
        script.literal(" to=assistant<|channel|>commentary<|message|>");
        script.words(message.content_is_null ? "null" : to_json(message.content));
        return script.literal("<|end|>");
      case Role::assistant: return write_assistant(script, c, i);
    }
  }

  void write_assistant(Script& script, const TemplateInput& c, size_t i) const {
    const Message& message = c[i];
    const std::string reasoning = message.reasoning.value_or("");
    refuse_null(c, i);
    refuse_channels(i, message.content);
    refuse_channels(i, reasoning);
    // The generation prompt holds the first header of a turn; the model writes all others.
    script.literal("<|start|>assistant");
    script.sampled(true);
    if (!message.tool_calls.empty()) return write_call(script, c, i, reasoning);
    const bool ends = c.is_last(i) && !c.options.add_generation_prompt;
    if ((ends && message.reasoning) || (!reasoning.empty() && keeps_thinking(c, i))) {
      write_thinking(script, reasoning);
    }
    script.literal("<|channel|>final<|message|>");
    script.words(message.content);
    // The model ends its answer by <|return|>. In the history, the template replaces it.
    script.sampled(ends);
    script.literal(ends ? "<|return|>" : "<|end|>");
  }

  void write_call(Script& script, const TemplateInput& c, size_t i,
                  const std::string& reasoning) const {
    const Message& message = c[i];
    const ToolCall& call = message.tool_calls.front();
    if (!message.content.empty() && !reasoning.empty()) {
      refuse(i, "the template takes thinking or content beside a call, not both");
    }
    const bool answered = answered_after(c, i);
    if (!message.content.empty() && !answered) {
      write_thinking(script, message.content);
    } else if (!reasoning.empty() && (!answered || keeps_thinking(c, i))) {
      write_thinking(script, reasoning);
    }
    script.literal(" to=functions.");
    script.words(call.name);
    script.literal("<|channel|>commentary json<|message|>");
    script.words(arguments_json(i, call));
    script.literal("<|call|>");
  }

  static void write_thinking(Script& script, std::string_view thinking) {
    script.literal("<|channel|>analysis<|message|>");
    script.words(thinking);
    script.literal("<|end|><|start|>assistant");
  }

  // Whether an answer follows, from which on the template drops the thinking before a call.
  static bool answered_after(const TemplateInput& c, size_t i) {
    for (size_t later = i + 1; later < c.size(); ++later) {
      if (c[later].role == Role::assistant && c[later].tool_calls.empty()) return true;
    }
    return false;
  }

  void refuse_channels(size_t i, std::string_view text) const {
    if (contains(text, "<|channel|>analysis<|message|>") ||
        contains(text, "<|channel|>final<|message|>")) {
      refuse(i, "the text spells out channels; give thinking and content as separate fields");
    }
  }

  void write_generation_prompt(Script& script, const TemplateInput&) const override {
    script.literal("<|start|>assistant");
  }

  // An answer that was cut off can be closed; nothing else can.
  std::optional<std::string> closing(const Completion& read, const ParsedResponse& turn,
                                     const TemplateInput& c) const override {
    const std::vector<Part> parts = parts_of(read);
    if (parts.empty() || parts.back().block.closed || parts.back().channel() != "final" ||
        !parts.back().recipient().empty() || !turn.tool_calls.empty()) {
      return std::nullopt;
    }
    return FamilyRenderer::closing(read, turn, c);
  }

  // The template has <|return|> at the end of a conversation only.
  bool can_follow(int32_t close_id, const Message&) const override {
    return close_id != control_id("<|return|>");
  }

  void parse(const Completion& completion, const TemplateInput&,
             ParsedResponse& out) const override {
    const auto append = [](std::string& text, std::string_view more) {
      if (!text.empty() && !more.empty()) text += '\n';
      text += more;
    };
    std::string reasoning;
    for (const Part& part : parts_of(completion)) {
      const std::string_view text = completion.text(part.block.inner_begin, part.block.inner_end);
      if (!part.recipient().empty()) {
        out.tool_calls.push_back(call_of(completion, part.block));
        constexpr std::string_view kFunctions = "functions.";
        std::string_view name = part.recipient();
        if (name.starts_with(kFunctions)) name.remove_prefix(kFunctions.size());
        out.tool_calls.back().call.name = name;
        set_json_arguments(out.tool_calls.back(), text);
      } else if (part.channel() == "analysis") {
        append(reasoning, text);
      } else {
        append(out.content, text);
      }
    }
    if (!reasoning.empty()) out.reasoning = std::move(reasoning);
  }
};

}  // namespace

std::unique_ptr<Renderer> make_gpt_oss(const Tokenizer* tokenizer,
                                       const ThinkingRetention& retention) {
  return std::make_unique<GptOss>(tokenizer, retention);
}

}  // namespace leeway
