#include "generate/text_stream.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "base/utf8.h"
#include "generate/test_support.h"

namespace leeway {
namespace {

using testing::byte_ids;

// Pushes the ids one by one; the pieces in a list, with what `finish` gives at the end.
std::vector<TextPiece> pieces_of(TextStream& stream, const std::vector<int32_t>& ids) {
  std::vector<TextPiece> pieces;
  for (const int32_t id : ids) pieces.push_back(stream.push(id));
  pieces.push_back(stream.finish());
  return pieces;
}

TEST(TextStream, ACharacterOfSeveralTokensComesWhole) {
  const auto tokenizer = make_byte_tokenizer();
  TextStream stream(*tokenizer, {}, false);
  const auto pieces = pieces_of(stream, byte_ids("a\xE2\x82\xAC"
                                                 "b\xC3"));
  ASSERT_EQ(pieces.size(), 7u);
  EXPECT_EQ(pieces[0].text, "a");
  EXPECT_EQ(pieces[1].text + pieces[2].text, "");
  EXPECT_EQ(pieces[3].text, "\xE2\x82\xAC");
  EXPECT_EQ(pieces[4].text, "b");
  EXPECT_EQ(pieces[5].text, "");
  EXPECT_EQ(pieces[6].text, "\xEF\xBF\xBD") << "the end cuts a character";
  EXPECT_EQ(stream.text(),
            "a\xE2\x82\xAC"
            "b\xEF\xBF\xBD");
}

TEST(TextStream, EveryPieceIsValidUtf8WhateverIsSampled) {
  const auto tokenizer = make_byte_tokenizer({"<think>", "</think>"});
  Rng rng(3);
  for (int run = 0; run < 300; ++run) {
    TextStream stream(*tokenizer, {"\xC3\xA9", "ab"}, false);
    std::vector<int32_t> ids(20);
    for (int32_t& id : ids) id = static_cast<int32_t>(rng.below(rng.below(2) == 0 ? 300 : 128));
    std::string all;
    for (const TextPiece& piece : pieces_of(stream, ids)) {
      EXPECT_EQ(valid_utf8_prefix(piece.text), piece.text.size());
      all += piece.text;
    }
    EXPECT_EQ(all, stream.text());
    EXPECT_EQ(all.find("ab"), std::string::npos);
    EXPECT_EQ(all.find("\xC3\xA9"), std::string::npos);
  }
}

TEST(TextStream, AStopTextEndsTheTextWhereverTokensCutIt) {
  const auto tokenizer = make_byte_tokenizer();
  TextStream stream(*tokenizer, {"END", "\n\n"}, false);
  const auto pieces = pieces_of(stream, byte_ids("a\nEEND and more\n\n"));
  EXPECT_EQ(stream.text(), "a\nE");
  EXPECT_TRUE(stream.stopped());
  EXPECT_EQ(pieces[1].text, "") << "may begin two newlines";
  EXPECT_EQ(pieces[2].text, "\n") << "held back until it could not";
  EXPECT_EQ(pieces[3].text, "E");
}

TEST(TextStream, WhatWasHeldBackComesAtTheEnd) {
  const auto tokenizer = make_byte_tokenizer();
  TextStream stream(*tokenizer, {"END"}, false);
  const auto pieces = pieces_of(stream, byte_ids("xEN"));
  EXPECT_EQ(pieces.back().text, "EN");
  EXPECT_EQ(stream.text(), "xEN");
  EXPECT_FALSE(stream.stopped());
}

TEST(TextStream, IdsThatTheTokenizerLacksAreReplacementCharacters) {
  const auto tokenizer = make_byte_tokenizer();
  TextStream stream(*tokenizer, {}, false);
  pieces_of(stream, {'a', 299, 0xC3, 299, 'b'});
  EXPECT_EQ(stream.text(),
            "a\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD"
            "b");
}

TEST(TextStream, ThinkingIsMarkedWithItsTags) {
  const auto tokenizer = make_byte_tokenizer({"<think>", "</think>"});
  TextStream stream(*tokenizer, {}, false);
  const auto pieces = pieces_of(stream, {256, 'h', 257, 'a'});
  EXPECT_TRUE(pieces[0].thinking && pieces[1].thinking && pieces[2].thinking);
  EXPECT_FALSE(pieces[3].thinking);
  EXPECT_EQ(stream.text(), "<think>h</think>a");
  TextStream inside(*tokenizer, {}, true);
  EXPECT_TRUE(inside.push('h').thinking);
  EXPECT_TRUE(inside.push(257).thinking);
  EXPECT_FALSE(inside.push('a').thinking);
  EXPECT_TRUE(ends_in_thinking(*tokenizer, {'a', 256, '\n'}));
  EXPECT_FALSE(ends_in_thinking(*tokenizer, {'a', 256, '\n', 257}));
  EXPECT_FALSE(ends_in_thinking(*tokenizer, {256, 'a'}));
  EXPECT_FALSE(ends_in_thinking(*tokenizer, {}));
}

}  // namespace
}  // namespace leeway
