// What a model's folder says about text, as far as it does: a server of token ids needs none of it.
#pragma once

#include <memory>
#include <string>

#include "generate/model_text.h"

namespace leeway {

struct ServedText {
  std::unique_ptr<ModelText> text;  // of plain prompts; null: token ids alone
  std::unique_ptr<ModelText> chat;  // of conversations, with a renderer; null: none
  std::string why_no_text, why_no_chat;
};

// A folder without a tokenizer or without a chat format is fine, and the reason is kept. Throws
// Error for files that are malformed, and for a renderer that was asked for and cannot be used.
ServedText load_served_text(ModelTextOptions options, const ModelConfig& config);

}  // namespace leeway
