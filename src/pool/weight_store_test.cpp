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

}  // namespace
}  // namespace leeway
