#include "text/chat_template.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "base/crc32c.h"
#include "base/files.h"
#include "leeway/error.h"
#include "text/renderer.h"
#include "text/renderers/json_value.h"

namespace leeway {
namespace {

using Kind = JsonValue::Kind;
using Parts = std::vector<std::string_view>;

constexpr uint64_t kLongestTemplate = 1 << 20;
constexpr uint64_t kLongestJson = 64 << 20;

// A published text of a family's template: its length and CRC after `normalized`. Each was compared
// with the renderer over the conversations of scripts/render_chat_goldens, byte for byte. A
// template is a program, of which every character can change what is written, so nothing less than
// the whole text says which renderer it is.
struct Published {
  const char* renderer;
  size_t size;
  uint32_t crc;
};

constexpr Published kPublished[] = {
    {"gpt-oss", 16663, 0xf6349ee1},
    {"gpt-oss", 16982, 0xc6426ebe},
    {"kimi-k2-thinking", 3448, 0x527b4756},
    {"glm4.6", 3362, 0x1a54b3d4},
    {"glm4.5", 3231, 0x296c7e43},
    {"deepseek-v3.1", 3357, 0x23037ca3},
    {"llama3", 4583, 0xf3fea55a},
    {"llama3", 3800, 0xc36fab0d},
    {"qwen3-coder", 6142, 0xdaab750c},
    {"qwen3.5", 7685, 0x06869292},
    {"qwen3", 4123, 0x5f83f015},
    {"qwen3", 4071, 0xa5cad9c9},
    {"qwen2.5", 2474, 0xd88967e1},
    {"qwen2.5", 2930, 0xbe50d2d4},
    {"smollm2", 368, 0x7b2ce96c},
    {"chatml", 291, 0x11dd5d20},
    {"chatml", 196, 0x0d469078},
};

// What a family's template contains, beginning with the token that every version of it has, and
// what only others contain: for saying which renderer is nearest to an unknown template, and why it
// is not taken.
struct Fingerprint {
  const char* renderer;
  Parts has, lacks;
};

const std::vector<Fingerprint>& fingerprints() {
  static const std::vector<Fingerprint> kFingerprints = {
      {"gpt-oss",
       {"<|start|>assistant", "<|channel|>analysis<|message|>", "render_typescript_type",
        "<|call|>", "strftime_now", "future_final_message"},
       {"enable_thinking"}},
      {"kimi-k2-thinking",
       {"<|im_middle|>", "<|tool_calls_section_begin|>", "<think></think>",
        "last_non_tool_call_assistant_msg",
        "tojson(separators=", "You are Kimi, an AI assistant created by Moonshot AI."},
       {"enable_thinking", "preserve_thinking", "tool_call_counter"}},
      {"kimi-k2",
       {"<|im_middle|>", "<|tool_calls_section_begin|>",
        "You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>{% endif %}",
        "tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>"},
       {"<think>", "tool_call_counter"}},
      {"glm4.6",
       {"[gMASK]<sop>", "<|observation|>", "<arg_key>", "<think></think>", "/nothink",
        "tc.arguments or {}"},
       {"clear_thinking", "reasoning_effort"}},
      {"glm4.5",
       {"[gMASK]<sop>", "<|observation|>", "<arg_key>", "<think></think>", "/nothink"},
       {"clear_thinking", "reasoning_effort", "tc.arguments or {}"}},
      {"deepseek-v3.1",
       {"<\xEF\xBD\x9CUser\xEF\xBD\x9C>",
        "<\xEF\xBD\x9C"
        "Assistant\xEF\xBD\x9C>",
        "<\xEF\xBD\x9Ctool\xE2\x96\x81"
        "calls\xE2\x96\x81"
        "begin\xEF\xBD\x9C>",
        "<\xEF\xBD\x9Ctool\xE2\x96\x81output\xE2\x96\x81"
        "begin\xEF\xBD\x9C>",
        "<think></think>", "ns.is_last_user", "if not thinking"},
       {"```json",
        "<\xEF\xBD\x9C"
        "DSML\xEF\xBD\x9C"}},
      {"llama3",
       {"<|start_header_id|>", "<|eot_id|>", "Cutting Knowledge Date: December 2023",
        "Today Date:", "tools_in_user_message", "Environment: ipython"},
       {"<think>", "<|image|>"}},
      {"qwen3-coder",
       {"<|im_start|>", "render_extra_keys", "<function=example_function_name>",
        "You have access to the following functions:",
        "You are Qwen, a helpful AI assistant that can interact with a computer to solve tasks."},
       {"<think>"}},
      {"qwen3.5",
       {"<|im_start|>", "<function=example_function_name>", "<IMPORTANT>", "last_query_index",
        "enable_thinking is defined and enable_thinking is false",
        "{%- if loop.index0 > ns.last_query_index %}"},
       {"preserve_thinking"}},
      {"qwen3",
       {"<|im_start|>", "<args-json-object>", "reasoning_content", "enable_thinking",
        "loop.index0 > ns.last_query_index", "<think>\\n\\n</think>\\n\\n"},
       {"<function=", "<|vision_start|>", "preserve_thinking"}},
      {"qwen2.5",
       {"<|im_start|>", "<args-json-object>",
        "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "<tool_response>"},
       {"<think>", "<|vision_start|>"}},
      {"smollm2",
       {"You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>",
        "<|im_start|>", "<|im_end|>"},
       {"<think>", "tool", "trim", "strip"}},
      {"chatml",
       {"<|im_start|>", "<|im_end|>"},
       {"system", "<think>", "tool", "trim", "strip", "bos_token", "eos_token", "raise_exception"}},
  };
  return kFingerprints;
}

// Without white space and line breaks, escaped ones among them, and with one kind of quotes: layout
// is no part of a family.
std::string squeezed(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == ' ' || c == '\n' || c == '\r' || c == '\t') continue;
    const char next = i + 1 < text.size() ? text[i + 1] : '\0';
    if (c == '\\' && (next == 'n' || next == '"' || next == '\'')) {
      if (next == 'n') ++i;
      continue;
    }
    out += c == '\'' ? '"' : c;
  }
  return out;
}

// Line breaks as "\n", whether a literal has them as they are or escaped (files that hold templates
// differ in that), and without the one at the end, which Jinja drops.
std::string normalized(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const char next = i + 1 < text.size() ? text[i + 1] : '\0';
    if (text[i] == '\r' && next == '\n') continue;
    const bool escaped = text[i] == '\\' && next == 'n';
    out += escaped ? '\n' : text[i];
    if (escaped) ++i;
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

// The template's text without its comments, which may mention anything.
std::string without_comments(std::string_view text) {
  std::string out;
  while (true) {
    const size_t open = text.find("{#");
    out += text.substr(0, open);
    if (open == std::string_view::npos) return out;
    const size_t close = text.find("#}", open);
    if (close == std::string_view::npos) return out;
    text.remove_prefix(close + 2);
  }
}

struct Comparison {
  const Fingerprint* family;
  Parts missing, foreign;

  bool matches() const { return missing.empty() && foreign.empty(); }
  // Whether the template has the token without which the family is another.
  bool is_near() const { return missing.empty() || missing.front() != family->has.front(); }
  // Marks that are as they should be, less those that are not.
  int likeness() const {
    return static_cast<int>(family->has.size()) - 2 * static_cast<int>(missing.size()) -
           static_cast<int>(foreign.size());
  }
};

Comparison compared(const std::string& text, const Fingerprint& family) {
  Comparison result{.family = &family, .missing = {}, .foreign = {}};
  const auto holds = [&](std::string_view part) {
    return text.find(squeezed(part)) != std::string::npos;
  };
  for (const std::string_view part : family.has) {
    if (!holds(part)) result.missing.push_back(part);
  }
  for (const std::string_view part : family.lacks) {
    if (holds(part)) result.foreign.push_back(part);
  }
  return result;
}

[[noreturn]] void refuse_unknown(const std::string& where, const std::optional<Comparison>& found) {
  const std::string known = fmt::format("{}", fmt::join(renderer_names(), ", "));
  if (!found) {
    throw Error(fmt::format(
        "{}: no renderer writes what this chat template writes, and none is near. Name a renderer "
        "only if its tokens are right for the model: one of {}",
        where, known));
  }
  const Comparison& nearest = *found;
  std::vector<std::string> reasons;
  if (nearest.matches()) {
    reasons.push_back(
        "this is none of its published texts, and a changed template may write anything");
  }
  if (!nearest.missing.empty()) {
    reasons.push_back(fmt::format("it has no \"{}\"", fmt::join(nearest.missing, "\", \"")));
  }
  if (!nearest.foreign.empty()) {
    reasons.push_back(fmt::format("it has \"{}\"", fmt::join(nearest.foreign, "\", \"")));
  }
  throw Error(fmt::format(
      "{}: no renderer is known to write what this chat template writes; the nearest is {}, but "
      "{}. Name a renderer only if its tokens are right for the model: one of {}",
      where, nearest.family->renderer, fmt::join(reasons, " and "), known));
}

// The file's text, or nothing if there is none.
std::optional<std::string> read_bounded(const std::string& path, uint64_t most) {
  if (!is_present(path)) return std::nullopt;
  uint64_t size = 0;
  ::close(open_regular_file(path, &size));
  if (size > most) {
    throw Error(fmt::format("{}: has {} bytes; at most {} are read", path, size, most));
  }
  return read_file(path);
}

JsonValue read_object(const std::string& path, const std::string& text) {
  JsonValue json = read_json(path, text);
  if (!json.is(Kind::object)) {
    throw Error(fmt::format("{}: must be an object, not {}", path, name_of(json.kind)));
  }
  return json;
}

// The template among several that is for plain chats.
std::string default_of(const JsonValue& list, const std::string& where) {
  std::vector<std::string> names;
  for (size_t i = 0; i < list.items.size(); ++i) {
    const JsonValue* name = list.items[i].find("name");
    const JsonValue* text = list.items[i].find("template");
    if (!name || !name->is(Kind::string) || !text || !text->is(Kind::string)) {
      throw Error(fmt::format("{}[{}]: must have a name and a template, both text", where, i));
    }
    if (name->text == "default") return text->text;
    names.push_back(name->text);
  }
  throw Error(fmt::format("{}: none of its templates is called \"default\"; there are: {}", where,
                          names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "))));
}

struct StoredTemplate {
  std::string where, text;
};

std::optional<StoredTemplate> stored_template(const std::string& model_folder) {
  const std::string alone = model_folder + "/chat_template.jinja";
  if (auto text = read_bounded(alone, kLongestTemplate)) return StoredTemplate{alone, *text};
  const std::string path = model_folder + "/tokenizer_config.json";
  const std::optional<std::string> text = read_bounded(path, kLongestJson);
  if (!text) return std::nullopt;
  const JsonValue config = read_object(path, *text);
  const JsonValue* given = config.find("chat_template");
  if (!given || given->is(Kind::null)) return std::nullopt;
  const std::string where = path + ": chat_template";
  if (given->is(Kind::string)) return StoredTemplate{where, given->text};
  if (given->is(Kind::array)) return StoredTemplate{where, default_of(*given, where)};
  throw Error(
      fmt::format("{} must be text or a list of templates, not {}", where, name_of(given->kind)));
}

std::string renderer_for_type(const std::string& folder) {
  const std::string path = folder + "/config.json";
  const std::string known =
      fmt::format("name a renderer: one of {}", fmt::join(renderer_names(), ", "));
  const std::optional<std::string> text = read_bounded(path, kLongestJson);
  if (!text) {
    throw Error(
        fmt::format("{}: has no chat template (chat_template.jinja, or chat_template in "
                    "tokenizer_config.json) and no config.json; {}",
                    folder, known));
  }
  const JsonValue config = read_object(path, *text);
  const JsonValue* type = config.find("model_type");
  if (!type || !type->is(Kind::string)) {
    throw Error(
        fmt::format("{}: has no model_type, and the folder has no chat template; {}", path, known));
  }
  static constexpr std::pair<std::string_view, const char*> kTypes[] = {
      {"qwen2", "qwen2.5"},        {"qwen2_moe", "qwen2.5"},
      {"qwen3", "qwen3"},          {"qwen3_moe", "qwen3"},
      {"qwen3_5", "qwen3.5"},      {"qwen3_5_moe", "qwen3.5"},
      {"qwen3_5_text", "qwen3.5"}, {"qwen3_5_moe_text", "qwen3.5"},
      {"llama", "llama3"},         {"glm4_moe", "glm4.5"},
      {"gpt_oss", "gpt-oss"},      {"deepseek_v3", "deepseek-v3.1"},
      {"kimi_k2", "kimi-k2"}};
  for (const auto& [known_type, renderer] : kTypes) {
    if (type->text == known_type) return renderer;
  }
  throw Error(
      fmt::format("{}: model_type = \"{}\" has no renderer, and the folder has no chat "
                  "template; {}",
                  path, type->text, known));
}

}  // namespace

std::string renderer_name_of_template(const std::string& where, std::string_view chat_template) {
  if (chat_template.size() > kLongestTemplate) {
    throw Error(fmt::format("{}: has {} bytes; a chat template has at most {}", where,
                            chat_template.size(), kLongestTemplate));
  }
  if (chat_template.find('\0') != std::string_view::npos) {
    throw Error(where + ": is no text, so it is no chat template");
  }
  const std::string text = squeezed(without_comments(chat_template));
  if (text.empty()) throw Error(where + ": is empty, so it is no chat template");
  if (text.find("{%") == std::string::npos && text.find("{{") == std::string::npos) {
    throw Error(where + ": has no {{ or {%, so it is no chat template");
  }
  const std::string whole = normalized(chat_template);
  const uint32_t crc = crc32c(whole);
  for (const Published& published : kPublished) {
    if (published.size == whole.size() && published.crc == crc) return published.renderer;
  }
  std::optional<Comparison> nearest;
  for (const Fingerprint& family : fingerprints()) {
    Comparison comparison = compared(text, family);
    if (!comparison.is_near()) continue;
    if (!nearest || comparison.likeness() > nearest->likeness()) nearest = std::move(comparison);
  }
  refuse_unknown(where, nearest);
}

std::string renderer_name_for(const std::string& model_folder) {
  const std::optional<StoredTemplate> stored = stored_template(model_folder);
  if (!stored) return renderer_for_type(model_folder);
  return renderer_name_of_template(stored->where, stored->text);
}

bool has_chat_template(const std::string& model_folder) {
  return stored_template(model_folder).has_value();
}

}  // namespace leeway
