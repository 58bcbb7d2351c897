// Llama 3.1: a dated system block, tools inside the first user message, one JSON call per turn, no
// thinking.
#include <fmt/format.h>

#include <algorithm>

#include "text/renderers/family.h"
#include "text/renderers/python_strings.h"

namespace leeway {
namespace {

constexpr std::string_view kCallFormat =
    "Respond in the format {\"name\": function name, \"parameters\": dictionary of argument name "
    "and its value}.Do not use variables.\n\n";

class Llama3 : public FamilyRenderer {
 public:
  Llama3(const Tokenizer* tokenizer, const ThinkingRetention& retention)
      : FamilyRenderer({.name = "llama3",
                        .has_thinking = false,
                        .controls = {{"<|begin_of_text|>", true},
                                     {"<|start_header_id|>", true},
                                     {"<|end_header_id|>", true},
                                     {"<|eot_id|>", true},
                                     {"<|eom_id|>"},
                                     {"<|end_of_text|>"},
                                     {"<|python_tag|>"}},
                        .stops = {"<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"},
                        .close = "<|eot_id|>",
                        .blocks = {}},
                       tokenizer, retention) {}

 protected:
  // Settings from the options, under the template's names.
  struct Settings {
    bool has_tools = false;
    const std::vector<JsonValue>* tools = nullptr;
    bool tools_in_user_message = true;
    std::string date_string = "26 Jul 2024";
    const JsonValue* builtin_tools = nullptr;

    bool is_builtin(const std::string& name) const {
      return builtin_tools && std::any_of(builtin_tools->items.begin(), builtin_tools->items.end(),
                                          [&](const JsonValue& t) { return t.text == name; });
    }
  };

  static Settings settings_of(const TemplateInput& c) {
    Settings settings{.has_tools = !c.options.tools_json.empty(), .tools = &c.tools};
    if (const JsonValue* custom = c.extra.find("custom_tools")) {
      settings.has_tools = !custom->is(JsonValue::Kind::null);
      settings.tools = &custom->items;
    }
    if (const JsonValue* in_user = c.extra.find("tools_in_user_message")) {
      settings.tools_in_user_message = in_user->truthy();
    }
    if (const JsonValue* date = c.extra.find("date_string")) {
      settings.date_string = to_python_text(*date);
    }
    settings.builtin_tools = c.extra.find("builtin_tools");
    return settings;
  }

  // The number of messages consumed by the opening: a system message, and the one that carries the
  // tools.
  static size_t first_plain_message(const TemplateInput& c, const Settings& settings) {
    if (c.written > 0) return c.written;
    return (c.role_is(0, Role::system) ? 1 : 0) +
           (settings.has_tools && settings.tools_in_user_message ? 1 : 0);
  }

  static void write_header(Script& script, const char* role) {
    script.literal("<|start_header_id|>");
    script.literal(role);
    script.literal("<|end_header_id|>\n\n");
  }

  static void write_tools(Script& script, const Settings& settings) {
    script.literal(kCallFormat);
    for (const JsonValue& tool : *settings.tools) {
      script.words(to_json(tool, 4));
      script.literal("\n\n");
    }
  }

  void write_opening(Script& script, const TemplateInput& c) const override {
    if (c.size() == 0) refuse(0, "there are no messages");
    const Settings settings = settings_of(c);
    const bool has_system = c.role_is(0, Role::system);
    script.literal("<|begin_of_text|>");
    write_header(script, "system");
    if (settings.has_tools || settings.builtin_tools) script.literal("Environment: ipython\n");
    if (settings.builtin_tools) {
      std::vector<std::string> names;
      for (const JsonValue& tool : settings.builtin_tools->items) {
        if (tool.text != "code_interpreter") names.push_back(tool.text);
      }
      script.words(fmt::format("Tools: {}\n\n", fmt::join(names, ", ")));
    }
    script.literal("Cutting Knowledge Date: December 2023\nToday Date: ");
    script.words(settings.date_string);
    script.literal("\n\n");
    if (settings.has_tools && !settings.tools_in_user_message) {
      script.literal(
          "You have access to the following functions. To call a function, please respond with "
          "JSON for a function call.");
      write_tools(script, settings);
    }
    script.at(has_system ? 0 : -1);
    if (has_system) script.words(strip(printed_content(c[0])));
    script.literal("<|eot_id|>");
    if (!settings.has_tools || !settings.tools_in_user_message) return;

    // The first message carries the tools, whatever its role, and is written as the user's.
    const size_t carrier = has_system ? 1 : 0;
    if (carrier >= c.size()) refuse(carrier, "there is no user message to put the tools into");
    script.at(static_cast<int>(carrier));
    write_header(script, "user");
    script.literal(
        "Given the following functions, please respond with a JSON for a function call with its "
        "proper arguments that best answers the given prompt.\n\n");
    write_tools(script, settings);
    script.words(strip(printed_content(c[carrier])));
    script.literal("<|eot_id|>");
  }

  void write_message(Script& script, const TemplateInput& c, size_t i) const override {
    const Settings settings = settings_of(c);
    if (i < first_plain_message(c, settings)) return;
    const Message& message = c[i];
    if (message.role == Role::tool) {
      // In Jinja a string is iterable, so the template writes it as JSON.
      write_header(script, "ipython");
      script.words(message.content_is_null ? "None" : to_json(message.content));
      return script.literal("<|eot_id|>");
    }
    write_header(script, name_of(message.role));
    script.sampled(message.role == Role::assistant);
    if (message.tool_calls.empty()) {
      script.words(strip(printed_content(message)));
      script.literal("<|eot_id|>");
    } else {
      if (message.tool_calls.size() > 1)
        refuse(i, "the template supports one tool call per message");
      write_call(script, c, i, settings);
      script.literal(settings.builtin_tools ? "<|eom_id|>" : "<|eot_id|>");
    }
  }

  // The content of a message that calls a tool is not written.
  void write_call(Script& script, const TemplateInput& c, size_t i,
                  const Settings& settings) const {
    const ToolCall& call = c[i].tool_calls.front();
    if (!settings.is_builtin(call.name)) {
      script.words(fmt::format("{{\"name\": \"{}\", \"parameters\": {}}}", call.name,
                               arguments_json(i, call)));
      return;
    }
    JsonValue arguments{.kind = JsonValue::Kind::object};
    if (!call.arguments.empty()) arguments = arguments_of(c, i, call);
    if (!arguments.is(JsonValue::Kind::object)) {
      refuse(i, fmt::format("arguments of built-in tool {} must be an object", call.name));
    }
    script.literal("<|python_tag|>");
    std::vector<std::string> words;
    for (const auto& [name, value] : arguments.members) {
      if (!value.is(JsonValue::Kind::string)) {
        refuse(i, fmt::format("argument {} of built-in tool {} must be a string", name, call.name));
      }
      words.push_back(fmt::format("{}=\"{}\"", name, value.text));
    }
    script.words(fmt::format("{}.call({})", call.name, fmt::join(words, ", ")));
  }

  void write_generation_prompt(Script& script, const TemplateInput&) const override {
    write_header(script, "assistant");
  }

  void parse(const Completion& completion, const TemplateInput&,
             ParsedResponse& out) const override {
    const std::string_view text = strip(completion.text());
    const size_t begin = static_cast<size_t>(text.data() - completion.text().data());
    const Block block{begin, begin, begin + text.size(), begin + text.size(), true};
    ParsedToolCall parsed = call_of(completion, block);
    if (text.starts_with('{') && read_call(parsed, text, completion.closed())) {
      out.tool_calls.push_back(std::move(parsed));
    } else {
      out.content = text;
    }
  }

  // Whether the text is meant as a call: JSON of the expected shape, or the beginning of it.
  static bool read_call(ParsedToolCall& parsed, std::string_view text, bool closed) {
    for (const char* key : {"parameters", "arguments"}) {
      ParsedToolCall attempt = parsed;
      read_json_call(attempt, text, key);
      if (attempt.status == ToolCallStatus::invalid_json) {
        if (!text.starts_with("{\"name\": \"")) return false;
        attempt.status = closed ? ToolCallStatus::invalid_json : ToolCallStatus::unclosed_block;
        parsed = attempt;
        return true;
      }
      if (raw_member(text, key).empty()) continue;
      parsed = attempt;
      return true;
    }
    return false;
  }
};

}  // namespace

std::unique_ptr<Renderer> make_llama3(const Tokenizer* tokenizer,
                                      const ThinkingRetention& retention) {
  return std::make_unique<Llama3>(tokenizer, retention);
}

}  // namespace leeway
