// What the two directions of a tokenizer's conversion share.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

namespace leeway {

inline constexpr const char* kTokenizerModel = "tokenizer.ggml.model";
inline constexpr const char* kTokenizerPre = "tokenizer.ggml.pre";
inline constexpr const char* kTokens = "tokenizer.ggml.tokens";
inline constexpr const char* kTokenKinds = "tokenizer.ggml.token_type";
inline constexpr const char* kMerges = "tokenizer.ggml.merges";

// The numbers are those of the file.
enum class TokenKind : int32_t {
  normal = 1,
  unknown = 2,
  control = 3,
  user_defined = 4,
  unused = 5,
  byte = 6,
};

// Stands for an id that has an embedding and no token.
inline std::string filler_token(int64_t id) { return fmt::format("[PAD{}]", id); }

}  // namespace leeway
