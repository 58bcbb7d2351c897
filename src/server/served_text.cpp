#include "server/served_text.h"

#include <fmt/format.h>

#include <utility>

#include "leeway/error.h"

namespace leeway {

ServedText load_served_text(ModelTextOptions options, const ModelConfig& config) {
  ServedText served;
  if (!has_tokenizer(options)) {
    served.why_no_text =
        fmt::format("{} has no tokenizer.json: this server has token ids alone", options.folder);
    served.why_no_chat = served.why_no_text;
    return served;
  }
  // Plain prompts begin with other tokens than conversations, so both readings are needed.
  options.needs_renderer = false;
  const std::string renderer = std::exchange(options.renderer, "");
  served.text = std::make_unique<ModelText>(load_model_text(options, config));
  options.needs_renderer = true;
  options.renderer = renderer;
  try {
    served.chat = std::make_unique<ModelText>(load_model_text(options, config));
  } catch (const Error& error) {
    if (!renderer.empty()) throw;
    served.why_no_chat = error.what();
  }
  return served;
}

}  // namespace leeway
