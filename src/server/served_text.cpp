#include "server/served_text.h"

#include <fmt/format.h>

#include <utility>

#include "base/files.h"
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
  // Such ids have no embedding. Before the first request, which might not contain one.
  const std::string file =
      options.tokenizer.empty() ? options.folder + "/tokenizer.json" : options.tokenizer;
  const int64_t ids = served.text->tokenizer->vocab_size();
  if (file != "byte" && is_present(file) && ids > config.vocab_size) {
    throw Error(fmt::format(
        "{}: has ids up to {}, but the weights in {} have vocab_size = {}: the tokenizer "
        "belongs to another model",
        file, ids - 1, options.folder, config.vocab_size));
  }
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
