// Shared by all families: a renderer consists of rules for writing messages and rules for parsing a
// completion.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "text/renderer.h"
#include "text/renderers/completion.h"
#include "text/renderers/json_value.h"
#include "text/renderers/script.h"

namespace leeway {

// Everything that a template reads, parsed once.
struct TemplateInput {
  const std::vector<Message>& messages;
  const RenderOptions& options;
  std::vector<JsonValue> tools;
  JsonValue extra;  // an object

  // Assistant messages after this index keep their thinking. Each family sets it.
  int last_query = -1;
  // Per message, the ids of its calls, and for a tool message the id that it answers. Set by Kimi;
  // gpt-oss keeps the name of the function that a tool message answers here.
  std::vector<std::vector<std::string>> call_ids;
  // Messages before this index are already tokens.
  size_t written = 0;
  bool close_is_written = false;  // GLM: the next role's marker is already among those tokens

  const Message& operator[](size_t i) const { return messages[i]; }
  size_t size() const { return messages.size(); }
  bool is_last(size_t i) const { return i + 1 == messages.size(); }
  bool role_is(size_t i, Role role) const { return i < size() && messages[i].role == role; }
  // Whether the message before (or after) `i` exists and has this role.
  bool follows(size_t i, Role role) const { return i > 0 && role_is(i - 1, role); }
  bool precedes(size_t i, Role role) const { return role_is(i + 1, role); }
  bool thinking_disabled() const { return options.enable_thinking == false; }
};

// The thinking and the visible text of an assistant message.
struct Parts {
  std::string_view reasoning, content;
};
// What Jinja prints for the content when the template does not check for null: "None".
inline std::string_view printed_content(const Message& message) {
  return message.content_is_null ? std::string_view("None") : message.content;
}
// The thinking comes from the reasoning field or, if that is absent, from <think>..</think> in
// `content`.
Parts split_thinking(const Message& message, std::string_view content);

struct FamilySpec {
  const char* name;
  bool has_thinking;
  std::vector<Control> controls;
  std::vector<const char*> stops;  // used if the tokenizer has them
  const char* close;               // closes a turn cut off by a length limit; empty if nothing can
  // Paired control tokens: a turn cut off inside such a block cannot be closed.
  std::vector<std::pair<const char*, const char*>> blocks;
};

class FamilyRenderer : public Renderer {
 public:
  FamilyRenderer(FamilySpec spec, const Tokenizer* tokenizer, const ThinkingRetention& retention);

  const char* name() const override { return spec_.name; }
  bool has_thinking() const override { return spec_.has_thinking; }
  std::string render_text(const std::vector<Message>& messages,
                          const RenderOptions& options) const override;
  Rendered render(const std::vector<Message>& messages,
                  const RenderOptions& options) const override;
  ParsedResponse parse_response(std::span<const int32_t> ids,
                                const RenderOptions& options) const override;
  std::vector<int32_t> stop_token_ids() const override { return stops_; }
  std::optional<Rendered> bridge_to_next_turn(std::span<const int32_t> prompt,
                                              std::span<const int32_t> completion,
                                              const std::vector<Message>& new_messages,
                                              const RenderOptions& options) const override;

 protected:
  // The template, from top to bottom.
  virtual void prepare(TemplateInput&) const {}
  virtual void write_opening(Script& script, const TemplateInput& c) const = 0;
  virtual void write_message(Script& script, const TemplateInput& c, size_t i) const = 0;
  virtual void write_generation_prompt(Script& script, const TemplateInput& c) const = 0;
  // The text between a turn's close token and the next message.
  virtual void write_turn_end(Script&) const {}

  // Fills in everything but `closed`.
  virtual void parse(const Completion& completion, const TemplateInput& c,
                     ParsedResponse& out) const = 0;
  // What ends a turn that a length limit cut off, so that the result is what the template writes;
  // nothing if nothing provably does.
  virtual std::optional<std::string> closing(const Completion& read, const ParsedResponse& turn,
                                             const TemplateInput& c) const;
  // Whether the close token at the end of `completion` allows `next` to follow.
  virtual bool can_follow(int32_t close_id, const Message& next) const;
  // Whether the generation prompt ends inside <think>.
  virtual bool prompt_opens_thinking(const TemplateInput&) const { return false; }

  // Implements the retention flags: past thinking of this message is kept whatever the template
  // does.
  bool keeps_thinking(const TemplateInput& c, size_t i) const;
  int32_t control_id(std::string_view text) const;
  [[noreturn]] void refuse(size_t message, const std::string& why) const;
  // Refuses null content for templates that fail on it.
  void refuse_null(const TemplateInput& c, size_t i) const;
  // The call's arguments as the template sees them. Throws Error if the text is not JSON.
  JsonValue arguments_of(const TemplateInput& c, size_t i, const ToolCall& call) const;
  // `arguments | tojson`: JSON text is kept as it was written.
  const std::string& arguments_json(size_t i, const ToolCall& call) const;
  // The same for templates that write strings unquoted.
  std::string arguments_text(const TemplateInput& c, size_t i, const ToolCall& call) const;

 private:
  TemplateInput open(const std::vector<Message>& messages, const RenderOptions& options) const;
  Script write(const std::vector<Message>& messages, const RenderOptions& options) const;

  FamilySpec spec_;
  const Tokenizer* tokenizer_;
  ThinkingRetention retention_;
  std::vector<int32_t> stops_;
};

// One factory per family; see renderer.cpp for the names.
using MakeFamily = std::unique_ptr<Renderer> (*)(const Tokenizer*, const ThinkingRetention&);
std::unique_ptr<Renderer> make_chatml(const Tokenizer*, const ThinkingRetention&);
std::unique_ptr<Renderer> make_smollm2(const Tokenizer*, const ThinkingRetention&);
std::unique_ptr<Renderer> make_qwen2_5(const Tokenizer*, const ThinkingRetention&);
std::unique_ptr<Renderer> make_qwen3(const Tokenizer*, const ThinkingRetention&);
std::unique_ptr<Renderer> make_qwen3_5(const Tokenizer*, const ThinkingRetention&);
std::unique_ptr<Renderer> make_qwen3_coder(const Tokenizer*, const ThinkingRetention&);
std::unique_ptr<Renderer> make_glm4_5(const Tokenizer*, const ThinkingRetention&);
std::unique_ptr<Renderer> make_glm4_6(const Tokenizer*, const ThinkingRetention&);
std::unique_ptr<Renderer> make_llama3(const Tokenizer*, const ThinkingRetention&);
std::unique_ptr<Renderer> make_deepseek_v3_1(const Tokenizer*, const ThinkingRetention&);
std::unique_ptr<Renderer> make_gpt_oss(const Tokenizer*, const ThinkingRetention&);
std::unique_ptr<Renderer> make_kimi_k2(const Tokenizer*, const ThinkingRetention&);
std::unique_ptr<Renderer> make_kimi_k2_thinking(const Tokenizer*, const ThinkingRetention&);

}  // namespace leeway
