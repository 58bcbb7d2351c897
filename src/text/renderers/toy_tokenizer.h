// A tokenizer for tests: bytes, a few merged pieces and the control tokens of every family.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "leeway/error.h"
#include "text/tokenizer.h"

namespace leeway {

inline std::vector<std::string> toy_special_tokens() {
  const std::string bar = "\xef\xbd\x9c", gap = "\xe2\x96\x81";
  std::vector<std::string> tokens = {"<|im_start|>",
                                     "<|im_end|>",
                                     "<|endoftext|>",
                                     "<tool_call>",
                                     "</tool_call>",
                                     "<tool_response>",
                                     "</tool_response>",
                                     "<think>",
                                     "</think>",
                                     "[gMASK]",
                                     "<sop>",
                                     "<|system|>",
                                     "<|user|>",
                                     "<|assistant|>",
                                     "<|observation|>",
                                     "<arg_key>",
                                     "</arg_key>",
                                     "<arg_value>",
                                     "</arg_value>",
                                     "/nothink",
                                     "<|begin_of_text|>",
                                     "<|start_header_id|>",
                                     "<|end_header_id|>",
                                     "<|eot_id|>",
                                     "<|eom_id|>",
                                     "<|end_of_text|>",
                                     "<|python_tag|>",
                                     "<|im_user|>",
                                     "<|im_assistant|>",
                                     "<|im_system|>",
                                     "<|im_middle|>",
                                     "<|tool_calls_section_begin|>",
                                     "<|tool_calls_section_end|>",
                                     "<|tool_call_begin|>",
                                     "<|tool_call_end|>",
                                     "<|tool_call_argument_begin|>",
                                     "<|start|>",
                                     "<|end|>",
                                     "<|message|>",
                                     "<|channel|>",
                                     "<|constrain|>",
                                     "<|return|>",
                                     "<|call|>"};
  for (const std::string& name :
       {std::string("begin of sentence"), std::string("end of sentence"), std::string("User"),
        std::string("Assistant"), std::string("tool calls begin"), std::string("tool calls end"),
        std::string("tool call begin"), std::string("tool call end"), std::string("tool sep"),
        std::string("tool output begin"), std::string("tool output end")}) {
    std::string token = "<" + bar;
    for (const char c : name) token += c == ' ' ? gap : std::string(1, c);
    tokens.push_back(token + bar + ">");
  }
  return tokens;
}

class ToyTokenizer : public Tokenizer {
 public:
  explicit ToyTokenizer(std::vector<std::string> specials = toy_special_tokens())
      : specials_(std::move(specials)) {}

  std::vector<int32_t> encode(std::string_view text, SpecialTokens special) const override {
    std::vector<int32_t> ids;
    while (!text.empty()) {
      int32_t id = static_cast<unsigned char>(text.front());
      size_t size = 1;
      const auto take = [&](const std::vector<std::string>& pieces, int32_t first) {
        for (size_t i = 0; i < pieces.size(); ++i) {
          if (!text.starts_with(pieces[i]) || pieces[i].size() <= size) continue;
          size = pieces[i].size();
          id = first + static_cast<int32_t>(i);
        }
      };
      take(merged_, 256);
      if (special == SpecialTokens::recognise) take(specials_, first_special());
      ids.push_back(id);
      text.remove_prefix(size);
    }
    return ids;
  }
  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      if (id < 0 || id >= vocab_size()) throw Error("id outside the vocabulary");
      if (id < 256) {
        text += static_cast<char>(id);
      } else if (id < first_special()) {
        text += merged_[static_cast<size_t>(id - 256)];
      } else {
        text += specials_[static_cast<size_t>(id - first_special())];
      }
    }
    return text;
  }
  std::optional<int32_t> token_id(std::string_view token) const override {
    const auto found = std::find(specials_.begin(), specials_.end(), token);
    if (found == specials_.end()) return std::nullopt;
    return first_special() + static_cast<int32_t>(found - specials_.begin());
  }
  bool is_special(int32_t id) const override { return id >= first_special(); }
  int32_t vocab_size() const override {
    return first_special() + static_cast<int32_t>(specials_.size());
  }

 private:
  int32_t first_special() const { return 256 + static_cast<int32_t>(merged_.size()); }

  // "\n\n" makes a token span the boundary between a header and what the model writes.
  const std::vector<std::string> merged_ = {"\n\n", "the", "\": ", "a\n"};
  std::vector<std::string> specials_;
};

}  // namespace leeway
