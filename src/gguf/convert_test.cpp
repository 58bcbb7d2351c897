// Whole models there and back, and what is refused on the way.

#include "gguf/convert.h"

#include <gtest/gtest.h>

#include "base/files.h"
#include "base/half.h"
#include "gguf/gguf_file.h"
#include "gguf/test_gguf.h"
#include "model/parameters.h"
#include "model/test_configs.h"
#include "text/tokenizer.h"

namespace leeway {
namespace {

using testing::bytes_of;
using testing::entry_of;
using testing::expect_refused;
using testing::gguf_config;
using testing::gguf_plan;
using testing::TestFolder;
using testing::write_gguf;

const std::vector<Family> kAllFamilies = {Family::llama, Family::qwen2, Family::qwen3};

ConvertOptions without_tokenizer() { return {.tokenizer = false}; }

TEST(Convert, AFolderComesBackFromF32) {
  for (const Family family : kAllFamilies) {
    for (const bool tied : {false, true}) {
      const TestFolder folder;
      const ModelConfig config = gguf_config(family, tied);
      write_gguf(folder.at("in.gguf"), gguf_plan(config));
      const Conversion made = convert_gguf_to_folder(folder.at("in.gguf"), folder.at("m"), {});
      EXPECT_EQ(made.architecture, name_of(family));
      EXPECT_TRUE(made.warnings.empty());
      const Parameters parameters = load_parameters(folder.at("m"));
      ModelConfig expected = config;
      expected.eos_token_id = {258};
      testing::expect_same(parameters.config(), expected);
      EXPECT_EQ(parameters.count(), made.parameters);
      // The values are small enough for F16 and BF16, so nothing is rounded.
      for (const GgufMatrices type : {GgufMatrices::f16, GgufMatrices::bf16, GgufMatrices::q8_0}) {
        const std::string name = std::string("back_") + name_of(type);
        convert_folder_to_gguf(folder.at("m"), folder.at(name + ".gguf"), {.type = type});
        convert_gguf_to_folder(folder.at(name + ".gguf"), folder.at(name), {});
        EXPECT_TRUE(testing::same_bits(load_parameters(folder.at(name)), parameters)) << name;
        EXPECT_EQ(bytes_of(folder.at(name + "/tokenizer.json")),
                  bytes_of(folder.at("m/tokenizer.json")));
        EXPECT_EQ(bytes_of(folder.at(name + "/tokenizer_config.json")),
                  bytes_of(folder.at("m/tokenizer_config.json")));
      }
    }
  }
}

// A row of llama's queries says where it comes from.
TEST(Convert, LlamasHeadsAreInTheOrderOfTransformers) {
  const TestFolder folder;
  for (const Family family : kAllFamilies) {
    const ModelConfig config = gguf_config(family);
    const std::string name = name_of(family);
    write_gguf(folder.at(name + ".gguf"), gguf_plan(config));
    convert_gguf_to_folder(folder.at(name + ".gguf"), folder.at(name), {});
    const GgufFile file(folder.at(name + ".gguf"));
    const Parameters parameters = load_parameters(folder.at(name));
    for (const char* which : {"q", "k"}) {
      const GgufTensor& tensor = *file.find_tensor(std::string("blk.1.attn_") + which + ".weight");
      std::vector<float> rows(static_cast<size_t>(tensor.rows() * tensor.row_length()));
      file.read_rows(tensor, 0, tensor.rows(), rows);
      const float* found =
          parameters.find(std::string("model.layers.1.self_attn.") + which + "_proj.weight");
      for (int64_t row = 0; row < tensor.rows(); ++row) {
        const int64_t head = row / 8, within = row % 8;
        const int64_t from =
            family == Family::llama ? head * 8 + (within % 4) * 2 + within / 4 : row;
        for (int64_t i = 0; i < tensor.row_length(); ++i) {
          ASSERT_EQ(found[row * tensor.row_length() + i],
                    rows[static_cast<size_t>(from * tensor.row_length() + i)]);
        }
      }
    }
  }
}

TEST(Convert, BiasesOfLlamaAreReorderedToo) {
  const TestFolder folder;
  ModelConfig config = gguf_config(Family::llama);
  config.qkv_bias = config.output_bias = true;
  Parameters parameters = testing::small_parameters(config);
  testing::roughen(parameters, 3);
  save_parameters(parameters, folder.at("m"));
  convert_folder_to_gguf(folder.at("m"), folder.at("m.gguf"),
                         {.type = GgufMatrices::bf16, .tokenizer = false});
  convert_gguf_to_folder(folder.at("m.gguf"), folder.at("back"), without_tokenizer());
  const Parameters back = load_parameters(folder.at("back"));
  EXPECT_TRUE(back.config().output_bias);
  for (size_t i = 0; i < parameters.table().size(); ++i) {
    const bool matrix = parameters.table()[i].shape.size() > 1;
    for (size_t j = 0; j < parameters.of(i).size(); ++j) {
      const float value = parameters.of(i)[j];
      ASSERT_EQ(back.of(i)[j], matrix ? from_bf16(to_bf16(value)) : value);
    }
  }
}

TEST(Convert, SixteenBitTensorsStayAsTheyAre) {
  const TestFolder folder;
  for (const auto& [type, dtype] :
       std::vector<std::pair<GgufType, DType>>{{GgufType::f16, DType::f16},
                                               {GgufType::bf16, DType::bf16},
                                               {GgufType::q8_0, DType::f32}}) {
    const std::string name = name_of(type);
    write_gguf(folder.at(name + ".gguf"), gguf_plan(gguf_config(Family::qwen3), type));
    convert_gguf_to_folder(folder.at(name + ".gguf"), folder.at(name), {});
    const SafetensorsFile file(folder.at(name + "/model.safetensors"));
    EXPECT_EQ(file.find("model.layers.0.mlp.up_proj.weight")->dtype, dtype);
    EXPECT_EQ(file.find("model.norm.weight")->dtype, DType::f32);
  }
  convert_gguf_to_folder(folder.at("Q8_0.gguf"), folder.at("half"), {.dtype = FolderDType::bf16});
  const SafetensorsFile file(folder.at("half/model.safetensors"));
  for (const StoredTensor& tensor : file.tensors()) EXPECT_EQ(tensor.dtype, DType::bf16);
  EXPECT_NE(bytes_of(folder.at("half/config.json")).find("\"dtype\": \"bfloat16\""),
            std::string::npos);
}

TEST(Convert, Llama3sRopeComesBack) {
  const TestFolder folder;
  ModelConfig config = gguf_config(Family::llama);
  config.llama3_rope = Llama3Rope{.factor = 32.0};
  config.rope_theta = 500000;
  config.head_dim = 64;
  save_parameters(testing::small_parameters(config), folder.at("m"));
  convert_folder_to_gguf(folder.at("m"), folder.at("m.gguf"), without_tokenizer());
  const GgufFile file(folder.at("m.gguf"));
  const GgufTensor* factors = file.find_tensor("rope_freqs.weight");
  ASSERT_NE(factors, nullptr);
  std::vector<float> values(32);
  file.read_rows(*factors, 0, 1, values);
  EXPECT_EQ(values.front(), 1.0f);
  EXPECT_EQ(values.back(), 32.0f);
  convert_gguf_to_folder(folder.at("m.gguf"), folder.at("back"), without_tokenizer());
  EXPECT_EQ(load_parameters(folder.at("back")).config().llama3_rope, config.llama3_rope);

  // Other factors are another scaling.
  GgufPlan plan = gguf_plan(gguf_config(Family::llama));
  plan.tensors.push_back({"rope_freqs.weight", {4}, GgufType::f32});
  write_gguf(folder.at("odd.gguf"), plan);
  expect_refused([&] { convert_gguf_to_folder(folder.at("odd.gguf"), folder.at("odd"), {}); },
                 {"odd.gguf: at byte", "rope_freqs.weight", "another scaling"});
}

TEST(Convert, WhatWouldBeComputedDifferentlyIsRefused) {
  const TestFolder folder;
  struct Case {
    std::function<void(GgufPlan&)> change;
    std::vector<std::string> words;
  };
  const auto set = [](const std::string& key, GgufValue value) {
    return [=](GgufPlan& plan) { entry_of(plan, key) = value; };
  };
  const auto erase = [](const std::string& key) {
    return [=](GgufPlan& plan) {
      std::erase_if(plan.metadata, [&](const auto& entry) { return entry.first == key; });
    };
  };
  const auto text = [](const char* value) { return std::string(value); };
  const std::vector<Case> cases = {
      {set("general.architecture", text("mamba")),
       {"general.architecture = \"mamba\"", "qwen3, qwen2, llama"}},
      {erase("general.architecture"), {"no general.architecture"}},
      {set("general.type", text("adapter")), {"general.type"}},
      {set("split.count", uint16_t{3}), {"split.count = 3", "llama-gguf-split"}},
      {erase("llama.block_count"), {"no llama.block_count"}},
      {set("llama.block_count", 2.5f), {"llama.block_count = 2.5", "integer"}},
      {set("llama.block_count", uint32_t{3}), {"tensors are missing: blk.2."}},
      {set("llama.block_count", uint32_t{1}), {"\"blk.1.", "is none of a llama"}},
      {set("llama.embedding_length", uint32_t{0}), {"llama.embedding_length = 0"}},
      {set("llama.feed_forward_length", uint32_t{96}), {"its shape is", "not"}},
      {set("llama.vocab_size", uint32_t{99}), {"llama.vocab_size = 99", "270 rows"}},
      {set("llama.attention.head_count_kv", uint32_t{3}), {"num_key_value_heads = 3"}},
      {set("llama.attention.value_length", uint32_t{4}), {"value_length = 4"}},
      {set("llama.rope.dimension_count", uint32_t{4}), {"rope.dimension_count = 4"}},
      {set("llama.expert_count", uint32_t{8}), {"llama.expert_count = 8", "experts"}},
      {set("llama.attention.sliding_window", uint32_t{16}), {"sliding_window = 16"}},
      {set("llama.rope.scaling.type", text("yarn")), {"\"yarn\""}},
      {set("llama.rope.scale_linear", 2.0f), {"rope.scale_linear = 2"}},
      {set("llama.logit_scale", 2.0f), {"llama.logit_scale"}},
      {set("llama.attention.layer_norm_rms_epsilon", 0.0f), {"rms_norm_eps"}},
      {[](GgufPlan& plan) { plan.tensors.erase(plan.tensors.begin() + 3); }, {"missing"}},
      {[](GgufPlan& plan) { plan.tensors[0].name = "extra"; }, {"no tensor token_embd.weight"}},
      {[](GgufPlan& plan) {
         plan.tensors.push_back({"extra", {3}, GgufType::f32});
       },
       {"tensor \"extra\"", "at byte"}},
      {set("tokenizer.ggml.model", text("llama")), {"tokenizer.ggml.model = \"llama\"", "gpt2"}},
      {erase("tokenizer.ggml.model"), {"no tokenizer.ggml.model", "--no-tokenizer"}},
      {set("tokenizer.ggml.pre", text("viking")), {"\"viking\"", "llama-bpe"}},
      {erase("tokenizer.ggml.pre"), {"no tokenizer.ggml.pre"}},
      {erase("tokenizer.ggml.merges"), {"no tokenizer.ggml.merges"}},
      {set("tokenizer.ggml.token_type", testing::int32_array({1, 1})), {"2 entries for 270"}},
      {set("tokenizer.ggml.eos_token_id", uint32_t{270}), {"eos_token_id = 270"}},
      {set("tokenizer.ggml.tokens", std::vector<std::string>(271, "a")),
       {"271 tokens", "270 rows"}},
      {set("tokenizer.ggml.tokens", std::vector<std::string>(270, "a")), {"occurs twice"}},
      {set("tokenizer.ggml.tokens", std::vector<std::string>{"\xFF"}), {"not UTF-8"}},
      {set("tokenizer.ggml.merges", std::vector<std::string>{"t  h"}), {"model.merges[0]"}},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(i);
    GgufPlan plan = gguf_plan(gguf_config(Family::llama));
    cases[i].change(plan);
    const std::string path = folder.at("bad.gguf");
    write_gguf(path, plan);
    std::vector<std::string> words = cases[i].words;
    words.push_back(path);
    expect_refused([&] { convert_gguf_to_folder(path, folder.at("out"), {}); }, words);
    EXPECT_EQ(folder.names(), std::vector<std::string>{"bad.gguf"}) << "nothing is left behind";
  }
}

TEST(Convert, AnUnknownKeyOfTheArchitectureIsSaid) {
  const TestFolder folder;
  GgufPlan plan = gguf_plan(gguf_config(Family::qwen2));
  entry_of(plan, "qwen2.some_new_thing") = uint32_t{7};
  write_gguf(folder.at("m.gguf"), plan);
  const Conversion made = convert_gguf_to_folder(folder.at("m.gguf"), folder.at("m"), {});
  ASSERT_EQ(made.warnings.size(), 1u);
  EXPECT_NE(made.warnings[0].find("qwen2.some_new_thing = 7"), std::string::npos);
}

TEST(Convert, ValuesThatAreNotFiniteAreRefused) {
  const TestFolder folder;
  write_gguf(folder.at("m.gguf"), gguf_plan(gguf_config(Family::llama)));
  std::string bytes = bytes_of(folder.at("m.gguf"));
  const GgufTensor tensor = *GgufFile(folder.at("m.gguf")).find_tensor("blk.0.ffn_up.weight");
  const float infinity = std::numeric_limits<float>::infinity();
  std::memcpy(bytes.data() + tensor.begin + 4 * 33, &infinity, sizeof infinity);
  folder.write("bad.gguf", bytes);
  expect_refused([&] { convert_gguf_to_folder(folder.at("bad.gguf"), folder.at("out"), {}); },
                 {"blk.0.ffn_up.weight", "inf at [1, 1]"});
  EXPECT_FALSE(is_present(folder.at("out")));

  // Too large for half precision, and not for bf16.
  Parameters parameters = testing::small_parameters(gguf_config(Family::llama));
  parameters.find("model.layers.1.mlp.up_proj.weight")[5] = 70000.0f;
  save_parameters(parameters, folder.at("large"));
  expect_refused(
      [&] { convert_folder_to_gguf(folder.at("large"), folder.at("l.gguf"), without_tokenizer()); },
      {"model.layers.1.mlp.up_proj.weight holds 70000 at [0, 5]", "--type bf16"});
  EXPECT_FALSE(is_present(folder.at("l.gguf")));
  convert_folder_to_gguf(folder.at("large"), folder.at("l.gguf"),
                         {.type = GgufMatrices::bf16, .tokenizer = false});
}

TEST(Convert, NothingIsOverwrittenUnlessToldTo) {
  const TestFolder folder;
  write_gguf(folder.at("m.gguf"), gguf_plan(gguf_config(Family::llama)));
  const auto convert = [&](bool overwrite) {
    convert_gguf_to_folder(folder.at("m.gguf"), folder.at("m/"), {.overwrite = overwrite});
  };
  make_folders(folder.at("m"));
  convert(false);  // an empty folder is as good as none
  expect_refused([&] { convert(false); }, {folder.at("m"), "--overwrite"});
  const std::string config = bytes_of(folder.at("m/config.json"));
  folder.write("m/config.json", "{}");
  convert(true);
  EXPECT_EQ(bytes_of(folder.at("m/config.json")), config);
  folder.write("m/mine.txt", "precious");
  expect_refused([&] { convert(true); }, {"holds mine.txt"});
  EXPECT_EQ(bytes_of(folder.at("m/mine.txt")), "precious");
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"m", "m.gguf"}));
  expect_refused([&] { convert_folder_to_gguf(folder.at("m"), folder.at("m.gguf"), {}); },
                 {"m.gguf: exists", "--overwrite"});
  convert_folder_to_gguf(folder.at("m"), folder.at("m.gguf"), {.overwrite = true});
}

// A stopped conversion and a full disk leave nothing.
TEST(Convert, AConversionThatEndsEarlyLeavesNothing) {
  const TestFolder folder;
  write_gguf(folder.at("m.gguf"), gguf_plan(gguf_config(Family::llama)));
  const ConvertOptions stopped = {.progress = [](int64_t, int64_t) { throw Error("stopped"); }};
  expect_refused([&] { convert_gguf_to_folder(folder.at("m.gguf"), folder.at("m"), stopped); },
                 {"stopped"});
  {
    const testing::FileSizeLimit limit(30000);
    expect_refused([&] { convert_gguf_to_folder(folder.at("m.gguf"), folder.at("m"), {}); },
                   {"m."});
  }
  EXPECT_EQ(folder.names(), std::vector<std::string>{"m.gguf"});
}

TEST(Convert, AMatrixThatHasNoBlocksBecomesF16) {
  const TestFolder folder;
  save_parameters(testing::small_parameters(testing::small_config(Family::qwen2)), folder.at("m"));
  const Conversion made = convert_folder_to_gguf(folder.at("m"), folder.at("m.gguf"),
                                                 {.type = GgufMatrices::q8_0, .tokenizer = false});
  EXPECT_FALSE(made.warnings.empty());
  EXPECT_EQ(made.types.count("Q8_0"), 1u);  // rows of 32: the output projection
  EXPECT_GT(made.types.at("F16"), 0u);
}

TEST(Convert, ATokenizerOfAnotherModelIsRefused) {
  const TestFolder folder;
  write_gguf(folder.at("m.gguf"), gguf_plan(gguf_config(Family::llama)));
  convert_gguf_to_folder(folder.at("m.gguf"), folder.at("m"), {});
  ModelConfig config = gguf_config(Family::llama);
  config.vocab_size = 200;
  save_parameters(testing::small_parameters(config), folder.at("m"));
  expect_refused([&] { convert_folder_to_gguf(folder.at("m"), folder.at("n.gguf"), {}); },
                 {"tokenizer.json", "259", "vocab_size = 200"});
  remove_tree(folder.at("m/tokenizer.json"));
  expect_refused([&] { convert_folder_to_gguf(folder.at("m"), folder.at("n.gguf"), {}); },
                 {"tokenizer.json", "--no-tokenizer"});  // its tokenizer_config.json is there
  expect_refused([&] { convert_folder_to_gguf(folder.path(), folder.at("n.gguf"), {}); },
                 {"config.json"});
}

TEST(Convert, WithoutATokenizerWeightsGoBothWaysWithAWarning) {
  const TestFolder folder;
  const Parameters weights = testing::small_parameters(gguf_config(Family::llama));
  make_folders(folder.at("m"));
  save_parameters(weights, folder.at("m"));
  const Conversion made = convert_folder_to_gguf(folder.at("m"), folder.at("m.gguf"), {});
  ASSERT_FALSE(made.warnings.empty());
  EXPECT_NE(made.warnings.front().find("tokenizer.json"), std::string::npos);
  const Conversion back = convert_gguf_to_folder(folder.at("m.gguf"), folder.at("back"), {});
  ASSERT_FALSE(back.warnings.empty());
  EXPECT_NE(back.warnings.front().find("no tokenizer"), std::string::npos);
  EXPECT_EQ(load_parameters(folder.at("back")).config().vocab_size, weights.config().vocab_size);
}

}  // namespace
}  // namespace leeway
