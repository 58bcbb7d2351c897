#include "run/configured_renderer.h"

#include <fmt/format.h>

#include "leeway/error.h"
#include "run/policy_card.h"
#include "text/chat_template.h"

namespace leeway {
namespace {

// Without a place, the name comes from the command line.
[[noreturn]] void refuse(const RendererConfig& config, const std::string& problem) {
  throw Error(config.where.empty()
                  ? fmt::format("--renderer {}: {}", config.name, problem)
                  : fmt::format("{}name = \"{}\": {}", config.where, config.name, problem));
}

}  // namespace

RendererConfig with_found_name(RendererConfig config, const std::string& model_folder) {
  if (config.name != "auto") return config;
  if (model_folder.empty()) refuse(config, "there is no model folder to take the renderer of");
  try {
    const std::optional<PolicyCard> card = read_policy_card(model_folder);
    config.name = card && !card->renderer.name.empty() ? card->renderer.name
                                                       : renderer_name_for(model_folder);
  } catch (const Error& error) {
    refuse(config, error.what());
  }
  return config;
}

RendererConfig without_flags(RendererConfig config) {
  config.preserve_all_thinking = false;
  config.preserve_thinking_between_tool_calls = false;
  config.thinking_retention = KeptThinking::last;
  return config;
}

std::unique_ptr<Renderer> make_configured_renderer(const RendererConfig& config,
                                                   const Tokenizer* tokenizer) {
  try {
    return make_renderer(
        config.name, tokenizer,
        {.preserve_all_thinking = config.preserve_all_thinking,
         .preserve_thinking_between_tool_calls = config.preserve_thinking_between_tool_calls});
  } catch (const Error& error) {
    refuse(config, error.what());
  }
}

}  // namespace leeway
