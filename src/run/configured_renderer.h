// A renderer from its configuration table.
#pragma once

#include <memory>

#include "config/config.h"
#include "text/renderer.h"

namespace leeway {

// Throws Error with the place of the name for an unknown renderer, or for flags on one without
// thinking. `tokenizer` may be null (text only) and must outlive the result.
std::unique_ptr<Renderer> make_configured_renderer(const RendererConfig& config,
                                                   const Tokenizer* tokenizer);

}  // namespace leeway
