// A renderer from its configuration table.
#pragma once

#include <memory>
#include <string>

#include "config/config.h"
#include "text/renderer.h"

namespace leeway {

// The configuration with the name that "auto" stands for: that of the folder's leeway.json, which a
// policy has that was trained here, or else of its chat template. Any other name stays. Throws
// Error with the place of the name if `model_folder` is empty or does not tell.
RendererConfig with_found_name(RendererConfig config, const std::string& model_folder);

// The same format as its family has it, with no thinking kept beyond the template's.
RendererConfig without_flags(RendererConfig config);

// Throws Error with the place of the name for an unknown renderer, or for flags on one without
// thinking. "auto" is no renderer: see with_found_name. `tokenizer` may be null (text only) and
// must outlive the result.
std::unique_ptr<Renderer> make_configured_renderer(const RendererConfig& config,
                                                   const Tokenizer* tokenizer);

}  // namespace leeway
