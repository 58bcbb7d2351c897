#include "generate/model_text.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <span>

#include "base/files.h"
#include "leeway/error.h"
#include "run/configured_renderer.h"
#include "run/policy_card.h"
#include "text/chat_template.h"

namespace leeway {
namespace {

RendererConfig renderer_of(const ModelTextOptions& options, const std::optional<PolicyCard>& card) {
  RendererConfig renderer;
  if (!options.needs_renderer) return renderer;
  if (!options.renderer.empty() && options.renderer != "auto") {
    renderer.name = options.renderer;
  } else if (card && !card->renderer.name.empty()) {
    renderer = card->renderer;
  } else {
    renderer.name = renderer_name_for(options.folder);
    renderer.where = options.folder + ": renderer ";
  }
  return renderer;
}

// A byte tokenizer has the control tokens that its model was trained with, or those of the
// renderer.
std::unique_ptr<Tokenizer> byte_tokenizer(const std::optional<PolicyCard>& card,
                                          const RendererConfig& renderer) {
  if (card && card->byte) return make_byte_tokenizer(card->control_tokens);
  return make_byte_tokenizer(renderer.name.empty() ? std::vector<std::string>()
                                                   : control_tokens_of(renderer.name));
}

std::string tokenizer_file_of(const ModelTextOptions& options) {
  if (!options.tokenizer.empty()) return options.tokenizer;
  const std::string file = options.folder + "/tokenizer.json";
  if (!is_present(file)) {
    throw Error(
        fmt::format("{}: there is no such file, which turns text into tokens; give --tokenizer "
                    "with another folder's, or token ids with --tokens",
                    file));
  }
  return file;
}

std::vector<int32_t> begin_ids_of(const Tokenizer& tokenizer, const TokenizerConfig& config,
                                  const std::string& tokenizer_file) {
  std::vector<std::string> tokens;
  if (!config.add_bos_token.has_value()) {
    tokens = tokens_before_text(tokenizer_file);
  } else if (*config.add_bos_token) {
    tokens = {config.bos_token};
  }
  std::vector<int32_t> ids;
  for (const std::string& token : tokens) {
    const std::optional<int32_t> id = tokenizer.token_id(token);
    if (!id) {
      throw Error(fmt::format("{}: a text begins with {}, which is not one of its tokens",
                              tokenizer_file, token));
    }
    ids.push_back(*id);
  }
  return ids;
}

}  // namespace

bool has_tokenizer(const ModelTextOptions& options) {
  if (!options.tokenizer.empty() || is_present(options.folder + "/tokenizer.json")) return true;
  const std::optional<PolicyCard> card = read_policy_card(options.folder);
  return card && card->byte;
}

ModelText load_model_text(const ModelTextOptions& options, const ModelConfig& config) {
  ModelText text;
  text.folder = options.folder;
  text.vocab_size = config.vocab_size;
  text.generation = read_generation_config(options.folder);
  const TokenizerConfig tokenizer_config = read_tokenizer_config(options.folder);
  const std::optional<PolicyCard> card = read_policy_card(options.folder);
  const RendererConfig renderer = renderer_of(options, card);
  // Before the tokenizer, which takes a moment: an unknown name needs none.
  if (!renderer.name.empty()) make_configured_renderer(renderer, nullptr);
  if (options.tokenizer == "byte" || (options.tokenizer.empty() && card && card->byte)) {
    text.tokenizer = byte_tokenizer(card, renderer);
  } else {
    const std::string file = tokenizer_file_of(options);
    text.tokenizer = load_tokenizer(file);
    if (!options.needs_renderer) {
      text.begin_ids = begin_ids_of(*text.tokenizer, tokenizer_config, file);
    }
  }
  std::vector<int32_t> ends = text.generation.eos_token_id;
  ends.insert(ends.end(), config.eos_token_id.begin(), config.eos_token_id.end());
  if (const auto id = text.tokenizer->token_id(tokenizer_config.eos_token)) ends.push_back(*id);
  if (!renderer.name.empty()) {
    try {
      text.renderer = make_configured_renderer(renderer, text.tokenizer.get());
    } catch (const Error& error) {
      throw Error(
          fmt::format("{}; --prompt continues plain text without a chat format", error.what()));
    }
    const std::vector<int32_t> stops = text.renderer->stop_token_ids();
    ends.insert(ends.end(), stops.begin(), stops.end());
  }
  for (const int32_t id : ends) {
    const bool known =
        std::find(text.end_ids.begin(), text.end_ids.end(), id) != text.end_ids.end();
    if (!known && id < config.vocab_size) text.end_ids.push_back(id);
  }
  return text;
}

std::vector<int32_t> plain_prompt(const ModelText& text, const std::string& what,
                                  std::string_view prompt) {
  if (prompt.empty()) throw Error(fmt::format("{}: the text is empty", what));
  const std::vector<int32_t> own = text.tokenizer->encode(prompt, SpecialTokens::recognise);
  std::vector<int32_t> ids = text.begin_ids;
  const bool spelled = own.size() >= ids.size() && std::equal(ids.begin(), ids.end(), own.begin());
  if (spelled) ids.clear();
  ids.insert(ids.end(), own.begin(), own.end());
  check_model_ids(text, ids);
  return ids;
}

Rendered render_conversation(const ModelText& text, const std::string& name,
                             const RenderRequest& request) {
  try {
    Rendered rendered = text.renderer->render(request.messages, request.options);
    check_model_ids(text, rendered.ids);
    return rendered;
  } catch (const Error& error) {
    throw Error(fmt::format("{}: {}", name, error.what()));
  }
}

void check_model_ids(const ModelText& text, const std::vector<int32_t>& ids) {
  for (const int32_t id : ids) {
    if (id < text.vocab_size) continue;
    throw Error(fmt::format(
        "{}: the tokenizer's token {} has the id {}, the model's ids are 0 to {}: the tokenizer "
        "belongs to another model",
        text.folder, text.tokenizer->decode(std::span(&id, 1)), id, text.vocab_size - 1));
  }
}

}  // namespace leeway
