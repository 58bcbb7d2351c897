// Conversations to token ids and back, byte for byte as the model's published chat template does
// it, with a record of which tokens the model samples.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/tokenizer.h"

namespace leeway {

enum class Role { system, user, assistant, tool };
const char* name_of(Role role);

struct ToolCall {
  std::string id;  // may be empty
  std::string name;
  // JSON text, as the model wrote it or the user gave it. If it is a JSON string (with quotes), the
  // template sees a string. Empty: no arguments.
  std::string arguments;
};

struct Message {
  Role role = Role::user;
  std::string content;
  std::optional<std::string> reasoning;  // assistant: the thinking, without its tags
  std::vector<ToolCall> tool_calls;      // assistant
  std::string tool_call_id, tool_name;   // tool; may be empty. Kimi reads the name of any role
  bool content_is_null = false;  // templates treat null content differently from empty content
};

// What a chat template reads besides the messages. `render` ignores options that a family does not
// use; a training configuration refuses them.
struct RenderOptions {
  std::string tools_json;  // a JSON list of tool schemas, or empty
  bool add_generation_prompt = false;
  std::optional<bool> enable_thinking;  // absent: the template's own default
  std::string extra_json;               // further template options as a JSON object, or empty
};

// Which past thinking to keep beyond what the template keeps. The flags only add; neither strips.
struct ThinkingRetention {
  bool preserve_all_thinking = false;
  bool preserve_thinking_between_tool_calls = false;
};

// Token ids and their roles. All vectors have one entry per id.
struct Rendered {
  std::vector<int32_t> ids;
  std::vector<int32_t> message_index;  // -1: scaffolding that belongs to no message
  std::vector<uint8_t> sampled;  // 1: the model produced it (thinking, content, calls, stop token)
  std::vector<uint8_t> loss_mask;  // 1: trained, that is, sampled in an assistant message
  std::string text;                // the same conversation as one string
};

enum class ToolCallStatus { ok, invalid_json, unclosed_block, missing_name, malformed };
const char* name_of(ToolCallStatus status);

struct ParsedToolCall {
  ToolCall call;
  ToolCallStatus status = ToolCallStatus::ok;
  std::string raw;                         // the block as it was sampled
  size_t first_token = 0, last_token = 0;  // half-open range of the completion's tokens
};

struct ParsedResponse {
  std::string content;
  std::optional<std::string> reasoning;
  std::vector<ParsedToolCall> tool_calls;
  bool closed = false;  // a stop token ended it
};

class Renderer {
 public:
  virtual ~Renderer() = default;

  virtual const char* name() const = 0;
  // Whether the family has thinking at all. Retention flags are refused if it has none.
  virtual bool has_thinking() const = 0;

  // The conversation as one string with control tokens spelled out. Throws Error if the template
  // refuses the messages.
  virtual std::string render_text(const std::vector<Message>& messages,
                                  const RenderOptions& options) const = 0;

  // The same as token ids. Text of messages never becomes control tokens.
  virtual Rendered render(const std::vector<Message>& messages,
                          const RenderOptions& options) const = 0;

  // Parses sampled ids (without the prompt). Never throws, whatever the model samples.
  virtual ParsedResponse parse_response(std::span<const int32_t> ids,
                                        const RenderOptions& options) const = 0;

  virtual std::vector<int32_t> stop_token_ids() const = 0;

  // Extends sampled tokens to the next generation point: the result starts with `prompt` and
  // `completion`, token for token, followed by `new_messages` (which contain no assistant message)
  // and the generation prompt. A turn cut off by a length limit is closed if that provably gives
  // what the template would write; if not, returns nothing, and the caller renders again and lets
  // the splitter start a new sample. message_index counts `new_messages`; it is -1 for `prompt` and
  // `completion`, of which all of `completion` is sampled.
  virtual std::optional<Rendered> bridge_to_next_turn(std::span<const int32_t> prompt,
                                                      std::span<const int32_t> completion,
                                                      const std::vector<Message>& new_messages,
                                                      const RenderOptions& options) const = 0;
};

// The names that make_renderer knows: qwen2.5 qwen3 qwen3.5 qwen3-coder glm4.5 glm4.6 llama3
// deepseek-v3.1 kimi-k2 kimi-k2-thinking gpt-oss smollm2 chatml. `renderer_name_for` in
// chat_template.h finds the one of a model folder.
std::vector<std::string> renderer_names();

// `tokenizer` must outlive the renderer; a null tokenizer gives a renderer that can only
// render_text. Throws Error for an unknown name (suggesting the nearest), for retention flags of a
// family without thinking, and for a tokenizer that lacks one of the family's control tokens.
std::unique_ptr<Renderer> make_renderer(std::string_view name, const Tokenizer* tokenizer,
                                        const ThinkingRetention& retention = {});

// The control tokens that a renderer looks up in its tokenizer, in that order. Throws Error for an
// unknown name.
std::vector<std::string> control_tokens_of(std::string_view name);

}  // namespace leeway
