// Weights between processes on one GPU. What lies where is tested anywhere; copying needs a GPU.

#include "torch/weight_sharing.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <torch/cuda.h>

#include <cstdlib>
#include <set>

#include "base/json.h"
#include "engine/test_support.h"
#include "leeway/error.h"
#include "torch/device_weights.h"

extern char** environ;

namespace leeway {
namespace {

using namespace testing;

constexpr const char* kVariable = "LEEWAY_TEST_SHARED_WEIGHTS";

std::shared_ptr<const PolicySnapshot> on_gpu(const Parameters& weights, PolicyVersion version) {
  const FlatLayout layout(weights.config());
  const at::Tensor flat =
      at::zeros({layout.size}, at::device(at::Device(at::kCUDA, 0)).dtype(at::kFloat));
  copy_to_flat(layout, weights, flat);
  return std::make_shared<const PolicySnapshot>(
      weights.config(), std::make_unique<TorchDeviceWeights>(layout, flat), version);
}

TEST(WeightSharing, LayoutsAreToldApart) {
  std::set<uint32_t> sums;
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    ModelConfig config = tiny_weights(family, 1).config();
    EXPECT_EQ(layout_sum(FlatLayout(config)), layout_sum(FlatLayout(config)));
    sums.insert(layout_sum(FlatLayout(config)));
    config.num_hidden_layers += 1;
    sums.insert(layout_sum(FlatLayout(config)));
    config.vocab_size += 1;
    sums.insert(layout_sum(FlatLayout(config)));
  }
  EXPECT_EQ(sums.size(), 9u);
}

TEST(WeightSharing, WhereThereIsNoGpuItIsRefused) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "a GPU: there is one";
  EXPECT_ANY_THROW(cuda_weight_sharing({torch::kCUDA, 0}));
}

// In a process that the test below starts: takes what it is told and compares.
void take_what_is_shared(const char* text) {
  const rapidjson::Document json = parse_json("", text);
  const WeightSharing sharing = cuda_weight_sharing({torch::kCUDA, 0});
  SharedWeights shared{.device = json["device"].GetString(),
                       .handle = handle_bytes(json["handle"].GetString()),
                       .offset = json["offset"].GetInt64(),
                       .count = json["count"].GetInt64(),
                       .layout = hexadecimal_sum(json["layout"].GetString()),
                       .checksum = hexadecimal_sum(json["checksum"].GetString())};
  EXPECT_EQ(shared.device, sharing.device);
  const Parameters expected = tiny_weights(Family::qwen3, 5);
  for (int again = 0; again < 2; ++again) {
    const auto taken = sharing.take(shared, expected.config(), 4);
    EXPECT_EQ(taken->version(), 4);
    EXPECT_FALSE(taken->has_host());
    EXPECT_TRUE(same_bits(taken->host(), expected));
  }
  const auto refused = [&](const auto& change, const ModelConfig& config) {
    SharedWeights other = shared;
    change(other);
    EXPECT_THROW(sharing.take(other, config, 4), Error);
  };
  refused([](SharedWeights& each) { each.checksum ^= 1; }, expected.config());
  refused([](SharedWeights& each) { each.layout ^= 1; }, expected.config());
  refused([](SharedWeights& each) { each.count += 64; }, expected.config());
  refused([](SharedWeights& each) { each.offset = int64_t{1} << 40; }, expected.config());
  refused([](SharedWeights& each) { each.offset += 1; }, expected.config());
  refused([](SharedWeights& each) { each.handle.assign(kWeightHandleBytes, 'x'); },
          expected.config());
  refused([](SharedWeights&) {}, tiny_weights(Family::llama, 5).config());
  EXPECT_TRUE(same_bits(sharing.take(shared, expected.config(), 4)->host(), expected))
      << "none of these leave an error behind";
}

TEST(WeightSharing, AnotherProcessCopiesTheBits) {
  if (const char* text = std::getenv(kVariable)) return take_what_is_shared(text);
  if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU: nothing to share";
  const WeightSharing sharing = cuda_weight_sharing({torch::kCUDA, 0});
  const Parameters weights = tiny_weights(Family::qwen3, 5);
  const auto snapshot = on_gpu(weights, 4);
  const SharedWeights shared = sharing.share(*snapshot);
  EXPECT_EQ(shared.checksum, checksum(weights));
  EXPECT_FALSE(snapshot->has_host());
  setenv(kVariable, shared_weights_json(shared).c_str(), 1);
  std::string program = "/proc/self/exe",
              filter = "--gtest_filter=WeightSharing.AnotherProcessCopiesTheBits";
  char* arguments[] = {program.data(), filter.data(), nullptr};
  pid_t child = 0;
  ASSERT_EQ(posix_spawn(&child, program.c_str(), nullptr, nullptr, arguments, environ), 0);
  unsetenv(kVariable);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_THROW(sharing.share(PolicySnapshot(weights, 4)), Error) << "weights of the host";
}

}  // namespace
}  // namespace leeway
