// Properties that hold for every value, tried on values that RapidCheck makes up and shrinks when
// one fails. The seed is fixed; RC_PARAMS="seed=7 max_success=10000" tries others.

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "base/crc32c.h"
#include "base/json.h"
#include "base/utf8.h"
#include "model/safetensors.h"
#include "model/test_files.h"
#include "text/tokenizer.h"

namespace leeway {
namespace {

template <class Property>
void expect_always(const std::string& what, Property property) {
  ::setenv("RC_PARAMS", "seed=1 max_success=500", 0);  // read at the first check of a process
  EXPECT_TRUE(rc::check(what, property));
}

// Any bytes, half of the time with letters that need escapes or several bytes.
rc::Gen<std::string> any_text() {
  const auto odd = rc::gen::element<std::string>("\"", "\\", "\n", "\x7f", "</script>", "\u00e9",
                                                 "\u4e2d", "\U0001F600", "\u2028", "=", "#", "'");
  const auto pieces = rc::gen::container<std::vector<std::string>>(
      rc::gen::oneOf(odd, rc::gen::container<std::string>(rc::gen::inRange<char>(' ', '~'))));
  return rc::gen::map(pieces, [](const std::vector<std::string>& parts) {
    return std::accumulate(parts.begin(), parts.end(), std::string());
  });
}

TEST(Property, JsonTextIsReadAsItWasWritten) {
  expect_always("text comes back from JSON", [] {
    const std::string text = *any_text();
    JsonWriter json;
    json.begin_array().value(text).end_array();
    const rapidjson::Document read = parse_json("text", json.text());
    RC_ASSERT((std::string{read[0].GetString(), read[0].GetStringLength()} == text));
  });
}

TEST(Property, JsonNumbersAreReadAsTheyWereWritten) {
  expect_always("a double comes back from JSON", [] {
    const double number = std::bit_cast<double>(*rc::gen::arbitrary<uint64_t>());
    RC_PRE(std::isfinite(number));
    JsonWriter json;
    json.begin_array().value(number).end_array();
    RC_ASSERT(parse_json("number", json.text())[0].GetDouble() == number);
  });
  expect_always("a float comes back from JSON", [] {
    const float number = std::bit_cast<float>(*rc::gen::arbitrary<uint32_t>());
    RC_PRE(std::isfinite(number));
    JsonWriter json;
    json.begin_array().value(number).end_array();
    RC_ASSERT(static_cast<float>(parse_json("number", json.text())[0].GetDouble()) == number);
  });
}

TEST(Property, AChecksumOfPartsIsThatOfTheWhole) {
  expect_always("crc32c(b, crc32c(a)) is crc32c(a + b)", [] {
    const std::string a = *rc::gen::arbitrary<std::string>();
    const std::string b = *rc::gen::arbitrary<std::string>();
    RC_ASSERT(crc32c(b, crc32c(a)) == crc32c(a + b));
    if (!b.empty()) {
      std::string other = b;
      other[*rc::gen::inRange<size_t>(0, b.size())] ^= 1;
      RC_ASSERT(crc32c(other) != crc32c(b));
    }
  });
}

TEST(Property, AValidPrefixOfUtf8IsValidAndTheLongest) {
  expect_always("what is valid stays valid", [] {
    const std::string text = *any_text();
    const std::string bytes = text + *rc::gen::arbitrary<std::string>();
    const size_t valid = valid_utf8_prefix(bytes);
    RC_ASSERT(valid >= text.size());
    RC_ASSERT(valid <= bytes.size());
    RC_ASSERT(valid_utf8_prefix(bytes.substr(0, valid)) == valid);
  });
}

TEST(Property, TokensOfBytesSpellTheBytes) {
  const std::unique_ptr<Tokenizer> tokenizer = make_byte_tokenizer();
  expect_always("bytes come back from tokens", [&] {
    const std::string bytes = *rc::gen::arbitrary<std::string>();
    RC_ASSERT(tokenizer->decode(tokenizer->encode(bytes, SpecialTokens::as_text)) == bytes);
  });
}

TEST(Property, TensorsAreReadAsTheyWereWritten) {
  const testing::TestFolder folder;
  expect_always("every bit of a tensor comes back", [&] {
    const auto bits = *rc::gen::container<std::vector<uint32_t>>(rc::gen::arbitrary<uint32_t>());
    RC_PRE(!bits.empty());
    std::vector<float> values(bits.size());
    std::transform(bits.begin(), bits.end(), values.begin(),
                   [](uint32_t one) { return std::bit_cast<float>(one); });
    const std::string name = "t" + *any_text();
    const auto size = static_cast<int64_t>(values.size());
    write_safetensors(folder.at("x"), std::vector<TensorToSave>{{name, {size}, values}});
    const SafetensorsFile file(folder.at("x"));
    const StoredTensor* tensor = file.find(name);
    RC_ASSERT(tensor != nullptr);
    std::vector<float> read(values.size());
    copy_as_float(*tensor, "x", read);
    for (size_t i = 0; i < read.size(); ++i) RC_ASSERT(std::bit_cast<uint32_t>(read[i]) == bits[i]);
  });
}

}  // namespace
}  // namespace leeway
