// Models in several files: what is written, and which indexes are refused.

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <set>

#include "base/json.h"
#include "model/parameters.h"
#include "model/test_files.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;
using testing::bytes_of;
using testing::expect_refused;
using testing::same_bits;
using testing::small_config;
using testing::small_parameters;
using testing::TestFolder;

std::map<std::string, std::string> weight_map_of(const TestFolder& folder) {
  const rapidjson::Document index =
      parse_json("index", bytes_of(folder.at("model.safetensors.index.json")));
  std::map<std::string, std::string> map;
  for (const auto& member : index["weight_map"].GetObject()) {
    map[member.name.GetString()] = member.value.GetString();
  }
  return map;
}

TEST(SaveParameters, ShardsAreAsLargeAsAllowedAndIndexed) {
  const Parameters parameters = small_parameters(small_config(Family::qwen3, true));
  for (const int64_t shard_bytes : {1, 4800, 10000}) {
    SCOPED_TRACE(shard_bytes);
    const TestFolder folder;
    save_parameters(parameters, folder.path(), shard_bytes);
    const rapidjson::Document index =
        parse_json("index", bytes_of(folder.at("model.safetensors.index.json")));
    EXPECT_EQ(index["metadata"]["total_size"].GetInt64(), parameters.count() * 4);
    const std::map<std::string, std::string> map = weight_map_of(folder);
    EXPECT_EQ(map.size(), parameters.table().size());
    std::set<std::string> shards;
    for (const auto& [tensor, shard] : map) shards.insert(shard);
    EXPECT_EQ(shards.size() + 2, folder.names().size());
    int number = 0;
    int64_t before = shard_bytes;
    for (const std::string& shard : shards) {
      EXPECT_EQ(shard, fmt::format("model-{:05}-of-{:05}.safetensors", ++number, shards.size()));
      const SafetensorsFile file(folder.at(shard));
      int64_t bytes = 0, first = 0;
      for (const StoredTensor& tensor : file.tensors()) {
        EXPECT_EQ(map.at(tensor.name), shard);
        bytes += static_cast<int64_t>(tensor.byte_size());
      }
      EXPECT_TRUE(bytes <= shard_bytes || file.tensors().size() == 1) << shard << " " << bytes;
      // A tensor starts a shard only if it did not fit the previous one.
      for (const ParameterInfo& info : parameters.table()) {
        if (first == 0 && map.at(info.name) == shard) first = info.size() * 4;
      }
      EXPECT_GT(before + first, shard_bytes);
      before = bytes;
    }
  }
}

TEST(SaveParameters, FilesOfAnEarlierSaveAreRemovedAndOthersKept) {
  const Parameters parameters = small_parameters(small_config(Family::llama));
  const TestFolder folder;
  const std::vector<std::string> others = {"model-00001-of-00002.safetensors.bak",
                                           "model-1-of-2.safetensors", "optimizer.safetensors",
                                           "tokenizer.json", "xmodel-00001-of-00002.safetensors"};
  for (const std::string& name : others) folder.write(name, "mine");
  auto expect_files = [&](std::vector<std::string> names) {
    names.insert(names.end(), others.begin(), others.end());
    names.push_back("config.json");
    std::sort(names.begin(), names.end());
    EXPECT_EQ(folder.names(), names);
    EXPECT_TRUE(same_bits(load_parameters(folder.path()), parameters));
  };
  auto shards = [](int count) {
    std::vector<std::string> names = {"model.safetensors.index.json"};
    for (int i = 1; i <= count; ++i) {
      names.push_back(fmt::format("model-{:05}-of-{:05}.safetensors", i, count));
    }
    return names;
  };
  const int tensors = static_cast<int>(parameters.table().size());
  save_parameters(parameters, folder.path(), 1);
  expect_files(shards(tensors));
  save_parameters(parameters, folder.path(), 4 * parameters.count() - 1);
  expect_files(shards(2));
  save_parameters(parameters, folder.path());
  expect_files({"model.safetensors"});
  save_parameters(parameters, folder.path(), 1);
  expect_files(shards(tensors));
}

TEST(LoadParameters, AWholeFileIsTakenBeforeAnIndex) {
  const ModelConfig config = small_config(Family::llama);
  const Parameters whole = small_parameters(config, 1), sharded = small_parameters(config, 2);
  const TestFolder folder, other;
  save_parameters(sharded, folder.path(), 4 * sharded.count() - 1);
  save_parameters(whole, other.path());
  EXPECT_TRUE(same_bits(load_parameters(folder.path()), sharded));
  fs::copy_file(other.at("model.safetensors"), folder.at("model.safetensors"));
  EXPECT_TRUE(same_bits(load_parameters(folder.path()), whole));
}

class BadIndex : public ::testing::Test {
 protected:
  BadIndex() : parameters_(small_parameters(small_config(Family::llama))) {
    save_parameters(parameters_, folder_.path(), 4 * parameters_.count() - 1);
    index_ = folder_.at("model.safetensors.index.json");
    text_ = bytes_of(index_);
  }
  // The index with the shard of `tensor` replaced.
  std::string with(const std::string& tensor, const std::string& shard) const {
    std::string text = text_;
    const size_t key = text.find("\"" + tensor + "\": \"");
    const size_t start = key + tensor.size() + 5;
    EXPECT_NE(key, std::string::npos);
    return text.replace(start, text.find('"', start) - start, shard);
  }
  void expect_refused_with(const std::string& text, const std::vector<std::string>& words) {
    folder_.write("model.safetensors.index.json", text);
    expect_refused([&] { load_parameters(folder_.path()); }, words);
  }

  TestFolder folder_;
  Parameters parameters_;
  std::string index_, text_;
  const std::string first_ = "model-00001-of-00002.safetensors";
  const std::string last_ = "model-00002-of-00002.safetensors";
};

TEST_F(BadIndex, ThatIsNoIndexIsRefused) {
  expect_refused_with("", {index_ + " line 1"});
  for (const char* text : {"[]", "{}", R"({"weight_map": []})", R"({"weight_map": {}})"}) {
    expect_refused_with(text, {index_, "weight_map must be an object"});
  }
  expect_refused_with(R"({"weight_map": {"a": 3}})", {index_, "\"a\" must name a file"});
  expect_refused_with(R"({"weight_map": {"a": "x", "a": "y"}})", {index_, "\"a\" is given twice"});
}

TEST_F(BadIndex, ThatLeavesTheFolderIsRefused) {
  for (const char* shard : {"../x.safetensors", "/etc/passwd", "..", ".", "", "a/b", "..\\\\x",
                            "x\\u0000y", "./model.safetensors"}) {
    expect_refused_with(with("lm_head.weight", shard),
                        {index_, "\"lm_head.weight\"", "file in the same folder"});
  }
}

TEST_F(BadIndex, ThatNamesAMissingShardIsRefused) {
  fs::remove(folder_.at(last_));
  expect_refused_with(text_, {index_, last_, "missing"});
}

TEST_F(BadIndex, ThatPutsATensorInTheWrongShardIsRefused) {
  expect_refused_with(with("lm_head.weight", first_), {first_, "lm_head.weight", "is not in"});
  // Another tensor still refers to the tensor's true shard.
  expect_refused_with(
      with("model.embed_tokens.weight", last_),
      {folder_.at(first_), "\"model.embed_tokens.weight\"", "lists it in \"" + last_});
}

TEST_F(BadIndex, ThatDoesNotNameATensorOfItsShardsIsRefused) {
  std::string text = text_;
  const size_t at = text.find("\"model.norm.weight\"");
  text.replace(at, 19, "\"model.other\"");
  expect_refused_with(text, {"\"model.norm.weight\"", "does not list it"});
}

TEST_F(BadIndex, ThatNamesATensorNowhereIsRefused) {
  std::string text = text_;
  text.insert(text.find("\"model.norm.weight\""), "\"extra\": \"" + first_ + "\", ");
  expect_refused_with(text, {index_, "\"extra\" is not in \"" + first_});
}

TEST_F(BadIndex, WithATruncatedShardIsRefused) {
  fs::resize_file(folder_.at(first_), fs::file_size(folder_.at(first_)) - 4);
  expect_refused_with(text_, {folder_.at(first_), "truncated"});
}

}  // namespace
}  // namespace leeway
