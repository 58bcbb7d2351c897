#include "run/configured_renderer.h"

#include <fmt/format.h>

#include "leeway/error.h"

namespace leeway {

std::unique_ptr<Renderer> make_configured_renderer(const RendererConfig& config,
                                                   const Tokenizer* tokenizer) {
  try {
    return make_renderer(
        config.name, tokenizer,
        {.preserve_all_thinking = config.preserve_all_thinking,
         .preserve_thinking_between_tool_calls = config.preserve_thinking_between_tool_calls});
  } catch (const Error& error) {
    // Without a place, the name comes from the command line.
    throw Error(config.where.empty()
                    ? fmt::format("--renderer {}: {}", config.name, error.what())
                    : fmt::format("{}name = \"{}\": {}", config.where, config.name, error.what()));
  }
}

}  // namespace leeway
