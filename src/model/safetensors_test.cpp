// Reading, refusing and writing files. Refused files are built byte by byte; files that are read
// are compared with those of the reference implementation.

#include "model/safetensors.h"

#include <sys/stat.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "base/rng.h"
#include "model/test_files.h"

namespace leeway {
namespace {

using testing::as_bytes;
using testing::bytes_of;
using testing::expect_refused;
using testing::kGoldens;
using testing::raw_safetensors;
using testing::safetensors_of;
using testing::TestFolder;

std::vector<float> floats_of(const SafetensorsFile& file, const std::string& name) {
  const StoredTensor* tensor = file.find(name);
  if (tensor == nullptr) throw std::runtime_error("no tensor " + name);
  std::vector<float> values(static_cast<size_t>(tensor->size()));
  copy_as_float(*tensor, file.path(), values);
  return values;
}

std::vector<int64_t> ids_of(const SafetensorsFile& file, const std::string& name) {
  const StoredTensor* tensor = file.find(name);
  EXPECT_EQ(tensor->dtype, DType::i64);
  std::vector<int64_t> values(static_cast<size_t>(tensor->size()));
  const std::string bytes = tensor->bytes();
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// ---------------------------------------------------------------------------------------------
// Reading

TEST(Safetensors, GoldenFilesHoldWhatTheirTensorsMean) {
  for (const char* golden : {"/qwen3-tied", "/llama3-rope"}) {
    const SafetensorsFile file(kGoldens + golden + "/golden.safetensors");
    const std::vector<int64_t> ids = ids_of(file, "input_ids"), greedy = ids_of(file, "greedy");
    const std::vector<float> logits = floats_of(file, "logits");
    const std::vector<float> logprobs = floats_of(file, "logprobs");
    EXPECT_EQ(file.find("input_ids")->shape, (std::vector<int64_t>{2, 96}));
    EXPECT_EQ(file.find("greedy")->shape, (std::vector<int64_t>{2, 64}));
    EXPECT_EQ(file.find("logits")->shape, (std::vector<int64_t>{2, 96, 320}));
    for (size_t s = 0; s < 2; ++s) {
      for (size_t t = 0; t < 16; ++t) EXPECT_EQ(greedy[s * 64 + t], ids[s * 96 + t]);
      // Each logprob follows from the logits: both tensors are where the header says.
      for (size_t t = 0; t < 95; ++t) {
        const float* row = &logits[(s * 96 + t) * 320];
        double sum = 0.0;
        for (size_t v = 0; v < 320; ++v) sum += std::exp(static_cast<double>(row[v]));
        const int64_t next = ids[s * 96 + t + 1];
        ASSERT_TRUE(next >= 0 && next < 320);
        EXPECT_NEAR(logprobs[s * 95 + t], row[next] - std::log(sum), 1e-5) << s << " " << t;
      }
    }
  }
}

TEST(Safetensors, GoldenTensorsCoverTheFileInOrder) {
  const std::string path = kGoldens + "/qwen3-tied/model.safetensors";
  const SafetensorsFile file(path);
  EXPECT_EQ(file.path(), path);
  EXPECT_EQ(file.tensors().size(), 35u);
  const std::string bytes = bytes_of(path);
  size_t total = 0;
  for (const StoredTensor& tensor : file.tensors()) {
    EXPECT_EQ(file.find(tensor.name), &tensor);
    EXPECT_EQ(tensor.bytes(), bytes.substr(8 + 3600 + total, tensor.byte_size()));
    total += tensor.byte_size();
  }
  EXPECT_EQ(8 + 3600 + total, bytes.size());
  EXPECT_EQ(file.find("model.norm"), nullptr);
  EXPECT_EQ(file.find("__metadata__"), nullptr);
}

TEST(Safetensors, EveryDtypeIsReadWithItsSize) {
  const std::vector<std::pair<std::string, size_t>> kinds = {
      {"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8},
      {"I32", 4}, {"I16", 2}, {"I8", 1},  {"U8", 1},   {"BOOL", 1}};
  const TestFolder folder;
  for (const auto& [name, size] : kinds) {
    SCOPED_TRACE(name);
    const std::string path =
        folder.write("one", safetensors_of({{"x", name, {2, 3}, std::string(6 * size, '\1')}}));
    const SafetensorsFile file(path);
    ASSERT_EQ(file.tensors().size(), 1u);
    EXPECT_EQ(name_of(file.tensors()[0].dtype), name);
    EXPECT_EQ(size_of(file.tensors()[0].dtype), size);
    EXPECT_EQ(file.tensors()[0].size(), 6);
    std::vector<float> values(6);
    if (name.find('F') != std::string::npos) {
      copy_as_float(file.tensors()[0], path, values);
    } else {
      expect_refused([&] { copy_as_float(file.tensors()[0], path, values); },
                     {path, "\"x\"", name, "F32"});
    }
  }
}

TEST(Safetensors, AFileThatShrinksWhileItIsOpenIsAnError) {
  const TestFolder folder;
  const std::vector<std::pair<std::string, size_t>> kinds = {{"F32", 4}, {"BF16", 2}, {"F64", 8}};
  for (const auto& [kind, size] : kinds) {
    SCOPED_TRACE(kind);
    const size_t count = 500'000;
    const std::string path = folder.write(
        kind, safetensors_of({{"x", kind, {int64_t{count}}, std::string(count * size, '\1')}}));
    const SafetensorsFile file(path);
    std::filesystem::resize_file(path, count * size / 2);
    std::vector<float> values(count);
    expect_refused([&] { copy_as_float(file.tensors()[0], path, values); }, {path, "truncated"});
    std::filesystem::resize_file(path, 0);
    expect_refused([&] { file.tensors()[0].bytes(); }, {path, "truncated"});
  }
}

TEST(Safetensors, ScalarsAndTensorsWithoutElementsAreFine) {
  const TestFolder folder;
  const SafetensorsFile file(
      folder.write("x", safetensors_of({{"none", "F32", {0, 5}, ""},
                                        {"scalar", "F32", {}, as_bytes<float>({2.5f})},
                                        {"huge none", "F32", {int64_t{1} << 40, 0, 8}, ""}})));
  ASSERT_EQ(file.tensors().size(), 3u);
  EXPECT_EQ(file.find("none")->size(), 0);
  EXPECT_EQ(file.find("huge none")->size(), 0);
  EXPECT_TRUE(floats_of(file, "none").empty());
  EXPECT_EQ(floats_of(file, "scalar"), std::vector<float>{2.5f});
  const SafetensorsFile nothing(folder.write("y", raw_safetensors("{}", "")));
  EXPECT_TRUE(nothing.tensors().empty());
}

TEST(Safetensors, MetadataAndSpacesAfterTheHeaderAreIgnored) {
  const TestFolder folder;
  const std::string header =
      R"({"__metadata__": {"format": "pt", "x": "{"}, "a": {"data_offsets": [0, 2], "extra": [],
      "dtype": "U8", "shape": [2]}}     )";
  const SafetensorsFile file(folder.write("x", raw_safetensors(header, "hi")));
  ASSERT_EQ(file.tensors().size(), 1u);
  EXPECT_EQ(file.tensors()[0].bytes(), "hi");
}

TEST(Safetensors, TheHeaderMayNameTensorsInAnyOrder) {
  const TestFolder folder;
  const std::string header = R"({"late": {"dtype": "U8", "shape": [1], "data_offsets": [2, 3]},
      "early": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}})";
  const SafetensorsFile file(folder.write("x", raw_safetensors(header, "abc")));
  EXPECT_EQ(file.tensors()[0].name, "early");
  EXPECT_EQ(file.tensors()[1].name, "late");
  EXPECT_EQ(file.find("late")->bytes(), "c");
}

TEST(Safetensors, AFileThatIsReplacedStaysReadableWhereItIsMapped) {
  const TestFolder folder;
  const std::vector<float> old_values(5000, 1.0f), new_values(5000, 2.0f);
  write_safetensors(folder.at("x"), std::vector<TensorToSave>{{"a", {5000}, old_values}});
  SafetensorsFile file(folder.at("x"));
  write_safetensors(folder.at("x"), std::vector<TensorToSave>{{"a", {5000}, new_values}});
  EXPECT_EQ(floats_of(file, "a"), old_values);
  file = SafetensorsFile(folder.at("x"));
  EXPECT_EQ(floats_of(file, "a"), new_values);
}

// ---------------------------------------------------------------------------------------------
// Conversion

// By the definition of the format: fraction and power of two.
double value_of_bits(uint32_t bits, int exponent_bits, int fraction_bits) {
  const int exponent_mask = (1 << exponent_bits) - 1, bias = exponent_mask >> 1;
  const int exponent = static_cast<int>(bits >> fraction_bits) & exponent_mask;
  const double fraction = static_cast<double>(bits & ((1u << fraction_bits) - 1));
  const double sign = (bits >> (exponent_bits + fraction_bits)) & 1 ? -1.0 : 1.0;
  if (exponent == exponent_mask) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity() : std::nan("");
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  return sign *
         std::ldexp(fraction + std::ldexp(1.0, fraction_bits), exponent - bias - fraction_bits);
}

TEST(CopyAsFloat, IsExactForEveryHalfPrecisionNumber) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const TestFolder folder;
  const SafetensorsFile file(folder.write("x", safetensors_of({
                                                   {"f16", "F16", {65536}, as_bytes(all)},
                                                   {"bf16", "BF16", {256, 256}, as_bytes(all)},
                                               })));
  const std::vector<float> f16 = floats_of(file, "f16"), bf16 = floats_of(file, "bf16");
  for (uint32_t i = 0; i < 65536; ++i) {
    for (const bool brain : {false, true}) {
      const float got = brain ? bf16[i] : f16[i];
      const double expected = brain ? value_of_bits(i, 8, 7) : value_of_bits(i, 5, 10);
      ASSERT_EQ(std::isnan(got), std::isnan(expected)) << i << " " << brain;
      ASSERT_EQ(std::signbit(got), i >= 32768) << i << " " << brain;
      if (!std::isnan(expected)) {
        ASSERT_EQ(static_cast<double>(got), expected) << i << " " << brain;
      }
    }
  }
}

TEST(CopyAsFloat, RoundsDoublesAndKeepsFloatBits) {
  const double kTiny = std::numeric_limits<double>::denorm_min();
  const std::vector<double> doubles = {0.1, -0.0, 1e300, kTiny, 1.0 + 0x1p-25, INFINITY};
  std::vector<uint32_t> bits;
  Rng rng(5);
  for (int i = 0; i < 1000; ++i) bits.push_back(static_cast<uint32_t>(rng.next()));
  const TestFolder folder;
  // Starts with one byte, so that nothing is aligned.
  const SafetensorsFile file(
      folder.write("x", safetensors_of({{"odd", "U8", {1}, "x"},
                                        {"f64", "F64", {6}, as_bytes(doubles)},
                                        {"f32", "F32", {1000}, as_bytes(bits)}})));
  const std::vector<float> rounded = floats_of(file, "f64"), same = floats_of(file, "f32");
  EXPECT_EQ(rounded, (std::vector<float>{0.1f, -0.0f, INFINITY, 0.0f, 1.0f, INFINITY}));
  EXPECT_EQ(std::memcmp(same.data(), bits.data(), 4000), 0);
}

// ---------------------------------------------------------------------------------------------
// Refusals

struct Row {
  std::string name, header, data;
  std::vector<std::string> words;  // expected in the message, besides the path
};
void PrintTo(const Row& row, std::ostream* stream) { *stream << row.name; }
std::string row_name(const ::testing::TestParamInfo<Row>& info) { return info.param.name; }

class BadSafetensors : public ::testing::TestWithParam<Row> {};

TEST_P(BadSafetensors, IsRefusedWithFileAndTensor) {
  const TestFolder folder;
  const std::string path =
      folder.write("bad.safetensors", raw_safetensors(GetParam().header, GetParam().data));
  std::vector<std::string> words = GetParam().words;
  words.push_back(path);
  expect_refused([&] { SafetensorsFile file(path); }, words);
}

// A header with one tensor "w".
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"w": {"dtype": ")" + dtype + R"(", "shape": )" + shape + R"(, "data_offsets": )" +
         offsets + "}}";
}
// A header with two tensors of two bytes each.
std::string two(const std::string& first, const std::string& second) {
  return R"({"a": {"dtype": "U8", "shape": [2], "data_offsets": )" + first +
         R"(}, "b": {"dtype": "U8", "shape": [2], "data_offsets": )" + second + "}}";
}

const std::vector<Row> kRows = {
    {"AnEmptyHeader", "", "", {"does not start with {"}},
    {"AListForTheHeader", "[]", "", {"does not start with {"}},
    {"ASpaceBeforeTheHeader", " {}", "", {"does not start with {"}},
    {"NoJson", "{\"w\": }", "", {"line 1, column 7"}},
    {"TextAfterTheHeader", "{} x", "", {"line 1, column 4"}},
    {"ANulByte", std::string("{}\0", 3), "", {"NUL"}},
    {"BytesThatAreNoUtf8", "{\"\xFF\": 1}", "", {"byte 2", "UTF-8"}},
    {"ACutOffCharacter", "{\"\xE2\x82", "", {"UTF-8"}},
    {"MetadataThatIsNoObject", R"({"__metadata__": 3})", "", {"__metadata__"}},
    {"ATensorThatIsNoObject", R"({"w": [1]})", "", {"\"w\"", "must be an object"}},
    {"ANameTwice",
     R"({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
         "w": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}})",
     "ab",
     {"\"w\"", "twice"}},
    {"ADtypeTwice",
     R"({"w": {"dtype": "U8", "dtype": "I8", "shape": [1], "data_offsets": [0, 1]}})",
     "a",
     {"\"w\"", "dtype is given twice"}},
    {"NoDtype", R"({"w": {"shape": [1], "data_offsets": [0, 1]}})", "a", {"dtype is missing"}},
    {"NoShape", R"({"w": {"dtype": "U8", "data_offsets": [0, 1]}})", "a", {"shape is missing"}},
    {"NoOffsets", R"({"w": {"dtype": "U8", "shape": [1]}})", "a", {"data_offsets is missing"}},
    {"AnUnknownDtype", one("F8_E4M3", "[1]", "[0, 1]"), "a", {"\"w\"", "\"F8_E4M3\""}},
    {"ALowerCaseDtype", one("f32", "[1]", "[0, 4]"), "abcd", {"\"f32\""}},
    {"ANumberForDtype",
     R"({"w": {"dtype": 3, "shape": [1], "data_offsets": [0, 1]}})",
     "a",
     {"dtype must be a string"}},
    {"ANumberForShape", one("U8", "1", "[0, 1]"), "a", {"shape must be a list"}},
    {"ANegativeShape", one("U8", "[-1]", "[0, 1]"), "a", {"\"w\"", "nonnegative"}},
    {"TwoNegativesInShape", one("U8", "[-1, -1]", "[0, 1]"), "a", {"nonnegative"}},
    {"AFractionInShape", one("U8", "[1.0]", "[0, 1]"), "a", {"nonnegative integers"}},
    {"AShapeBeyondIntegers", one("U8", "[9223372036854775808]", "[0, 1]"), "a", {"integers"}},
    {"AShapeThatOverflows", one("F32", "[4294967296, 4294967296]", "[0, 0]"), "", {"larger"}},
    {"AShapeThatOverflowsByItsDtype",
     one("F64", "[2305843009213693952]", "[0, 0]"),
     "",
     {"larger"}},
    {"AShapeThatWrapsToItsSize", one("U8", "[4294967296, 4294967297]", "[0, 1]"), "a", {"larger"}},
    {"TooFewBytes", one("F32", "[2]", "[0, 4]"), "abcd", {"span 4 bytes", "need 8"}},
    {"TooManyBytes", one("F32", "[1]", "[0, 8]"), "abcdefgh", {"span 8 bytes", "need 4"}},
    {"BytesForNoElements", one("F32", "[0]", "[0, 4]"), "abcd", {"span 4 bytes", "need 0"}},
    {"OffsetsOutOfTheFile", one("F32", "[2]", "[0, 8]"), "abcd", {"[0, 8]", "4 bytes"}},
    {"OffsetsThatWrap", one("U8", "[1]", "[18446744073709551615, 0]"), "a", {"data_offsets"}},
    {"OffsetsBackwards", one("U8", "[1]", "[1, 0]"), "a", {"[1, 0]"}},
    {"NegativeOffsets", one("U8", "[1]", "[-1, 0]"), "a", {"nonnegative"}},
    {"OneOffset", one("U8", "[1]", "[0]"), "a", {"two nonnegative integers"}},
    {"ThreeOffsets", one("U8", "[1]", "[0, 1, 1]"), "a", {"two nonnegative integers"}},
    {"AFractionInOffsets", one("U8", "[1]", "[0, 1.0]"), "a", {"two nonnegative integers"}},
    {"AHoleAtTheStart", one("U8", "[1]", "[1, 2]"), "ab", {"bytes 0 to 1", "no tensor"}},
    {"AHole", two("[0, 2]", "[3, 5]"), "abcde", {"\"b\"", "bytes 2 to 3", "no tensor"}},
    {"AnOverlap", two("[0, 2]", "[1, 3]"), "abc", {"\"b\"", "overlaps \"a\""}},
    {"TheSameBytesTwice", two("[0, 2]", "[0, 2]"), "ab", {"\"b\"", "overlaps \"a\""}},
    {"BytesAfterTheLast", two("[0, 2]", "[2, 4]"), "abcdef", {"2 bytes after the last"}},
    {"DataWithoutTensors", "{}", "abc", {"3 bytes after"}},
};
INSTANTIATE_TEST_SUITE_P(Rows, BadSafetensors, ::testing::ValuesIn(kRows), row_name);

TEST(Safetensors, WhatIsNoFileIsRefusedWithItsPath) {
  const TestFolder folder;
  expect_refused([&] { SafetensorsFile file(folder.at("none")); },
                 {folder.at("none"), "No such file"});
  expect_refused([&] { SafetensorsFile file(folder.path()); }, {folder.path(), "directory"});
  ASSERT_EQ(::mkfifo(folder.at("pipe").c_str(), 0600), 0);
  expect_refused([&] { SafetensorsFile file(folder.at("pipe")); }, {"pipe: is not a regular file"});
  const std::string empty = folder.write("empty", "");
  expect_refused([&] { SafetensorsFile file(empty); }, {empty, "0 bytes"});
}

TEST(Safetensors, ALengthBeyondTheFileOrTheBoundIsRefused) {
  const TestFolder folder;
  for (const uint64_t length :
       {uint64_t{3}, uint64_t{100'000'001}, uint64_t{1} << 63, ~uint64_t{0}, ~uint64_t{0} - 7}) {
    std::string bytes = raw_safetensors("{}", "");
    std::memcpy(bytes.data(), &length, sizeof length);
    const std::string path = folder.write("x", bytes);
    expect_refused([&] { SafetensorsFile file(path); }, {path, fmt::format("{} bytes", length)});
  }
  // A sparse file that would have room for it.
  const std::string path = folder.write("sparse", "");
  const uint64_t length = 100'000'001;
  folder.write("sparse", as_bytes<uint64_t>({length}));
  std::filesystem::resize_file(path, 200'000'000);
  expect_refused([&] { SafetensorsFile file(path); }, {path, "100000001"});
}

TEST(Safetensors, EveryTruncationAndExtensionIsRefused) {
  const std::string whole = safetensors_of(
      {{"a", "F32", {3}, as_bytes<float>({1, 2, 3})}, {"b", "I64", {1}, as_bytes<int64_t>({4})}});
  const TestFolder folder;
  SafetensorsFile good(folder.write("good", whole));
  for (size_t length = 0; length < whole.size(); ++length) {
    const std::string path = folder.write("cut", whole.substr(0, length));
    expect_refused([&] { SafetensorsFile file(path); }, {path});
    if (HasFailure()) return;
  }
  const std::string path = folder.write("long", whole + "x");
  expect_refused([&] { SafetensorsFile file(path); }, {path, "1 bytes after"});
}

}  // namespace
}  // namespace leeway
