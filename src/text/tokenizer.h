// Text to token ids and back, exactly as the model's own tokenizer does it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace leeway {

// Whether text that spells a special token ("<|im_end|>") becomes that token. User text is encoded
// `as_text`, so it can never turn into control tokens.
enum class SpecialTokens { recognise, as_text };

// Immutable after loading; all methods are thread-safe.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  // Adds no tokens of its own (such as beginning-of-text). Any bytes are accepted; invalid UTF-8 is
  // handled as the family does, without an exception.
  virtual std::vector<int32_t> encode(std::string_view text, SpecialTokens special) const = 0;

  // The bytes of the ids, with special tokens spelled out. Throws Error for an id outside the
  // vocabulary. Concatenating decoded parts equals decoding the whole, except that a part may end
  // inside a character: see IncrementalDecoder.
  virtual std::string decode(std::span<const int32_t> ids) const = 0;

  // The id of a vocabulary entry or added token, by its exact spelling.
  virtual std::optional<int32_t> token_id(std::string_view token) const = 0;
  virtual bool is_special(int32_t id) const = 0;
  virtual int32_t vocab_size() const = 0;  // largest id plus one
};

// Decodes a stream of tokens without ever emitting part of a UTF-8 character.
class IncrementalDecoder {
 public:
  explicit IncrementalDecoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  // The text completed by this token; may be empty.
  std::string push(int32_t id);
  // The rest at the end of the stream, with incomplete bytes replaced by U+FFFD.
  std::string finish();

 private:
  const Tokenizer& tokenizer_;
  std::string pending_;
};

// Loads a Hugging Face tokenizer.json of a byte-level BPE family (Qwen2 to Qwen3, Llama 3,
// DeepSeek, GPT-2), or that of a folder. Throws Error naming the file, the key and what is not
// supported.
std::unique_ptr<Tokenizer> load_tokenizer(const std::string& path);
std::unique_ptr<Tokenizer> parse_tokenizer(const std::string& name, std::string_view json);

// One token per byte, id = byte; for small examples. `control` are additional tokens from id 256
// on, all special.
std::unique_ptr<Tokenizer> make_byte_tokenizer(std::vector<std::string> control = {});

// A tokenizer as users name it: "byte", or the path of a tokenizer.json.
inline std::unique_ptr<Tokenizer> named_tokenizer(const std::string& name) {
  return name == "byte" ? make_byte_tokenizer() : load_tokenizer(name);
}

}  // namespace leeway
