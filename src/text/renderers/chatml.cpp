// ChatML: every message as <|im_start|>ROLE, its text, <|im_end|>. SmolLM2 is the same with a
// default system message. Neither template has tools or thinking: it would drop calls without a
// word, so calls and tool schemas are refused.
#include "text/renderers/family.h"

namespace leeway {
namespace {

constexpr std::string_view kSmolSystem =
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face";

class ChatMl : public FamilyRenderer {
 public:
  ChatMl(const char* name, std::string_view default_system, const Tokenizer* tokenizer,
         const ThinkingRetention& retention)
      : FamilyRenderer(
            {.name = name,
             .has_thinking = false,
             .controls = {{"<|im_start|>", true}, {"<|im_end|>", true}, {"<|endoftext|>"}},
             .stops = {"<|im_end|>", "<|endoftext|>"},
             .close = "<|im_end|>",
             .blocks = {}},
            tokenizer, retention),
        default_system_(default_system) {}

 protected:
  void write_opening(Script& script, const TemplateInput& c) const override {
    if (!c.tools.empty()) refuse(0, "the template has no place for tools");
    if (default_system_.empty() || c.size() == 0 || c.role_is(0, Role::system)) return;
    script.literal("<|im_start|>system\n");
    script.literal(default_system_);
    script.literal("<|im_end|>\n");
  }

  void write_message(Script& script, const TemplateInput& c, size_t i) const override {
    const Message& message = c[i];
    refuse_null(c, i);
    if (!message.tool_calls.empty()) refuse(i, "the template has no place for tool calls");
    script.literal("<|im_start|>");
    script.literal(name_of(message.role));
    script.literal("\n");
    script.sampled(message.role == Role::assistant);
    script.words(message.content);
    script.literal("<|im_end|>");
    script.sampled(false);
    script.literal("\n");
  }

  void write_generation_prompt(Script& script, const TemplateInput&) const override {
    script.literal("<|im_start|>assistant\n");
  }
  void write_turn_end(Script& script) const override { script.literal("\n"); }

  void parse(const Completion& completion, const TemplateInput&,
             ParsedResponse& out) const override {
    out.content = completion.text();
  }

 private:
  std::string_view default_system_;
};

}  // namespace

std::unique_ptr<Renderer> make_chatml(const Tokenizer* tokenizer,
                                      const ThinkingRetention& retention) {
  return std::make_unique<ChatMl>("chatml", "", tokenizer, retention);
}

std::unique_ptr<Renderer> make_smollm2(const Tokenizer* tokenizer,
                                       const ThinkingRetention& retention) {
  return std::make_unique<ChatMl>("smollm2", kSmolSystem, tokenizer, retention);
}

}  // namespace leeway
