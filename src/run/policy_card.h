// What a folder of weights knows beside them: how text becomes tokens, and whether they are
// rounded.
//
//   tokenizer.json    where the policy reads tokens of a file
//   leeway.json       {"format": 1, "tokenizer": "byte", "control_tokens": [..], "renderer": {..}}
//                     "tokenizer.json" instead of "byte"; no renderer where none is configured;
//                     "rounded": true where the weights are bf16 and the trainer's were float32
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/checked_files.h"
#include "config/config.h"

namespace leeway {

struct PolicyCard {
  bool byte = false;                        // the byte tokenizer, with these control tokens
  std::vector<std::string> control_tokens;  // of the byte tokenizer
  RendererConfig renderer;                  // no name: none
  bool rounded = false;                     // the trainer had the weights with more digits
};

FileSum write_policy_card(const std::string& folder, const PolicyCard& card);
// Nothing: the folder has no card, as one that another program wrote. Throws Error for one that
// cannot be read.
std::optional<PolicyCard> read_policy_card(const std::string& folder);

}  // namespace leeway
