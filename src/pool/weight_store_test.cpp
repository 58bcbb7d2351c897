#include "pool/weight_store.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "base/checked_files.h"
#include "base/files.h"
#include "base/test_folder.h"
#include "leeway/error.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;
using testing::TestFolder;

std::shared_ptr<const PolicySnapshot> weights_of(PolicyVersion version) {
  ModelConfig config;
  config.family = Family::llama;
  config.qk_norm = false;
  config.vocab_size = 11;
  config.hidden_size = 8;
  config.intermediate_size = 8;
  config.num_hidden_layers = 1;
  config.num_attention_heads = 2;
  config.num_key_value_heads = 1;
  config.head_dim = 4;
  config.max_position_embeddings = 16;
  Parameters weights(config);
  initialise(weights, static_cast<uint64_t>(version));
  return std::make_shared<const PolicySnapshot>(std::move(weights), version);
}

TEST(WeightFolders, AreWholeAndHaveTheBitsOfTheWeights) {
  const TestFolder folder;
  const std::string root = folder.at("broadcast");
  fs::create_directories(root + "/step_9/left_by_another_run");
  {
    WeightFolders store(root);
    EXPECT_FALSE(fs::exists(root + "/step_9"));
    for (PolicyVersion version : {0, 1, 2}) {
      const auto weights = weights_of(version);
      const PublishedWeights published = store.publish(weights, version);
      EXPECT_EQ(published.folder,
                fs::canonical(root).string() + "/step_" + std::to_string(version));
      EXPECT_EQ(published.checksum, weights->checksum());
      EXPECT_EQ(checksum(load_parameters(published.folder)), weights->checksum());
      const auto json = parse_json("", read_file(published.folder + "/checksum.json"));
      EXPECT_EQ(json["version"].GetInt(), version);
      const FileSums sums = read_sums("checksum.json", json["files"]);
      EXPECT_TRUE(sums.contains("model.safetensors") && sums.contains("config.json"));
      check_sums(published.folder, sums);
    }
    store.keep_only({1, -1});
    EXPECT_FALSE(fs::exists(root + "/step_0"));
    EXPECT_TRUE(fs::exists(root + "/step_1/config.json"));
    EXPECT_FALSE(fs::exists(root + "/step_2"));
  }
  EXPECT_FALSE(fs::exists(root));
}

// Host memory that passes for a device's.
class DeviceCopy final : public DeviceWeights {
 public:
  explicit DeviceCopy(Parameters weights) : weights_(std::move(weights)) {}
  void copy_to(Parameters& host) const override { host = weights_; }
  std::string not_finite_text() const override { return ""; }
  uint32_t checksum() const override { return leeway::checksum(weights_); }

 private:
  Parameters weights_;
};

std::shared_ptr<const PolicySnapshot> on_a_device(PolicyVersion version) {
  const Parameters host = weights_of(version)->host();
  return std::make_shared<const PolicySnapshot>(host.config(), std::make_unique<DeviceCopy>(host),
                                                version);
}

TEST(WeightFolders, OfSharedMemoryAreWrittenWhenAServerNeedsThem) {
  const TestFolder folder;
  WeightFolders store(folder.at("broadcast"), [](const PolicySnapshot& weights) {
    return SharedWeights{.device = "GPU-1", .checksum = weights.checksum()};
  });
  std::weak_ptr<const PolicySnapshot> first, second;
  PublishedWeights one, two;
  {
    const auto weights = on_a_device(1);
    first = weights;
    one = store.publish(weights, 1);
    EXPECT_FALSE(weights->has_host());
  }
  ASSERT_TRUE(one.shared.has_value());
  EXPECT_EQ(one.shared->device, "GPU-1");
  EXPECT_EQ(one.checksum, weights_of(1)->checksum());
  EXPECT_EQ(one.folder, "");
  EXPECT_TRUE(fs::is_empty(store.folder()));
  EXPECT_FALSE(first.expired()) << "servers may be copying it";
  {
    const auto weights = on_a_device(2);
    second = weights;
    two = store.publish(weights, 2);
  }
  store.write(one);
  EXPECT_EQ(one.folder, store.folder() + "/step_1");
  EXPECT_EQ(checksum(load_parameters(one.folder)), one.checksum);
  store.keep_only({2});
  EXPECT_TRUE(first.expired());
  EXPECT_FALSE(second.expired());
  EXPECT_TRUE(fs::is_empty(store.folder()));
  store.keep_only({});
  EXPECT_TRUE(second.expired());
  // What is on the host alone is shared with nobody, and servers may have it already.
  PublishedWeights three = store.publish(weights_of(3), 3);
  EXPECT_FALSE(three.shared.has_value());
  EXPECT_EQ(three.checksum, weights_of(3)->checksum());
  EXPECT_TRUE(fs::is_empty(store.folder()));
  store.write(three);
  EXPECT_EQ(checksum(load_parameters(three.folder)), three.checksum);
  EXPECT_TRUE(store.take_log().empty());
}

TEST(WeightFolders, AreUsedWhenMemoryCannotBeShared) {
  const TestFolder folder;
  int asked = 0;
  WeightFolders store(folder.at("broadcast"), [&](const PolicySnapshot&) -> SharedWeights {
    ++asked;
    throw Error("the memory has no handle");
  });
  for (PolicyVersion version : {1, 2}) {
    const PublishedWeights published = store.publish(on_a_device(version), version);
    EXPECT_FALSE(published.shared.has_value());
    EXPECT_EQ(checksum(load_parameters(published.folder)), weights_of(version)->checksum());
    EXPECT_EQ(published.checksum, weights_of(version)->checksum());
  }
  EXPECT_EQ(asked, 1) << "it is not tried again";
  const std::vector<std::string> log = store.take_log();
  ASSERT_EQ(log.size(), 1u);
  EXPECT_NE(log[0].find("the memory has no handle"), std::string::npos) << log[0];
}

}  // namespace
}  // namespace leeway
