// Merged folders against the adapter over its base.

#include "model/merge.h"

#include <bit>
#include <cmath>

#include "base/files.h"
#include "base/folders.h"
#include "model/adapter_io.h"
#include "model/cpu_decoder.h"
#include "model/test_files.h"

namespace leeway {
namespace {

using testing::expect_refused;
using testing::small_config;
using testing::TestFolder;

Parameters some_adapter(std::shared_ptr<const Parameters> base, double size = 0.3) {
  Parameters adapter(std::move(base), {.rank = 3,
                                       .alpha = 4.0,
                                       .targets = {"q_proj", "o_proj", "up_proj", "down_proj"},
                                       .base_path = ""});
  Rng rng(4);
  for (float& value : adapter.flat()) value = static_cast<float>(size * rng.normal());
  return adapter;
}

std::vector<float> hidden_of(const Parameters& weights) {
  const std::vector<int32_t> tokens{3, 1, 4, 1, 5, 9, 2, 6};
  const std::vector<int64_t> cu_seqlens{0, 8};
  std::vector<float> hidden(8 * 24);
  ThreadPool pool(1);
  training_forward(pool, weights, {tokens, cu_seqlens}, {}, hidden, nullptr);
  return hidden;
}

// The two differ in the order of float32 sums alone.
TEST(Merge, GivesAPlainFolderThatComputesWhatTheAdapterDoes) {
  for (const int64_t shard_bytes : {int64_t{5} << 30, int64_t{9000}}) {
    const TestFolder base, adapter, out;
    const auto model = std::make_shared<const Parameters>(
        testing::small_parameters(small_config(Family::qwen3, true)));
    save_parameters(*model, base.path(), shard_bytes);
    write_file_atomically(base.at("tokenizer.json"), "{}");
    write_file_atomically(base.at("pytorch_model.bin"), "other weights");
    const Parameters policy = some_adapter(model);
    save_parameters(policy, adapter.path());
    size_t told = 0;
    const MergeResult result = merge_adapter(base.path(), adapter.path(), out.at("merged"),
                                             [&](size_t, size_t total) { told = total; });
    EXPECT_EQ(result.merged, 8);
    EXPECT_EQ(result.tensors, static_cast<int64_t>(model->table().size()));
    EXPECT_EQ(told, model->table().size());
    EXPECT_EQ(result.bytes, static_cast<uint64_t>(model->count()) * 4);
    EXPECT_TRUE(is_present(out.at("merged/tokenizer.json")));
    EXPECT_FALSE(is_present(out.at("merged/pytorch_model.bin")));
    EXPECT_FALSE(is_present(out.at("merged.partial")));
    const Parameters merged = load_parameters(out.at("merged"));
    EXPECT_EQ(merged.lora(), nullptr);
    const auto got = hidden_of(merged), wanted = hidden_of(policy);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], wanted[i], 1e-4f) << i;
    EXPECT_NE(got, hidden_of(*model));
  }
}

TEST(Merge, RefusesABaseThatTheAdapterWasNotTrainedOver) {
  const TestFolder right, wrong, adapter, out;
  const auto model =
      std::make_shared<const Parameters>(testing::small_parameters(small_config(Family::llama)));
  Parameters other = *model;
  other.flat()[0] += 0.5f;
  save_parameters(*model, right.path());
  save_parameters(other, wrong.path());
  save_parameters(some_adapter(model), adapter.path());
  expect_refused([&] { merge_adapter(wrong.path(), adapter.path(), out.at("merged")); },
                 {adapter.path(), "other weights than " + wrong.path(), "checksum"});
  EXPECT_FALSE(is_present(out.at("merged")));
  make_folders(out.at("merged"));  // an empty folder is as good as none
  merge_adapter(right.path(), adapter.path(), out.at("merged/"));
  EXPECT_TRUE(is_present(out.at("merged/config.json")));
}

// In the base's dtype: half a unit of the last place of 8 (bf16) or 11 bits (f16).
TEST(Merge, KeepsTheDtypeOfTheBase) {
  const auto model =
      std::make_shared<const Parameters>(testing::small_parameters(small_config(Family::llama)));
  for (const auto& [dtype, unit] :
       std::vector<std::pair<std::string, double>>{{"BF16", 0x1p-8}, {"F16", 0x1p-11}}) {
    const TestFolder base, adapter, out;
    save_parameters(*model, base.path());
    std::vector<testing::RawTensor> tensors;
    for (size_t i = 0; i < model->table().size(); ++i) {
      std::vector<uint16_t> bits;
      for (const float value : model->of(i)) {
        const auto whole = std::bit_cast<uint32_t>(value);
        // bf16: truncated. f16: of small numbers the sign, exponent and ten bits.
        const uint32_t exponent = (whole >> 23) & 0xff;
        const auto half = exponent < 113 ? (whole >> 16) & 0x8000u
                                         : ((whole >> 16) & 0x8000u) | ((exponent - 112) << 10) |
                                               ((whole >> 13) & 0x3ffu);
        bits.push_back(static_cast<uint16_t>(dtype == "BF16" ? whole >> 16 : half));
      }
      tensors.push_back(
          {model->table()[i].name, dtype, model->table()[i].shape, testing::as_bytes(bits)});
    }
    write_file_atomically(base.at("model.safetensors"), testing::safetensors_of(tensors));
    const auto rounded = std::make_shared<const Parameters>(load_parameters(base.path()));
    const Parameters policy = some_adapter(rounded);
    save_parameters(policy, adapter.path());
    merge_adapter(base.path(), adapter.path(), out.at("merged"));
    const SafetensorsFile file(out.at("merged/model.safetensors"));
    for (const StoredTensor& tensor : file.tensors()) EXPECT_EQ(name_of(tensor.dtype), dtype);
    const Parameters merged = load_parameters(out.at("merged"));
    for (size_t i = 0; i < merged.table().size(); ++i) {
      const ParameterInfo& info = merged.table()[i];
      const std::string module = info.name.substr(0, info.name.size() - 7);
      const float *a = policy.find(lora_a_name(module)), *b = policy.find(lora_b_name(module));
      for (size_t k = 0; k < merged.of(i).size(); ++k) {
        double wanted = rounded->of(i)[k];
        if (a != nullptr) {
          const size_t inputs = static_cast<size_t>(info.shape[1]);
          for (size_t r = 0; r < 3; ++r) {
            wanted += 4.0 / 3.0 * double{b[k / inputs * 3 + r]} * a[r * inputs + k % inputs];
          }
        }
        ASSERT_NEAR(merged.of(i)[k], wanted, (std::abs(wanted) + 1e-4) * unit * 1.01)
            << info.name << " " << k;
      }
    }
  }
}

TEST(Merge, RefusesWhatDoesNotFitAndLeavesNothing) {
  const TestFolder base, adapter, out;
  const auto model =
      std::make_shared<const Parameters>(testing::small_parameters(small_config(Family::qwen3)));
  save_parameters(*model, base.path());
  save_parameters(some_adapter(model), adapter.path());
  const auto merge = [&](const std::string& from, const std::string& with) {
    merge_adapter(from, with, out.at("merged"));
  };
  expect_refused([&] { merge(adapter.path(), adapter.path()); }, {adapter.path(), "base"});
  expect_refused([&] { merge(base.path(), base.path()); }, {"adapter_config.json"});
  expect_refused([&] { merge(base.path() + "/nowhere", adapter.path()); }, {"nowhere"});
  write_file_atomically(out.at("file"), "");
  expect_refused([&] { merge_adapter(base.path(), adapter.path(), out.at("file")); }, {"exists"});
  save_parameters(some_adapter(model, 1e30), adapter.path());
  expect_refused([&] { merge(base.path(), adapter.path()); }, {"with the adapter", "holds"});
  EXPECT_EQ(out.names(), std::vector<std::string>{"file"});
}

}  // namespace
}  // namespace leeway
