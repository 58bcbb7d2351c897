// What a model's folder says about text: its tokenizer, its chat format, how it is sampled and
// which tokens end a text.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "generate/folder_settings.h"
#include "model/model_config.h"
#include "text/messages_json.h"

namespace leeway {

struct ModelTextOptions {
  std::string folder;
  std::string tokenizer;  // a tokenizer.json, or "byte"; empty: the folder's own
  std::string renderer;   // its name; empty or "auto": the folder's own
  bool needs_renderer = false;
};

struct ModelText {
  std::string folder;
  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<Renderer> renderer;  // null unless it is needed; uses the tokenizer
  GenerationConfig generation;
  std::vector<int32_t> begin_ids;  // in front of a plain text
  // End a reply: eos_token_id of generation_config.json and of config.json, eos_token of
  // tokenizer_config.json, the renderer's stop tokens. Ids of the model, without repetition.
  std::vector<int32_t> end_ids;
  int64_t vocab_size = 0;  // of the model
};

// Whether there is a tokenizer: a given one, the folder's tokenizer.json, or the bytes that a
// folder of Leeway's names. Throws Error for a malformed leeway.json.
bool has_tokenizer(const ModelTextOptions& options);

// Reads the folder's files except the weights. A folder that Leeway wrote knows its tokenizer and
// renderer (leeway.json). Throws Error naming the file or the option and the remedy: no tokenizer,
// malformed settings, an unknown renderer, or one whose control tokens the tokenizer lacks.
ModelText load_model_text(const ModelTextOptions& options, const ModelConfig& config);

// A text for plain completion or scoring: begin_ids, unless the text spells them, and its tokens.
// Special tokens are recognised, as `leeway tokenize` does. Throws Error for an empty text.
std::vector<int32_t> plain_prompt(const ModelText& text, const std::string& what,
                                  std::string_view prompt);

// A conversation as the renderer writes it. Throws Error with `name` if the template refuses it.
Rendered render_conversation(const ModelText& text, const std::string& name,
                             const RenderRequest& request);

// Throws Error naming the token if the tokenizer gives an id that the model does not have.
void check_model_ids(const ModelText& text, const std::vector<int32_t>& ids);

}  // namespace leeway
