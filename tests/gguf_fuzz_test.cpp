// Random damage to GGUF files: each is either read or refused with an Error that names the file,
// and leaves nothing behind. Each input is determined by its number.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/rng.h"
#include "gguf/convert.h"
#include "gguf/gguf_file.h"
#include "gguf/test_gguf.h"

namespace leeway {
namespace {

using testing::bytes_of;
using testing::TestFolder;

// A file as small as a model can be, so that damage hits what describes it.
GgufPlan small_plan() {
  ModelConfig config = testing::gguf_config(Family::llama, true);
  config.num_hidden_layers = 1;
  GgufPlan plan = testing::gguf_plan(config, GgufType::q8_0);
  for (size_t i = 0; i < plan.tensors.size(); i += 3) {
    if (plan.tensors[i].type == GgufType::q8_0) plan.tensors[i].type = GgufType::f16;
  }
  return plan;
}

void damage(Rng& rng, std::string& bytes, size_t described) {
  constexpr uint64_t kNumbers[] = {0,          1,          2,          31,       32,
                                   255,        256,        65535,      1u << 31, 0xFFFFFFFF,
                                   1ull << 40, 1ull << 62, ~0ull >> 1, ~0ull};
  for (uint64_t count = 1 + rng.below(3); count > 0; --count) {
    // Mostly in what describes the tensors and the beginning, sometimes in long lists or values.
    const size_t size = rng.below(8) == 0 ? bytes.size() : described;
    const size_t window = rng.below(2) == 0 ? std::min<size_t>(size, 900) : size;
    const size_t at = rng.below(2) == 0 ? rng.below(window) : size - 1 - rng.below(window);
    switch (rng.below(6)) {
      case 0: bytes[at] = static_cast<char>(static_cast<uint8_t>(rng.below(256))); break;
      case 1: bytes[at] = static_cast<char>(bytes[at] ^ (1 << rng.below(8))); break;
      case 2: bytes.erase(at, 1 + rng.below(12)); break;
      case 3:
        bytes.insert(at, std::string(1 + rng.below(12), static_cast<char>(rng.below(4))));
        break;
      case 4: bytes.resize(at); break;
      default: {
        const uint64_t number = kNumbers[rng.below(std::size(kNumbers))];
        const size_t width = rng.below(2) == 0 ? 4 : 8;
        if (at + width <= bytes.size()) std::memcpy(bytes.data() + at, &number, width);
      }
    }
    if (bytes.size() < 64) return;
    described = std::min(described, bytes.size());
  }
}

TEST(GgufFuzz, ADamagedFileIsReadOrRefused) {
  const TestFolder folder;
  testing::write_gguf(folder.at("good.gguf"), small_plan());
  const std::string good = bytes_of(folder.at("good.gguf"));
  const size_t described = GgufFile(folder.at("good.gguf")).tensors()[0].begin;
  const std::string path = folder.at("bad.gguf");
  size_t read = 0, refused = 0;
  for (uint64_t number = 0; number < 3000 && !HasFailure(); ++number) {
    SCOPED_TRACE(fmt::format("input {}", number));
    Rng rng(number);
    std::string bytes = good;
    if (number > 0) damage(rng, bytes, described);
    folder.write("bad.gguf", bytes);
    try {
      const GgufFile file(path);
      for (const GgufTensor& tensor : file.tensors()) {
        ASSERT_LE(tensor.begin + tensor.bytes, bytes.size());
        std::vector<float> row(static_cast<size_t>(tensor.row_length()));
        file.read_rows(tensor, tensor.rows() - 1, 1, row);
      }
      ++read;
    } catch (const Error& error) {
      ++refused;
      ASSERT_TRUE(std::string(error.what()).starts_with(path + ": at byte ")) << error.what();
    }
  }
  EXPECT_GT(read, 200u);
  EXPECT_GT(refused, 200u);
}

TEST(GgufFuzz, ADamagedModelIsConvertedOrRefused) {
  const TestFolder folder;
  testing::write_gguf(folder.at("good.gguf"), small_plan());
  const std::string good = bytes_of(folder.at("good.gguf"));
  const size_t described = GgufFile(folder.at("good.gguf")).tensors()[0].begin;
  const std::string path = folder.at("bad.gguf"), out = folder.at("out");
  size_t read = 0, refused = 0;
  for (uint64_t number = 0; number < 600 && !HasFailure(); ++number) {
    SCOPED_TRACE(fmt::format("input {}", number));
    Rng rng(1000000 + number);
    std::string bytes = good;
    if (number > 0) damage(rng, bytes, described);
    folder.write("bad.gguf", bytes);
    try {
      convert_gguf_to_folder(path, out, {});
      const Parameters parameters = load_parameters(out);
      for (const float value : parameters.flat()) ASSERT_TRUE(std::isfinite(value));
      remove_tree(out);
      ++read;
    } catch (const Error& error) {
      ++refused;
      ASSERT_TRUE(std::string(error.what()).starts_with(path)) << error.what();
    }
    ASSERT_EQ(folder.names(), (std::vector<std::string>{"bad.gguf", "good.gguf"}));
  }
  EXPECT_GT(read, 5u);
  EXPECT_GT(refused, 100u);
}

}  // namespace
}  // namespace leeway
