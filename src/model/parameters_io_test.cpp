// Loading, refusing and saving Hugging Face folders.

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "base/json.h"
#include "base/rng.h"
#include "model/parameters.h"
#include "model/test_files.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;
using testing::as_bytes;
using testing::bytes_of;
using testing::expect_refused;
using testing::FileSizeLimit;
using testing::kGoldens;
using testing::RawTensor;
using testing::safetensors_of;
using testing::same_bits;
using testing::small_config;
using testing::small_parameters;
using testing::TestFolder;

// The parameters as tensors of a file, in float32.
std::vector<RawTensor> raw_tensors(const Parameters& parameters) {
  std::vector<RawTensor> tensors;
  for (size_t i = 0; i < parameters.table().size(); ++i) {
    const ParameterInfo& info = parameters.table()[i];
    const std::span<const float> values = parameters.of(i);
    tensors.push_back(
        {info.name, "F32", info.shape, as_bytes(std::vector<float>(values.begin(), values.end()))});
  }
  return tensors;
}

RawTensor& named(std::vector<RawTensor>& tensors, const std::string& name) {
  for (RawTensor& tensor : tensors) {
    if (tensor.name == name) return tensor;
  }
  throw std::runtime_error("no " + name);
}

void write_model(const TestFolder& folder, const ModelConfig& config,
                 const std::vector<RawTensor>& tensors) {
  folder.write("config.json", model_config_json(config));
  folder.write("model.safetensors", safetensors_of(tensors));
}

// ---------------------------------------------------------------------------------------------
// Goldens and round trips

TEST(LoadParameters, GoldenFoldersAreLoadedAsTheyAre) {
  for (const char* golden : {"/qwen3-tied", "/llama3-rope"}) {
    const Parameters parameters = load_parameters(kGoldens + golden);
    const SafetensorsFile file(kGoldens + golden + "/model.safetensors");
    const SafetensorsFile gradients(kGoldens + golden + "/golden.safetensors");
    for (size_t i = 0; i < parameters.table().size(); ++i) {
      const ParameterInfo& info = parameters.table()[i];
      const StoredTensor* tensor = file.find(info.name);
      ASSERT_NE(tensor, nullptr);
      const std::string bytes = tensor->bytes();
      EXPECT_EQ(std::memcmp(parameters.of(i).data(), bytes.data(), bytes.size()), 0);
      const StoredTensor* gradient = gradients.find("grad." + info.name);
      ASSERT_NE(gradient, nullptr) << info.name;
      EXPECT_EQ(gradient->shape, info.shape);
    }
  }
}

// The folders were written by transformers; saving writes the same bytes.
TEST(SaveParameters, AGoldenFolderComesBackByteForByte) {
  for (const char* golden : {"/qwen3-tied", "/llama3-rope"}) {
    const TestFolder folder;
    save_parameters(load_parameters(kGoldens + golden), folder.path());
    EXPECT_EQ(folder.names(), (std::vector<std::string>{"config.json", "model.safetensors"}));
    EXPECT_TRUE(bytes_of(folder.at("model.safetensors")) ==
                bytes_of(kGoldens + golden + "/model.safetensors"));
  }
}

TEST(SaveParameters, EveryFamilyComesBackWholeAndInShards) {
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    for (const bool tied : {false, true}) {
      for (const bool bias : {false, true}) {
        const Parameters parameters = small_parameters(small_config(family, tied, bias));
        for (const int64_t shard_bytes : {int64_t{15000}, int64_t{1} << 40}) {
          const TestFolder folder;
          save_parameters(parameters, folder.at("new/folder"), shard_bytes);
          const Parameters back = load_parameters(folder.at("new/folder"));
          EXPECT_TRUE(same_bits(parameters, back));
          EXPECT_EQ(back.config().family, family);
          EXPECT_EQ(fs::exists(folder.at("new/folder/model.safetensors")), shard_bytes > 1 << 30);
        }
      }
    }
  }
}

// Each float32 has either only its upper 16 bits set, or is a random number of 11 bits.
TEST(LoadParameters, HalfPrecisionAndDoublesAreExactAndSurviveASave) {
  const ModelConfig config = small_config(Family::qwen3);
  const Parameters random = small_parameters(config);
  for (const std::string dtype : {"BF16", "F16", "F64"}) {
    SCOPED_TRACE(dtype);
    Rng rng(4);
    Parameters expected(config);
    std::vector<RawTensor> tensors = raw_tensors(random);
    for (size_t i = 0; i < tensors.size(); ++i) {
      tensors[i].dtype = dtype;
      tensors[i].bytes.clear();
      for (float& value : expected.of(i)) {
        if (dtype == "F64") {
          value = static_cast<float>(rng.normal());
          tensors[i].bytes += as_bytes<double>({value});
        } else if (dtype == "BF16") {
          const float normal = static_cast<float>(rng.normal());
          const uint32_t upper = std::bit_cast<uint32_t>(normal) & 0xFFFF0000u;
          value = std::bit_cast<float>(upper);
          tensors[i].bytes += as_bytes<uint16_t>({static_cast<uint16_t>(upper >> 16)});
        } else {
          // Sign, exponent 1 .. 30, fraction: 2^(e - 15) (1 + f / 1024).
          const uint64_t sign = rng.below(2), exponent = 1 + rng.below(30), f = rng.below(1024);
          value = (sign == 0 ? 1.0f : -1.0f) * std::ldexp(1.0f + static_cast<float>(f) / 1024.0f,
                                                          static_cast<int>(exponent) - 15);
          tensors[i].bytes +=
              as_bytes<uint16_t>({static_cast<uint16_t>(sign << 15 | exponent << 10 | f)});
        }
      }
    }
    const TestFolder folder;
    write_model(folder, config, tensors);
    const Parameters loaded = load_parameters(folder.path());
    EXPECT_TRUE(same_bits(loaded, expected));
    for (const int64_t shard_bytes : {int64_t{15000}, int64_t{1} << 40}) {
      save_parameters(loaded, folder.path(), shard_bytes);
      EXPECT_TRUE(same_bits(load_parameters(folder.path()), expected));
    }
  }
}

TEST(SaveParameters, TheConfigKeepsItsKeysAndSaysFloat32) {
  const TestFolder folder;
  const ModelConfig config = small_config(Family::llama);
  save_parameters(small_parameters(config), folder.path());
  std::string text = bytes_of(folder.at("config.json"));
  text.replace(text.find('{'), 1, "{\"mine\": [1, {}], ");
  for (size_t at; (at = text.find("\"float32\"")) != std::string::npos;) {
    text.replace(at, 9, "\"bfloat16\"");
  }
  folder.write("config.json", text);
  save_parameters(load_parameters(folder.path()), folder.path());
  const rapidjson::Document json = parse_json("written", bytes_of(folder.at("config.json")));
  EXPECT_EQ(json["mine"].Size(), 2u);
  EXPECT_STREQ(json["dtype"].GetString(), "float32");
  EXPECT_STREQ(json["torch_dtype"].GetString(), "float32");
}

TEST(LoadParameters, ATiedModelMayStoreItsHeadIfItIsTheEmbedding) {
  const ModelConfig config = small_config(Family::qwen3, true);
  const Parameters parameters = small_parameters(config);
  std::vector<RawTensor> tensors = raw_tensors(parameters);
  RawTensor head = tensors[0];
  head.name = "lm_head.weight";
  tensors.push_back(head);
  const TestFolder folder;
  write_model(folder, config, tensors);
  EXPECT_TRUE(same_bits(load_parameters(folder.path()), parameters));

  float value;
  std::memcpy(&value, &tensors.back().bytes[(24 + 5) * 4], 4);
  value = std::nextafter(value, 1.0f);
  std::memcpy(&tensors.back().bytes[(24 + 5) * 4], &value, 4);
  write_model(folder, config, tensors);
  expect_refused(
      [&] { load_parameters(folder.path()); },
      {folder.at("model.safetensors"), "lm_head.weight", "[1, 5]", "tie_word_embeddings"});
  tensors.back() = head;
  tensors.back().shape = {25, 48};
  write_model(folder, config, tensors);
  expect_refused([&] { load_parameters(folder.path()); },
                 {"lm_head.weight", "is [25, 48], not [50, 24]"});
}

TEST(LoadParameters, OldRotaryBuffersAreIgnored) {
  const ModelConfig config = small_config(Family::llama);
  const Parameters parameters = small_parameters(config);
  std::vector<RawTensor> tensors = raw_tensors(parameters);
  tensors.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", "F32", {1}, "abcd"});
  const TestFolder folder;
  write_model(folder, config, tensors);
  EXPECT_TRUE(same_bits(load_parameters(folder.path()), parameters));
}

// ---------------------------------------------------------------------------------------------
// Refusals

// A small llama whose tensors are modified before they are written.
void expect_refused_after(const std::function<void(std::vector<RawTensor>&)>& change,
                          std::vector<std::string> words) {
  const TestFolder folder;
  const ModelConfig config = small_config(Family::llama);
  std::vector<RawTensor> tensors = raw_tensors(small_parameters(config));
  change(tensors);
  write_model(folder, config, tensors);
  words.push_back(folder.at("model.safetensors"));
  expect_refused([&] { load_parameters(folder.path()); }, words);
}

TEST(LoadParameters, MissingTensorsAreListed) {
  expect_refused_after(
      [](auto& tensors) {
        std::erase_if(tensors,
                      [](const RawTensor& tensor) { return tensor.name == "model.norm.weight"; });
      },
      {"1 tensor missing: model.norm.weight;"});
  expect_refused_after(
      [](auto& tensors) {
        std::erase_if(tensors, [](const RawTensor& tensor) {
          return tensor.name.starts_with("model.layers.1.");
        });
      },
      {"9 tensors missing: model.layers.1.input_layernorm.weight, ", " and 4 more",
       "num_hidden_layers = 2"});
  expect_refused_after([](auto& tensors) { tensors.pop_back(); },
                       {"1 tensor missing: lm_head.weight", "tie_word_embeddings"});
}

TEST(LoadParameters, ExtraTensorsAreListed) {
  expect_refused_after(
      [](auto& tensors) {
        tensors.push_back({"model.layers.0.self_attn.q_proj.bias", "U8", {1}, "x"});
        tensors.push_back({"score.weight", "U8", {1}, "x"});
      },
      {"2 tensors not of this model: \"model.layers.0.self_attn.q_proj.bias\", \"score.weight\""});
  expect_refused_after([](auto& tensors) { tensors[0].name = "embed_tokens.weight"; },
                       {"1 tensor missing: model.embed_tokens.weight",
                        "1 tensor not of this model: \"embed_tokens.weight\""});
}

TEST(LoadParameters, MisshapenTensorsAreNamedWithBothShapes) {
  expect_refused_after(
      [](auto& tensors) {
        tensors[0].shape = {25, 48};
      },
      {"model.embed_tokens.weight is [25, 48], not [50, 24]", "vocab_size = 50"});
  expect_refused_after(
      [](auto& tensors) {
        named(tensors, "model.norm.weight").shape = {24, 1};
      },
      {"model.norm.weight is [24, 1], not [24]"});
}

TEST(LoadParameters, TensorsThatAreNoFloatsAreRefused) {
  expect_refused_after([](auto& tensors) { named(tensors, "model.norm.weight").dtype = "I32"; },
                       {"model.norm.weight", "dtype I32"});
}

TEST(LoadParameters, ValuesThatAreNotFiniteAreRefusedWithTheirPlace) {
  auto put = [](auto& tensors, size_t at, float value) {
    std::memcpy(&named(tensors, "model.layers.1.mlp.up_proj.weight").bytes[at * 4], &value, 4);
  };
  expect_refused_after([&](auto& tensors) { put(tensors, 24 * 39 + 23, NAN); },
                       {"model.layers.1.mlp.up_proj.weight", "holds nan at [39, 23]"});
  expect_refused_after([&](auto& tensors) { put(tensors, 0, -INFINITY); },
                       {"model.layers.1.mlp.up_proj.weight", "holds -inf at [0, 0]"});
  expect_refused_after(
      [&](auto& tensors) {
        RawTensor& norm = named(tensors, "model.norm.weight");
        std::vector<double> values(24, 1.0);
        values[7] = 1e300;
        norm.dtype = "F64";
        norm.bytes = as_bytes(values);
      },
      {"model.norm.weight", "holds inf at [7]", "float32"});
}

TEST(LoadParameters, ATruncatedFileIsRefused) {
  const TestFolder folder;
  save_parameters(small_parameters(small_config(Family::qwen2)), folder.path());
  fs::resize_file(folder.at("model.safetensors"),
                  fs::file_size(folder.at("model.safetensors")) - 1);
  expect_refused([&] { load_parameters(folder.path()); },
                 {folder.at("model.safetensors"), "truncated"});
}

TEST(LoadParameters, AHugeConfigIsRefusedBeforeMemoryIsTaken) {
  const TestFolder folder;
  ModelConfig config = small_config(Family::llama);
  std::vector<RawTensor> tensors = raw_tensors(small_parameters(config));
  config.vocab_size = int64_t{1} << 30;
  config.intermediate_size = int64_t{1} << 22;
  config.num_hidden_layers = 4096;
  write_model(folder, config, tensors);
  expect_refused([&] { load_parameters(folder.path()); },
                 {"36846 tensors missing", "[50, 24], not [1073741824, 24]"});
}

TEST(LoadParameters, AFolderWithoutWeightsIsRefused) {
  const TestFolder folder;
  expect_refused([&] { load_parameters(folder.path()); },
                 {folder.at("config.json"), "No such file"});
  folder.write("config.json", model_config_json(small_config(Family::llama)));
  expect_refused([&] { load_parameters(folder.path()); },
                 {folder.path(), "neither model.safetensors nor model.safetensors.index.json"});
  folder.write("pytorch_model.bin", "x");
  expect_refused([&] { load_parameters(folder.path()); }, {"pytorch_model.bin is not read"});
  fs::create_symlink("gone", folder.at("model.safetensors"));
  expect_refused([&] { load_parameters(folder.path()); },
                 {folder.at("model.safetensors"), "No such file"});
}

// ---------------------------------------------------------------------------------------------
// Write errors

TEST(SaveParameters, AFullDiskLeavesTheOldModel) {
  const ModelConfig config = small_config(Family::llama);
  const Parameters old = small_parameters(config, 1), fresh = small_parameters(config, 2);
  const TestFolder folder;
  save_parameters(old, folder.path());
  {
    const FileSizeLimit limit(20000);
    expect_refused([&] { save_parameters(fresh, folder.path()); },
                   {folder.at("model.safetensors"), "cannot write"});
  }
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"config.json", "model.safetensors"}));
  EXPECT_TRUE(same_bits(load_parameters(folder.path()), old));
}

TEST(SaveParameters, AFileWhereTheFolderShouldBeIsNamed) {
  const TestFolder folder;
  folder.write("x", "");
  const Parameters parameters(small_config(Family::llama));
  expect_refused([&] { save_parameters(parameters, folder.at("x")); }, {folder.at("x")});
  expect_refused([&] { save_parameters(parameters, folder.at("x/y")); },
                 {folder.at("x/y"), "cannot create"});
  expect_refused([&] { save_parameters(parameters, folder.at("z"), 0); }, {"shard_bytes = 0"});
}

TEST(LoadParameters, FilesThatAreNotAsTheirChecksumsSayAreRefused) {
  const Parameters parameters = small_parameters(small_config(Family::qwen3));
  for (const int64_t shard_bytes : {int64_t{1} << 30, int64_t{4096}}) {
    const TestFolder folder;
    const FileSums sums = save_parameters(parameters, folder.path(), shard_bytes);
    EXPECT_EQ(sums.size(), folder.names().size());
    write_checksums(folder.path(), sums);
    EXPECT_TRUE(same_bits(load_parameters(folder.path()), parameters));
    for (const auto& [name, sum] : sums) {
      if (!name.ends_with(".safetensors")) continue;
      std::string bytes = bytes_of(folder.at(name));
      bytes.back() = static_cast<char>(bytes.back() ^ 1);  // a slightly different number
      folder.write(name, bytes);
      expect_refused([&] { load_parameters(folder.path()); }, {name + ": is damaged"});
      bytes.back() = static_cast<char>(bytes.back() ^ 1);
      folder.write(name, bytes);
    }
    EXPECT_TRUE(same_bits(load_parameters(folder.path()), parameters));
    // After saving again, the old checksums would not match the new files.
    save_parameters(small_parameters(small_config(Family::llama)), folder.path());
    load_parameters(folder.path());
  }
}

}  // namespace
}  // namespace leeway
