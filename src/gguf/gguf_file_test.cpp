// Every kind of damage is refused with the file and the byte; every value comes back.

#include "gguf/gguf_file.h"

#include <gtest/gtest.h>

#include "gguf/test_gguf.h"

namespace leeway {
namespace {

using testing::bytes_of;
using testing::expect_refused;
using testing::TestFolder;

// Builds files by hand, right or wrong.
struct RawGguf {
  std::string bytes = std::string("GGUF");

  template <class T>
  RawGguf& put(T number) {
    bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
    return *this;
  }
  RawGguf& text(std::string_view text) {
    put(uint64_t{text.size()});
    bytes += text;
    return *this;
  }
  RawGguf& header(uint64_t tensors, uint64_t entries, uint32_t version = 3) {
    return put(version).put(tensors).put(entries);
  }
  RawGguf& tensor(std::string_view name, std::vector<uint64_t> extents, uint32_t type,
                  uint64_t offset) {
    text(name).put(static_cast<uint32_t>(extents.size()));
    for (const uint64_t extent : extents) put(extent);
    return put(type).put(offset);
  }
  RawGguf& data(size_t size) {
    bytes.resize((bytes.size() + 31) / 32 * 32 + size, '\0');
    return *this;
  }
};

GgufPlan plan_of_everything() {
  GgufPlan plan;
  plan.metadata = {{"u8", uint8_t{200}},
                   {"i8", int8_t{-3}},
                   {"u16", uint16_t{60000}},
                   {"i16", int16_t{-300}},
                   {"u32", uint32_t{4000000000}},
                   {"i32", int32_t{-70000}},
                   {"f32", 1e-5f},
                   {"flag", true},
                   {"text", std::string("a\0b", 3)},
                   {"u64", uint64_t{1} << 40},
                   {"i64", -(int64_t{1} << 40)},
                   {"f64", 0.1},
                   {"numbers", testing::int32_array({3, -1, 4})},
                   {"texts", std::vector<std::string>{"", "x", "\xC4\xA0t"}}};
  plan.tensors = {{"a", {3, 5}, GgufType::f32}, {"b", {2, 32}, GgufType::q8_0}};
  return plan;
}

TEST(GgufFile, EveryValueComesBack) {
  const TestFolder folder;
  testing::write_gguf(folder.at("all.gguf"), plan_of_everything());
  const GgufFile file(folder.at("all.gguf"));
  EXPECT_EQ(file.version(), 3u);
  EXPECT_EQ(file.integer("u8"), 200);
  EXPECT_EQ(file.integer("i8"), -3);
  EXPECT_EQ(file.integer("u16"), 60000);
  EXPECT_EQ(file.integer("i16"), -300);
  EXPECT_EQ(file.integer("u32"), 4000000000);
  EXPECT_EQ(file.integer("i32"), -70000);
  EXPECT_EQ(file.real("f32"), 1e-5) << "the digits that were written";
  EXPECT_EQ(file.real("f64"), 0.1);
  EXPECT_EQ(file.flag("flag"), true);
  EXPECT_EQ(*file.text("text"), std::string("a\0b", 3));
  EXPECT_EQ(file.integer("u64"), int64_t{1} << 40);
  EXPECT_EQ(file.integer("i64"), -(int64_t{1} << 40));
  ASSERT_EQ(file.numbers("numbers")->size(), 3u);
  EXPECT_EQ(file.numbers("numbers")->at(1), -1.0);
  EXPECT_EQ(file.texts("texts")->at(2), "\xC4\xA0t");
  EXPECT_FALSE(file.integer("none").has_value());
  EXPECT_EQ(file.text("none"), nullptr);
  expect_refused([&] { file.integer("flag"); }, {"all.gguf: at byte", "flag = true", "integer"});
  expect_refused([&] { file.real("u8"); }, {"u8 = 200"});
  expect_refused([&] { file.text("numbers"); }, {"numbers = an array"});
  expect_refused([&] { file.texts("numbers"); }, {"array of texts"});
  expect_refused([&] { file.numbers("texts"); }, {"array of numbers"});
  expect_refused([&] { file.flag("text"); }, {"true or false"});

  const GgufTensor& a = *file.find_tensor("a");
  EXPECT_EQ(a.shape, (std::vector<int64_t>{3, 5}));
  const GgufTensor& b = *file.find_tensor("b");
  EXPECT_EQ(b.type, GgufType::q8_0);
  EXPECT_EQ(b.begin % 32, 0u);
  std::vector<float> all(64), second(32);
  file.read_rows(b, 0, 2, all);
  file.read_rows(b, 1, 1, second);
  EXPECT_EQ(second, std::vector<float>(all.begin() + 32, all.end()));
}

// A file that ends anywhere before the last tensor's end is refused.
TEST(GgufFile, ATruncatedFileIsRefusedWhereverItEnds) {
  const TestFolder folder;
  testing::write_gguf(folder.at("all.gguf"), plan_of_everything());
  const std::string whole = bytes_of(folder.at("all.gguf"));
  const GgufTensor last = GgufFile(folder.at("all.gguf")).tensors().back();
  const std::string path = folder.at("short.gguf");
  for (size_t size = 0; size < last.begin + last.bytes; ++size) {
    folder.write("short.gguf", whole.substr(0, size));
    expect_refused([&] { GgufFile file(path); }, {path + ": at byte "});
    if (HasFailure()) FAIL() << "at " << size;
  }
}

TEST(GgufFile, DamageIsRefusedWithItsPlace) {
  const TestFolder folder;
  struct Case {
    std::string bytes;
    std::vector<std::string> words;
  };
  const auto raw = [] { return RawGguf(); };
  constexpr uint64_t kHuge = uint64_t{1} << 62;
  const std::vector<Case> cases = {
      {"GGML" + std::string(40, '\0'), {"at byte 0", "no GGUF file"}},
      {raw().header(0, 0, 1).bytes, {"at byte 4", "version 1"}},
      {raw().header(0, 0, 4).bytes, {"version 4"}},
      {raw().header(0, 0, __builtin_bswap32(3)).bytes, {"big-endian"}},
      {raw().header(kHuge, 0).bytes, {"at byte 8", "tensors = 4611686018427387904"}},
      {raw().header(0, kHuge).bytes, {"at byte 16", "metadata entries"}},
      {raw().header(0, 1).text("k").put(uint32_t{8}).put(kHuge).data(64).bytes,
       {"a text of 4611686018427387904 bytes", "\"k\""}},
      {raw().header(0, 1).put(kHuge).data(64).bytes, {"a key of"}},
      {raw().header(0, 1).text("k").put(uint32_t{13}).data(64).bytes, {"type 13", "\"k\""}},
      {raw().header(0, 1).text("k").put(uint32_t{9}).put(uint32_t{9}).data(64).bytes,
       {"array of arrays"}},
      {raw().header(0, 1).text("k").put(uint32_t{9}).put(uint32_t{4}).put(kHuge).data(64).bytes,
       {"elements of an array"}},
      {raw().header(0, 1).text("k").put(uint32_t{7}).put(uint8_t{2}).data(64).bytes,
       {"a flag is 2"}},
      {raw()
           .header(0, 2)
           .text("k")
           .put(uint32_t{0})
           .put(uint8_t{2})
           .text("k")
           .put(uint32_t{0})
           .put(uint8_t{2})
           .data(64)
           .bytes,
       {"\"k\" is given twice"}},
      {raw().header(1, 0).tensor("t", {}, 0, 0).data(64).bytes, {"\"t\"", "has 0 extents"}},
      {raw().header(1, 0).tensor("t", {1, 1, 1, 1, 1}, 0, 0).data(64).bytes, {"has 5 extents"}},
      {raw().header(1, 0).tensor("t", {4, 0}, 0, 0).data(64).bytes, {"extent of 0"}},
      {raw().header(1, 0).tensor("t", {kHuge, 8}, 0, 0).data(64).bytes, {"larger than any file"}},
      {raw().header(1, 0).tensor("t", {4}, 99, 0).data(64).bytes,
       {"its type is number 99", "Q4_K"}},
      {raw().header(1, 0).tensor("t", {256}, 10, 0).data(640).bytes, {"Q2_K", "is not read"}},
      {raw().header(1, 0).tensor("t", {33}, 8, 0).data(640).bytes, {"33 elements", "Q8_0"}},
      {raw().header(1, 0).tensor("t", {4}, 0, 8).data(64).bytes, {"offset 8", "alignment 32"}},
      {raw().header(1, 0).tensor("t", {4}, 0, 64).data(64).bytes, {"end beyond the file"}},
      {raw().header(1, 0).tensor("t", {4}, 0, kHuge).data(64).bytes, {"end beyond the file"}},
      {raw().header(1, 0).tensor("t", {17}, 0, 0).data(64).bytes, {"68 bytes", "truncated"}},
      {raw().header(2, 0).tensor("t", {4}, 0, 0).tensor("t", {4}, 0, 32).data(64).bytes,
       {"\"t\" is given twice"}},
      {raw().header(2, 0).tensor("t", {12}, 0, 0).tensor("u", {4}, 0, 32).data(64).bytes,
       {"\"u\"", "overlap those of \"t\""}},
      {raw().header(2, 0).tensor("t", {4}, 0, 32).tensor("u", {4}, 0, 32).data(64).bytes,
       {"overlap"}},
      {raw()
           .header(0, 1)
           .text("general.alignment")
           .put(uint32_t{4})
           .put(uint32_t{24})
           .data(64)
           .bytes,
       {"general.alignment = 24", "power of two"}},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    const std::string path = folder.write("bad.gguf", cases[i].bytes);
    std::vector<std::string> words = cases[i].words;
    words.push_back(path + ": at byte ");
    expect_refused([&] { GgufFile file(path); }, words);
  }
}

TEST(GgufFile, VersionTwoAndOtherAlignmentsAreRead) {
  const TestFolder folder;
  RawGguf raw;
  raw.header(1, 1, 2).text("general.alignment").put(uint32_t{4}).put(uint32_t{64});
  raw.tensor("t", {2}, 0, 0);
  raw.bytes.resize((raw.bytes.size() + 63) / 64 * 64, '\0');
  raw.put(1.5f).put(-2.0f);
  const GgufFile file(folder.write("two.gguf", raw.bytes));
  EXPECT_EQ(file.version(), 2u);
  std::vector<float> values(2);
  file.read_rows(file.tensors()[0], 0, 1, values);
  EXPECT_EQ(values, (std::vector<float>{1.5f, -2.0f}));
}

}  // namespace
}  // namespace leeway
