// Random damage to model files: safetensors, config.json and shard indexes. Each is either read or
// refused with an Error. Each input is determined by its number.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <sstream>

#include "base/rng.h"
#include "model/test_configs.h"
#include "model/test_files.h"

namespace leeway {
namespace {

using testing::as_bytes;
using testing::bytes_of;
using testing::RawTensor;
using testing::safetensors_of;
using testing::small_config;
using testing::small_parameters;
using testing::TestFolder;

// Every test leaves input 0 undamaged.
template <class Body>
void for_each_input(uint64_t count, Body body) {
  for (uint64_t number = 0; number < count && !::testing::Test::HasFailure(); ++number) {
    SCOPED_TRACE(fmt::format("input {}", number));
    body(number);
  }
}

const std::vector<std::string>& words() {
  static const std::vector<std::string> list = [] {
    std::istringstream text(R"(null true -1 0 1 2 8 1e9 1.5 NaN "" {} [] [0,0] [ ] { } , : " \
      \u0000 9223372036854775807 18446744073709551615 4294967296 "F32" "F64" "U8" "__metadata__"
      "dtype" "shape" "data_offsets" "llama3" "rope_type")");
    std::vector<std::string> found = {" ", "\xFF", "\xE2\x82"};
    for (std::string one; text >> one;) found.push_back(one);
    return found;
  }();
  return list;
}

std::string word(Rng& rng) { return words()[rng.below(words().size())]; }

// RapidJSON 1.1 counts the leading zeros of a zero, which is undefined behaviour, for a zero with a
// large exponent (0e-30) and for a number that starts with the digits of 2^64 - 1 and continues
// (rounding wraps around). A sanitizer would abort the test there.
bool upsets_rapidjson(const std::string& text) {
  for (size_t e = text.find_first_of("eE"); e != std::string::npos;
       e = text.find_first_of("eE", e + 1)) {
    size_t start = e;
    while (start > 0 && (text[start - 1] == '0' || text[start - 1] == '.')) --start;
    const bool has_other_digits = start > 0 && text[start - 1] >= '1' && text[start - 1] <= '9';
    if (start < e && text[start] == '0' && !has_other_digits) return true;
  }
  static const std::string kMost = "18446744073709551615";
  for (size_t at = text.find(kMost); at != std::string::npos; at = text.find(kMost, at + 1)) {
    const size_t next = at + kMost.size();
    if (next < text.size() && (text[next] == '.' || (text[next] >= '0' && text[next] <= '9'))) {
      return true;
    }
  }
  return false;
}

// Changes a few places among the first `bound` characters.
void damage_text(Rng& rng, std::string& text, size_t bound) {
  for (uint64_t count = 1 + rng.below(3); count > 0 && !text.empty(); --count) {
    const size_t at = rng.below(std::min(text.size(), bound) + 1);
    const size_t length = std::min<size_t>(rng.below(12), text.size() - at);
    switch (rng.below(6)) {
      case 0: text.erase(at, length); break;
      case 1: text.insert(at, word(rng)); break;
      case 2: text.replace(at, length, word(rng)); break;
      case 3: text.insert(at, text.substr(rng.below(text.size()), rng.below(60))); break;
      case 4:
        if (at < text.size()) text[at] = static_cast<char>(static_cast<uint8_t>(rng.below(256)));
        break;
      default: {
        // Replaces a number by another, which makes plausible but wrong headers.
        const size_t digit = text.find_first_of("0123456789", at);
        if (digit != std::string::npos) text[digit] = static_cast<char>('0' + rng.below(10));
      }
    }
  }
}

std::string valid_file(Rng& rng) {
  std::vector<RawTensor> tensors = {{"scalar", "F32", {}, "abcd"},
                                    {"none", "I16", {3, 0}, ""},
                                    {"a.weight", "F32", {2, 3}, std::string(24, 'x')},
                                    {"b", "BF16", {5}, std::string(10, 'y')},
                                    {"c", "F16", {1, 1, 2}, std::string(4, 'z')},
                                    {"d", "BOOL", {3}, std::string(3, '\1')},
                                    {"e", "F64", {2}, std::string(16, '\2')},
                                    {"f", "I64", {1}, std::string(8, '\3')}};
  while (tensors.size() > 1 && rng.below(3) == 0) tensors.erase(tensors.begin());
  return safetensors_of(tensors);
}

// Tensors of a few bytes, some slightly out of place: overlaps, gaps and ends beyond the file, with
// consistent sizes.
std::string misplaced_tensors(Rng& rng) {
  std::string header = "{";
  int64_t at = 0;
  for (uint64_t n = 1 + rng.below(4); n > 0; --n) {
    const int64_t size = static_cast<int64_t>(rng.below(5));
    if (rng.below(4) == 0) at = std::max<int64_t>(0, at + static_cast<int64_t>(rng.below(5)) - 2);
    header +=
        fmt::format("{}\"t{}\": {{\"dtype\": \"U8\", \"shape\": [{}], \"data_offsets\": [{}, {}]}}",
                    header.size() > 1 ? ", " : "", n, size, at, at + size);
    at += size;
  }
  const size_t end = static_cast<size_t>(at) + rng.below(3);
  std::string data(end > 0 && rng.below(4) == 0 ? end - 1 : end, '\0');
  for (char& c : data) c = static_cast<char>(static_cast<uint8_t>(rng.below(256)));
  return testing::raw_safetensors(header + "}", data);
}

constexpr size_t kLengthBytes = 8;

std::string damaged_file(Rng& rng) {
  if (rng.below(4) == 0) return misplaced_tensors(rng);
  std::string file = valid_file(rng);
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof length);
  switch (rng.below(8)) {
    case 0: file.resize(rng.below(file.size() + 1)); break;
    case 1:
      file.append(rng.below(40), static_cast<char>(static_cast<uint8_t>(rng.below(256))));
      break;
    case 2:
      file[rng.below(kLengthBytes)] = static_cast<char>(static_cast<uint8_t>(rng.below(256)));
      break;
    case 3: {
      const uint64_t other = length + rng.below(9) - 4;
      std::memcpy(file.data(), &other, sizeof other);
      break;
    }
    default: {
      // A header whose length field is updated gets further than one with the old length.
      std::string header;
      do {
        header = file.substr(kLengthBytes, length);
        damage_text(rng, header, header.size());
      } while (upsets_rapidjson(header));
      file = rng.below(8) == 0
                 ? file.substr(0, kLengthBytes) + header + file.substr(kLengthBytes + length)
                 : testing::raw_safetensors(header, file.substr(kLengthBytes + length));
    }
  }
  return file;
}

// Bytes in their own allocation, so that a sanitizer detects reads beside them.
class MemoryBytes : public TensorBytes {
 public:
  explicit MemoryBytes(const std::vector<char>& bytes) : bytes_(bytes) {}
  uint64_t size() const override { return bytes_.size(); }
  void read(uint64_t at, std::span<std::byte> out) const override {
    ASSERT_LE(at + out.size(), bytes_.size());
    if (!out.empty()) std::memcpy(out.data(), bytes_.data() + at, out.size());
  }

 private:
  const std::vector<char>& bytes_;
};

// The tensors cover everything after the header, and every byte and value can be read.
void expect_sound(const std::vector<StoredTensor>& tensors, std::string_view data) {
  size_t reached = 0;
  for (const StoredTensor& tensor : tensors) {
    const size_t size = tensor.byte_size();
    ASSERT_LE(size, data.size() - reached);
    ASSERT_EQ(tensor.bytes(), data.substr(reached, size));
    int64_t elements = 1;
    for (const int64_t extent : tensor.shape) elements *= extent;
    ASSERT_EQ(tensor.size(), elements);
    ASSERT_EQ(static_cast<size_t>(elements) * size_of(tensor.dtype), size);
    reached += size;
    std::vector<float> values(static_cast<size_t>(tensor.size()));
    try {
      copy_as_float(tensor, "file", values);
    } catch (const Error&) {
      ASSERT_EQ(std::string(name_of(tensor.dtype)).find('F'), std::string::npos);
    }
  }
  ASSERT_EQ(reached, data.size());
}

TEST(SafetensorsFuzz, ADamagedFileIsReadOrRefused) {
  const TestFolder folder;
  const std::string path = folder.at("model.safetensors");
  size_t read = 0, refused = 0;
  for_each_input(10000, [&](uint64_t number) {
    Rng rng(number);
    const std::string bytes = number == 0 ? valid_file(rng) : damaged_file(rng);
    folder.write("model.safetensors", bytes);
    try {
      const SafetensorsFile file(path);
      uint64_t length = 0;
      std::memcpy(&length, bytes.data(), sizeof length);
      ASSERT_LE(length, bytes.size() - kLengthBytes);
      expect_sound(file.tensors(), std::string_view(bytes).substr(kLengthBytes + length));
      for (const StoredTensor& tensor : file.tensors()) ASSERT_EQ(file.find(tensor.name), &tensor);
      ++read;
    } catch (const Error& error) {
      ++refused;
      ASSERT_TRUE(std::string(error.what()).starts_with(path)) << error.what();
    }
  });
  EXPECT_GT(read, 0u);
  EXPECT_GT(refused, 0u);
}

// Without a file, in memory blocks of exactly the right size, so that a sanitizer detects the first
// byte beyond.
TEST(SafetensorsFuzz, ADamagedHeaderIsReadOrRefused) {
  size_t read = 0, refused = 0;
  for_each_input(20000, [&](uint64_t number) {
    Rng rng(number);
    const std::string bytes = number == 0 ? valid_file(rng) : damaged_file(rng);
    uint64_t length = 0;
    if (bytes.size() < kLengthBytes) return;
    std::memcpy(&length, bytes.data(), sizeof length);
    if (length > bytes.size() - kLengthBytes) return;
    const auto start = bytes.begin() + kLengthBytes;
    const std::vector<char> header(start, start + static_cast<ptrdiff_t>(length));
    const std::vector<char> data(start + static_cast<ptrdiff_t>(length), bytes.end());
    try {
      expect_sound(parse_safetensors_header("file", {header.data(), header.size()},
                                            std::make_shared<MemoryBytes>(data)),
                   {data.data(), data.size()});
      ++read;
    } catch (const Error& error) {
      ++refused;
      ASSERT_TRUE(std::string(error.what()).starts_with("file")) << error.what();
    }
  });
  EXPECT_GT(read, 0u);
  EXPECT_GT(refused, 0u);
}

TEST(ModelConfigFuzz, ADamagedConfigIsReadOrRefused) {
  const std::vector<std::string> sources = {
      testing::kQwen3, testing::kQwen2, testing::kLlama,
      bytes_of(testing::kGoldens + "/llama3-rope/config.json"),
      model_config_json(small_config(Family::qwen3))};
  size_t read = 0, refused = 0;
  for_each_input(5000, [&](uint64_t number) {
    Rng rng(number);
    std::string text = sources[rng.below(sources.size())];
    if (number > 0) damage_text(rng, text, text.size());
    if (upsets_rapidjson(text)) return;
    std::optional<ModelConfig> config;
    try {
      config = parse_model_config("config.json", text);
      ++read;
    } catch (const Error& error) {
      ++refused;
      ASSERT_TRUE(std::string(error.what()).starts_with("config.json")) << error.what();
      return;
    }
    ASSERT_NO_THROW(check_model_config("config.json", *config));
    // What was read can be written and reads back the same.
    testing::expect_same(parse_model_config("config.json", model_config_json(*config)), *config);
    if (config->num_hidden_layers > 200) return;
    for (const ParameterInfo& info : parameter_table(*config)) ASSERT_GT(info.size(), 0);
  });
  EXPECT_GT(read, 0u);
  EXPECT_GT(refused, 0u);
}

TEST(ParametersFuzz, ADamagedFolderIsReadOrRefused) {
  const TestFolder folder;
  const Parameters whole = small_parameters(small_config(Family::qwen2));
  save_parameters(whole, folder.path(), 4 * whole.count() - 1);
  const std::vector<std::string> names = {"model.safetensors.index.json", "config.json",
                                          "model-00001-of-00002.safetensors"};
  size_t read = 0, refused = 0;
  for_each_input(1500, [&](uint64_t number) {
    Rng rng(number);
    // Usually the index.
    const std::string& name = names[rng.below(4) == 0 ? 1 + rng.below(2) : 0];
    const std::string good = bytes_of(folder.at(name));
    std::string bad = good;
    if (number > 0) damage_text(rng, bad, name.ends_with(".json") ? good.size() : size_t{2000});
    if (upsets_rapidjson(bad.substr(0, 4000))) return;
    folder.write(name, bad);
    try {
      const Parameters loaded = load_parameters(folder.path());
      for (const float value : loaded.flat()) ASSERT_TRUE(std::isfinite(value));
      ++read;
    } catch (const Error& error) {
      ++refused;
      ASSERT_TRUE(std::string(error.what()).starts_with(folder.path())) << error.what();
    }
    folder.write(name, good);
  });
  EXPECT_GT(read, 0u);
  EXPECT_GT(refused, 0u);
  EXPECT_TRUE(testing::same_bits(load_parameters(folder.path()), whole));
}

}  // namespace
}  // namespace leeway
