// Every feature and every refusal, on tokenizers small enough to read.

#include "text/tokenizer.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <deque>
#include <map>

#include "base/rng.h"
#include "leeway/error.h"
#include "text/byte_level.h"
#include "text/normalizer.h"
#include "text/pre_tokenizer.h"

namespace leeway {
namespace {

using Ids = std::vector<int32_t>;
constexpr auto kRecognise = SpecialTokens::recognise;
constexpr auto kAsText = SpecialTokens::as_text;

// The parts of a tokenizer.json; the vocabulary's first 256 ids are the bytes.
struct Parts {
  std::string vocab = R"("th": 256, "the": 257, "in": 258, "whole": 259, "aa": 260, "aaa": 261)";
  std::string merges = R"(["t h", "th e", "i n", "a a", "aa a"])";
  std::string model = R"("type": "BPE",)";
  std::string pre_tokenizer =
      R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": true})";
  std::string normalizer = "null";
  std::string added = "[]";
  std::string decoder = R"({"type": "ByteLevel"})";

  std::string json() const {
    std::string bytes;
    for (int byte = 0; byte < 256; ++byte) {
      bytes += '"';
      if (byte == '"' || byte == '\\') bytes += '\\';
      append_utf8(bytes, byte_level_code_point(static_cast<uint8_t>(byte)));
      bytes += fmt::format("\": {}, ", byte);
    }
    return fmt::format(
        R"({{"added_tokens": {}, "normalizer": {}, "pre_tokenizer": {}, "decoder": {},
             "model": {{{} "vocab": {{{}{}}}, "merges": {}}}}})",
        added, normalizer, pre_tokenizer, decoder, model, bytes, vocab, merges);
  }
  std::unique_ptr<Tokenizer> parse() const { return parse_tokenizer("small.json", json()); }
};

Ids bytes_of(std::string_view text) {
  Ids ids;
  for (const char c : text) ids.push_back(static_cast<uint8_t>(c));
  return ids;
}

std::string message_of(const Parts& parts) {
  try {
    parts.parse();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Tokenizer, merges_the_best_pair_first_in_either_spelling) {
  Parts pairs;
  pairs.merges = R"([["t", "h"], ["th", "e"], ["i", "n"], ["a", "a"], ["aa", "a"]])";
  for (const auto& tokenizer : {Parts().parse(), pairs.parse()}) {
    EXPECT_EQ(tokenizer->encode("the thin", kAsText), (Ids{257, ' ', 256, 258}));
    EXPECT_EQ(tokenizer->encode("aaaaa", kAsText), (Ids{260, 261}));
    EXPECT_EQ(tokenizer->encode("whole", kAsText), bytes_of("whole"));
  }
}

TEST(Tokenizer, ignore_merges_takes_whole_entries) {
  Parts parts;
  parts.model = R"("ignore_merges": true, )";
  EXPECT_EQ(parts.parse()->encode("whole wholes", kAsText),
            (Ids{259, ' ', 'w', 'h', 'o', 'l', 'e', 's'}));
}

TEST(Tokenizer, settings_without_effect_are_accepted) {
  Parts parts;
  parts.model = R"("dropout": 0, "unk_token": "the", "fuse_unk": true, "byte_fallback": false,
                   "continuing_subword_prefix": "", "end_of_word_suffix": null, )";
  parts.decoder = R"({"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Fuse"}]})";
  EXPECT_EQ(parts.parse()->encode("the", kAsText), Ids{257});
}

// Short pieces are scanned, long ones use a heap; both must match the definition.
TEST(Tokenizer, pieces_of_any_length_merge_alike) {
  const std::vector<std::pair<std::string, std::string>> merges = {
      {"a", "b"}, {"b", "a"}, {"ab", "a"}, {"a", "a"}, {"ba", "b"}, {"aa", "ab"}, {"ab", "ab"}};
  Parts parts;
  std::map<std::string, int32_t> ids = {{"a", 'a'}, {"b", 'b'}};
  parts.vocab = parts.merges = "";
  for (const auto& [left, right] : merges) {
    const auto id = static_cast<int32_t>(254 + ids.size());
    if (ids.emplace(left + right, id).second) {
      parts.vocab += fmt::format("{}\"{}\": {}", parts.vocab.empty() ? "" : ", ", left + right, id);
    }
    parts.merges +=
        fmt::format("{}[\"{}\", \"{}\"]", parts.merges.empty() ? "" : ", ", left, right);
  }
  parts.merges = "[" + parts.merges + "]";
  const auto tokenizer = parts.parse();
  Rng rng(5);
  for (int round = 0; round < 400; ++round) {
    std::vector<std::string> symbols;
    std::string text;
    for (uint64_t i = rng.below(150) + 1; i > 0; --i) {
      symbols.emplace_back(rng.below(2) == 0 ? "a" : "b");
      text += symbols.back();
    }
    for (size_t rank = 0; rank < merges.size();) {
      const auto& [left, right] = merges[rank++];
      for (size_t i = 0; i + 1 < symbols.size(); ++i) {
        if (symbols[i] != left || symbols[i + 1] != right) continue;
        symbols[i] = left + right;
        symbols.erase(symbols.begin() + static_cast<ptrdiff_t>(i) + 1);
        rank = 0;  // the new symbol may allow a better merge
        break;
      }
    }
    Ids expected;
    for (const std::string& symbol : symbols) expected.push_back(ids.at(symbol));
    ASSERT_EQ(tokenizer->encode(text, kAsText), expected) << text;
  }
}

std::vector<std::string> split(const SplitRule& rule, std::string_view text) {
  PreTokenizer pre_tokenizer;
  pre_tokenizer.add_split("rule", rule);
  std::deque<std::string> storage;
  std::vector<std::string> pieces;
  for (const std::string_view piece : pre_tokenizer.split(text, storage))
    pieces.emplace_back(piece);
  return pieces;
}

TEST(PreTokenizer, every_behavior_both_ways) {
  using Pieces = std::vector<std::string>;
  using enum SplitBehavior;
  const std::string text = "-a--b-";
  EXPECT_EQ(split({"-", isolated, false}, text), (Pieces{"-", "a", "-", "-", "b", "-"}));
  EXPECT_EQ(split({"-", removed, false}, text), (Pieces{"a", "b"}));
  EXPECT_EQ(split({"-", removed, true}, text), (Pieces{"-", "-", "-", "-"}));
  EXPECT_EQ(split({"-", merged_with_previous, false}, text), (Pieces{"-", "a-", "-", "b-"}));
  EXPECT_EQ(split({"-", merged_with_next, false}, text), (Pieces{"-a", "-", "-b", "-"}));
  EXPECT_EQ(split({"-", contiguous, false}, text), (Pieces{"-", "a", "--", "b", "-"}));
  EXPECT_EQ(split({"-", merged_with_previous, true}, text), (Pieces{"-a", "-", "-b", "-"}));
  EXPECT_EQ(split({"x*", isolated, false}, "axb"), (Pieces{"a", "x", "b"}));
  EXPECT_EQ(split({"-", isolated, false}, ""), Pieces{});
}

TEST(PreTokenizer, reads_patterns_as_oniguruma_does) {
  EXPECT_EQ(to_pcre2("p", R"([^\s\p{L}]+\S)"), R"([^\p{White_Space}\p{L}]+\P{White_Space})");
  EXPECT_EQ(to_pcre2("p", R"(\p{Han}\p{^Lu}\\s[[:alpha:]x])"),
            R"(\p{sc:Han}\p{^Lu}\\s[[:alpha:]x])");
  for (const char* pattern : {R"(\bx)", R"(\h)", "[a&&b]", "[a[b]]", "x{1,3}+", "(?m)a", "(?s:a)",
                              R"([\W])", "(*UTF)a", "[]a]", "\\Qa"}) {
    EXPECT_THROW(to_pcre2("p", pattern), Error) << pattern;
  }
  // Matches too deep for the stack run on the heap.
  const std::string long_text(size_t{1} << 17, 'a');
  EXPECT_EQ(split({"(?:a|b)+"}, long_text), std::vector{long_text});
  // The Mongolian vowel separator is not white space.
  EXPECT_EQ(split({R"(\s+)"}, "a\u180Eb c").size(), 3u);
}

TEST(PreTokenizer, the_work_for_a_text_is_bounded) {
  PreTokenizer hostile;
  // Within the limit of one match at each position, but far beyond the limit of all together.
  hostile.add_split("tok.json: pre_tokenizer", {.pattern = "(?:a|a){22}[bc]"});
  std::deque<std::string> storage;
  try {
    hostile.split(std::string(5000, 'a'), storage);
    FAIL();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_TRUE(message.starts_with("tok.json: pre_tokenizer")) << message;
    EXPECT_NE(message.find("5000 bytes"), std::string::npos) << message;
  }
  // Long runs of white space are what real patterns backtrack over.
  PreTokenizer real;
  real.add_split("tok.json", {.pattern = kGpt2Pattern});
  const std::string spaces(300'000, ' ');
  EXPECT_EQ(real.split(spaces + "a" + spaces + "b", storage).size(), 4u);
}

TEST(Tokenizer, pre_tokenizers_apply_in_order) {
  Parts parts;
  parts.merges = R"(["a a", "aa a"])";
  parts.pre_tokenizer = R"({"type": "Sequence", "pretokenizers": [
      {"type": "Digits", "individual_digits": true},
      {"type": "Split", "pattern": {"String": "."}, "behavior": "Removed", "invert": false},
      {"type": "ByteLevel", "add_prefix_space": true, "use_regex": false}]})";
  EXPECT_EQ(parts.parse()->encode("aa1aa.aa x", kAsText),
            (Ids{' ', 260, ' ', '1', ' ', 260, ' ', 260, ' ', 'x'}));
  parts.pre_tokenizer = R"({"type": "Sequence", "pretokenizers": [{"type": "Digits"}]})";
  EXPECT_EQ(parts.parse()->encode("aa11", kAsText), (Ids{260, '1', '1'}));
  parts.pre_tokenizer = "null";
  EXPECT_EQ(parts.parse()->encode("aa aaa", kAsText), (Ids{260, ' ', 261}));
  // The flags of ByteLevel are on by default.
  parts.pre_tokenizer = R"({"type": "ByteLevel"})";
  EXPECT_EQ(parts.parse()->encode("a", kAsText), (Ids{' ', 'a'}));
}

TEST(Normalizer, composes) {
  EXPECT_EQ(to_nfc("e\u0301"), "\u00E9");
  EXPECT_EQ(to_nfc("a\u0301\u0323"), "\u1EA1\u0301");
  EXPECT_EQ(to_nfc("\u1112\u1161\u11AB"), "\uD55C");
  EXPECT_EQ(to_nfc(std::string_view("a\0\u212B", 5)), std::string_view("a\0\u00C5", 4));
  std::string marks = "a";
  for (int i = 0; i < 200'000; ++i) marks += "\u0301\u0323";
  EXPECT_EQ(to_nfc(marks).substr(0, 3), "\u1EA1");
}

TEST(Tokenizer, normalises_where_the_file_says_so) {
  Parts parts;
  EXPECT_EQ(parts.parse()->encode("e\u0301", kAsText), bytes_of("e\u0301"));
  for (const char* normalizer :
       {R"({"type": "NFC"})", R"({"type": "Sequence", "normalizers": [{"type": "NFC"}]})"}) {
    parts.normalizer = normalizer;
    EXPECT_EQ(parts.parse()->encode("e\u0301", kAsText), bytes_of("\u00E9"));
  }
}

using Sections = std::vector<std::pair<std::string, int32_t>>;

Sections sections_of(std::vector<AddedToken> tokens, std::string_view text, bool nfc = false) {
  Sections sections;
  AddedTokens(std::move(tokens), nfc).split(text, true, [&](std::string_view part, int32_t id) {
    sections.emplace_back(part, id);
  });
  return sections;
}

TEST(AddedTokens, match_leftmost_then_longest) {
  const std::vector<AddedToken> tokens = {{.content = "<a", .id = 1}, {.content = "<ab>", .id = 2}};
  EXPECT_EQ(sections_of(tokens, "x<ab>y<ab<a"),
            (Sections{{"x", -1}, {"<ab>", 2}, {"y", -1}, {"<a", 1}, {"b", -1}, {"<a", 1}}));
  EXPECT_EQ(sections_of({}, "x"), (Sections{{"x", -1}}));
}

TEST(AddedTokens, flags) {
  EXPECT_EQ(sections_of({{.content = "W", .id = 1, .single_word = true}}, "W aW Wb \u00E9W-W"),
            (Sections{{"W", 1}, {" aW Wb \u00E9W-", -1}, {"W", 1}}));
  const AddedToken both{.content = "S", .id = 1, .lstrip = true, .rstrip = true};
  EXPECT_EQ(sections_of({both}, "a \tS\u3000 b S  S"),
            (Sections{{"a", -1}, {" \tS\u3000 ", 1}, {"b", -1}, {" S  ", 1}, {"S", 1}}));
  const AddedToken raw{.content = "e\u0301", .id = 1};
  AddedToken normalized = raw;
  normalized.normalized = true;
  EXPECT_EQ(sections_of({raw}, "\u00E9e\u0301", true), (Sections{{"\u00E9", -1}, {"e\u0301", 1}}));
  EXPECT_EQ(sections_of({normalized}, "\u00E9e\u0301", true),
            (Sections{{"\u00E9", 1}, {"\u00E9", 1}}));
}

TEST(Tokenizer, only_trusted_text_becomes_special_tokens) {
  Parts parts;
  parts.added = R"([{"id": 300, "content": "<s>", "special": true},
                    {"id": 301, "content": "<n>", "special": false, "normalized": false},
                    {"id": 301, "content": "<n>"}, {"id": 302, "content": ""}])";
  const auto tokenizer = parts.parse();
  EXPECT_EQ(tokenizer->encode("<s><n>", kRecognise), (Ids{300, 301}));
  EXPECT_EQ(tokenizer->encode("<s><n>", kAsText), (Ids{'<', 's', '>', 301}));
  EXPECT_TRUE(tokenizer->is_special(300));
  EXPECT_FALSE(tokenizer->is_special(301));
  EXPECT_FALSE(tokenizer->is_special(-1));
  EXPECT_EQ(tokenizer->vocab_size(), 302);
  EXPECT_EQ(tokenizer->token_id("<s>"), 300);
  EXPECT_EQ(tokenizer->token_id("the"), 257);
  EXPECT_EQ(tokenizer->token_id("\u0120"), ' ');
  EXPECT_EQ(tokenizer->token_id(" "), std::nullopt);
  EXPECT_EQ(tokenizer->decode(Ids{300, 257, 301}), "<s>the<n>");
  for (const int32_t id : {-1, 299, 302, INT32_MAX, INT32_MIN}) {
    EXPECT_THROW(tokenizer->decode(Ids{id}), Error) << id;
  }
  // Nor as a whole vocabulary entry.
  parts.model = R"("ignore_merges": true, )";
  parts.added = R"([{"id": 259, "content": "whole", "special": true}])";
  EXPECT_EQ(parts.parse()->encode("whole", kRecognise), Ids{259});
  EXPECT_EQ(parts.parse()->encode("whole", kAsText), bytes_of("whole"));
}

TEST(Tokenizer, any_bytes_come_back) {
  Parts parts;
  parts.normalizer = R"({"type": "NFC"})";
  const auto tokenizer = parts.parse();
  for (const std::string& text :
       {std::string(), std::string("a\0b", 3), std::string("\xFF\xFEthe\xC3"),
        std::string("\xED\xA0\x80 the \xF4\x90\x80\x80"), std::string("\xC0\x80\xE2\x82")}) {
    EXPECT_EQ(tokenizer->decode(tokenizer->encode(text, kRecognise)), text);
  }
  EXPECT_EQ(tokenizer->encode("\xFFthe", kRecognise), (Ids{0xFF, 257}));
}

// A vocabulary without bytes that hardly any text has, such as SmolLM's; the tokenizers library
// leaves them out of the text in the same way.
TEST(Tokenizer, a_byte_without_a_token_is_left_out_where_hardly_any_text_has_it) {
  const auto without = [](uint8_t byte, const std::string& model) {
    Parts parts;
    parts.model = model;
    parts.pre_tokenizer = R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false})";
    std::string entry = "\"", json = parts.json();
    append_utf8(entry, byte_level_code_point(byte));
    entry += fmt::format("\": {}, ", byte);
    json.erase(json.find(entry), entry.size());
    return parse_tokenizer("small.json", json);
  };
  EXPECT_EQ(without(4, "")->encode("t\x04he", kRecognise), Ids{257});
  EXPECT_EQ(without(0xF1, "")->encode("\xF1\x80\x80\x80", kRecognise), (Ids{0x80, 0x80, 0x80}));
  for (const auto& [byte, model] : std::vector<std::pair<uint8_t, std::string>>{
           {'\n', ""}, {'a', ""}, {0xF0, ""}, {4, R"("unk_token": "the", )"}}) {
    EXPECT_THROW(without(byte, model), Error) << int{byte};
  }
}

TEST(IncrementalDecoder, gives_out_whole_characters) {
  const auto tokenizer = make_byte_tokenizer();
  IncrementalDecoder decoder(*tokenizer);
  const auto push = [&](std::string_view bytes) {
    std::string text;
    for (const int32_t id : bytes_of(bytes)) text += decoder.push(id);
    return text;
  };
  EXPECT_EQ(push("\xF0\x9F\x98"), "");
  EXPECT_EQ(push("\x80!"), "\U0001F600!");
  EXPECT_EQ(push("\xE2\x82"), "");
  EXPECT_EQ(push("a"), "\uFFFDa");  // nothing can complete it now
  EXPECT_EQ(push("\xFF\x80"), "\uFFFD\uFFFD");
  EXPECT_EQ(push("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD");  // half a surrogate pair
  EXPECT_EQ(decoder.finish(), "");
  EXPECT_EQ(push("\xE2\x82"), "");
  EXPECT_EQ(decoder.finish(), "\uFFFD");
  EXPECT_EQ(decoder.finish(), "");
}

TEST(ByteTokenizer, one_token_per_byte) {
  const auto tokenizer = make_byte_tokenizer();
  const std::string text("a\0\xFF", 3);
  EXPECT_EQ(tokenizer->encode(text, kRecognise), (Ids{'a', 0, 255}));
  EXPECT_EQ(tokenizer->decode(Ids{'a', 0, 255}), text);
  EXPECT_EQ(tokenizer->token_id("\xFF"), 255);
  EXPECT_EQ(tokenizer->vocab_size(), 256);
  EXPECT_THROW(tokenizer->decode(Ids{256}), Error);
}

struct Refusal {
  std::string Parts::*part;
  const char* value;
  const char* words;
};

TEST(Tokenizer, refuses_naming_file_and_key) {
  const std::vector<Refusal> refusals = {
      {&Parts::model, R"("type": "Unigram",)", "model.type: 'Unigram'"},
      {&Parts::model, R"("type": 1,)", "model.type: must be a string"},
      {&Parts::model, R"("byte_fallback": true,)", "model.byte_fallback"},
      {&Parts::model, R"("ignore_merges": 1,)", "model.ignore_merges: must be true or false"},
      {&Parts::model, R"("dropout": 0.1,)", "model.dropout"},
      {&Parts::model, R"("dropout": "x",)", "model.dropout: must be a number"},
      {&Parts::model, R"("continuing_subword_prefix": "##",)", "model.continuing_subword_prefix"},
      {&Parts::model, R"("end_of_word_suffix": "</w>",)", "model.end_of_word_suffix"},
      {&Parts::vocab, R"("th": -1)", "model.vocab['th']: the id -1"},
      {&Parts::vocab, R"("th": 2147483647)", "model.vocab['th']: the id 2147483647"},
      {&Parts::vocab, R"("th": 99999999999)", "model.vocab['th']: must be an id"},
      {&Parts::vocab, R"("th": 1.5)", "model.vocab['th']: must be an id"},
      {&Parts::vocab, R"("th": 65)", "model.vocab['th']: the id 65 is taken"},
      {&Parts::vocab, R"("th": 256, "th": 257)", "names the token 'th' twice"},
      {&Parts::merges, R"({})", "model.merges: must be an array"},
      {&Parts::merges, R"(null)", "model.merges: is missing"},
      {&Parts::merges, R"(["t h", "th x"])", "model.merges[1]: the token 'thx' is not"},
      {&Parts::merges, R"(["xx h"])", "model.merges[0]: the token 'xx' is not"},
      {&Parts::merges, R"(["t h e"])", "model.merges[0]: must be"},
      {&Parts::merges, R"([["t"]])", "model.merges[0]: must be"},
      {&Parts::normalizer, R"({"type": "NFKC"})", "normalizer.type: 'NFKC'"},
      {&Parts::normalizer, R"({"type": "Sequence", "normalizers": [{"type": "Strip"}]})",
       "normalizer.normalizers[0].type: 'Strip'"},
      {&Parts::normalizer, R"("NFC")", "normalizer: must be an object"},
      {&Parts::pre_tokenizer, R"({"type": "Metaspace"})", "pre_tokenizer.type: 'Metaspace'"},
      {&Parts::pre_tokenizer, R"({})", "pre_tokenizer.type: is missing"},
      {&Parts::pre_tokenizer, R"({"type": "Sequence"})", "pre_tokenizer.pretokenizers: is missing"},
      {&Parts::pre_tokenizer,
       R"({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Digits"}]})",
       "pre_tokenizer.pretokenizers[1]: 'Digits' after ByteLevel"},
      {&Parts::pre_tokenizer,
       R"({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated"})",
       "pre_tokenizer.pattern: missing closing parenthesis"},
      {&Parts::pre_tokenizer, R"({"type": "Split", "pattern": "x", "behavior": "Isolated"})",
       "pre_tokenizer.pattern: must be an object"},
      {&Parts::pre_tokenizer,
       R"({"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Other"})",
       "pre_tokenizer.behavior: 'Other'"},
      {&Parts::decoder, "null", "decoder: has no ByteLevel"},
      {&Parts::decoder, R"({"type": "Metaspace"})", "decoder.type: 'Metaspace'"},
      {&Parts::added, R"({})", "added_tokens: must be an array"},
      {&Parts::added, R"([{"id": 300}])", "added_tokens[0].content: is missing"},
      {&Parts::added, R"([{"content": "x"}])", "added_tokens[0].id: must be an id"},
      {&Parts::added, R"([{"content": "x", "id": -3}])", "added_tokens[0].id: -3 is outside"},
      {&Parts::added, R"([{"content": "<x>", "id": 65}])", "65 is taken by another token"},
      {&Parts::added, R"([{"content": "<x>", "id": 300}, {"content": "<y>", "id": 300}])",
       "added_tokens['<y>'].id: 300 is taken"},
      {&Parts::added, R"([{"content": "<x>", "id": 300}, {"content": "<x>", "id": 301}])",
       "added_tokens[1].id: '<x>' has another id"},
      {&Parts::added, R"([{"content": "the", "id": 300}])", "but model.vocab says 257"},
      {&Parts::added, R"([{"content": "the", "id": 257, "special": true}])",
       "model.merges[1] makes the special token 257"},
      {&Parts::added, R"([{"content": "a", "id": 97, "special": true}])", "is also the byte 0x61"},
  };
  for (const Refusal& refusal : refusals) {
    Parts parts;
    parts.*refusal.part = refusal.value;
    if (refusal.part == &Parts::vocab) parts.merges = "[]";
    const std::string message = message_of(parts);
    EXPECT_TRUE(message.starts_with("small.json: ")) << message;
    EXPECT_NE(message.find(refusal.words), std::string::npos) << message << "\n" << refusal.words;
  }
}

TEST(Tokenizer, refuses_what_is_no_tokenizer) {
  std::string deep = R"({"type": "NFC"})";
  for (int i = 0; i < 20; ++i) deep = R"({"type": "Sequence", "normalizers": [)" + deep + "]}";
  Parts nested;
  nested.normalizer = deep;
  EXPECT_NE(message_of(nested).find("nested too deep"), std::string::npos);
  for (const char* json :
       {"", "[]", "{}", "{", R"({"model": 3, "decoder": {"type": "ByteLevel"}})",
        R"({"model": {}, "decoder": {"type": "ByteLevel"}})",
        R"({"model": {"vocab": {}, "merges": []}, "decoder": {"type": "ByteLevel"}})"}) {
    EXPECT_THROW(parse_tokenizer("small.json", json), Error) << json;
  }
  EXPECT_THROW(load_tokenizer("no/such/tokenizer.json"), Error);
}

}  // namespace
}  // namespace leeway
