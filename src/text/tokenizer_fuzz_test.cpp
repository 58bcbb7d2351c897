// Random text through a tokenizer, and random damage to its file. Each input is determined by its
// number.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <thread>

#include "base/rng.h"
#include "leeway/error.h"
#include "text/byte_level.h"
#include "text/tokenizer.h"

namespace leeway {
namespace {

template <class Body>
void for_each_input(uint64_t count, Body body) {
  for (uint64_t number = 0; number < count && !testing::Test::HasFailure(); ++number) {
    SCOPED_TRACE(fmt::format("input {}", number));
    body(number);
  }
}

// No normalization, so that any text round-trips.
std::string small_json() {
  std::string vocab;
  for (int byte = 0; byte < 256; ++byte) {
    vocab += '"';
    if (byte == '"' || byte == '\\') vocab += '\\';
    append_utf8(vocab, byte_level_code_point(static_cast<uint8_t>(byte)));
    vocab += fmt::format("\": {}, ", byte);
  }
  return R"({"version": "1.0", "truncation": null, "normalizer": null, "added_tokens": [
  {"id": 261, "content": "<|end|>", "single_word": false, "lstrip": false, "rstrip": false,
   "normalized": false, "special": true},
  {"id": 262, "content": "<t>", "normalized": true, "special": false, "single_word": true}],
 "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex":
  "(?i:'s|'t)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"},
  "behavior": "Isolated", "invert": false}, {"type": "Digits", "individual_digits": true},
  {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]},
 "decoder": {"type": "ByteLevel"},
 "model": {"type": "BPE", "dropout": null, "ignore_merges": false, "merges": ["t h", ["th", "e"],
  "a a", "aa aa", "th e"], "vocab": {)" +
         vocab + R"("th": 256, "the": 257, "aa": 258, "aaaa": 259, "odd": 260}}})";
}

std::string random_text(Rng& rng) {
  std::string text;
  for (uint64_t count = rng.below(60); count > 0; --count) {
    switch (rng.below(8)) {
      case 0: text += "the"; break;
      case 1: text += std::string(rng.below(100), 'a'); break;
      case 2: text += "<|end|>"; break;
      case 3: text += "<t>"; break;
      case 4: text += static_cast<char>(rng.below(128)); break;
      case 5: append_utf8(text, static_cast<uint32_t>(rng.below(0x800))); break;
      case 6: append_utf8(text, static_cast<uint32_t>(0xE000 + rng.below(0x102000))); break;
      default: append_utf8(text, static_cast<uint32_t>(rng.below(0xD800))); break;
    }
  }
  return text;
}

std::string random_bytes(Rng& rng) {
  std::string bytes = random_text(rng);
  for (uint64_t count = rng.below(6); count > 0 && !bytes.empty(); --count) {
    bytes[rng.below(bytes.size())] = static_cast<char>(static_cast<uint8_t>(rng.below(256)));
  }
  return bytes;
}

TEST(TokenizerFuzz, text_comes_back) {
  const auto tokenizer = parse_tokenizer("small.json", small_json());
  for_each_input(10000, [&](uint64_t number) {
    Rng rng(number);
    const std::string text = number % 2 == 0 ? random_text(rng) : random_bytes(rng);
    const auto special = rng.below(2) == 0 ? SpecialTokens::recognise : SpecialTokens::as_text;
    const std::vector<int32_t> ids = tokenizer->encode(text, special);
    ASSERT_EQ(tokenizer->decode(ids), text);
    IncrementalDecoder decoder(*tokenizer);
    std::string streamed;
    for (const int32_t id : ids) {
      ASSERT_TRUE(special == SpecialTokens::recognise || !tokenizer->is_special(id));
      const std::string part = decoder.push(id);
      ASSERT_EQ(valid_utf8_prefix(part), part.size());
      streamed += part;
    }
    streamed += decoder.finish();
    if (valid_utf8_prefix(text) == text.size()) {
      ASSERT_EQ(streamed, text);
    }
  });
}

std::string damage(Rng& rng, std::string json) {
  static const std::vector<std::string> kWords = {
      "null",       "true",   "-1", "1e9",     "\"\"", "{}", "[]", "\"Sequence\"",
      "2147483648", "\\\\p{", "(?", "\\ud800", "[",    "]",  "{",  "}",
      ",",          ":",      "*",  "+",       "\xFF", "0"};
  for (uint64_t count = rng.below(4) + 1; count > 0; --count) {
    // Put half of the damage outside the long list of bytes.
    const size_t bound = rng.below(2) == 0 ? json.size() : std::min<size_t>(json.size(), 1200);
    const size_t at = rng.below(bound + 1);
    const size_t length = std::min<size_t>(rng.below(20), json.size() - at);
    switch (rng.below(4)) {
      case 0: json.erase(at, length); break;
      case 1: json.insert(at, kWords[rng.below(kWords.size())]); break;
      case 2: json.replace(at, length, kWords[rng.below(kWords.size())]); break;
      default: json.insert(at, json.substr(rng.below(json.size()), length)); break;
    }
    if (json.empty()) break;
  }
  return json;
}

TEST(TokenizerFuzz, a_damaged_file_is_read_or_refused) {
  const std::string json = small_json();
  size_t read = 0, refused = 0;
  for_each_input(1500, [&](uint64_t number) {
    Rng rng(number);
    const std::string damaged = damage(rng, json);
    try {
      const auto tokenizer = parse_tokenizer("small.json", damaged);
      ++read;
      for (const int32_t id : tokenizer->encode(random_bytes(rng), SpecialTokens::recognise)) {
        ASSERT_TRUE(id >= 0 && id < tokenizer->vocab_size());
        tokenizer->decode(std::span(&id, 1));
      }
    } catch (const Error& error) {
      ++refused;
      ASSERT_TRUE(std::string(error.what()).starts_with("small.json")) << error.what();
    }
  });
  EXPECT_GT(read, 0u);
  EXPECT_GT(refused, 0u);
}

TEST(TokenizerFuzz, threads_agree) {
  Rng rng(3);
  std::vector<std::string> texts;
  for (int i = 0; i < 3000; ++i) texts.push_back(random_bytes(rng));
  const auto encode_all = [&](const Tokenizer& tokenizer) {
    std::vector<std::vector<int32_t>> ids;
    for (const std::string& text : texts) {
      ids.push_back(tokenizer.encode(text, SpecialTokens::recognise));
    }
    return ids;
  };
  const auto alone = encode_all(*parse_tokenizer("small.json", small_json()));
  // A fresh tokenizer, so that all threads fill its lazy tables at once.
  const auto shared = parse_tokenizer("small.json", small_json());
  std::vector<std::vector<std::vector<int32_t>>> results(4);
  std::vector<std::thread> threads;
  for (auto& result : results) threads.emplace_back([&] { result = encode_all(*shared); });
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_EQ(result, alone);
}

}  // namespace
}  // namespace leeway
