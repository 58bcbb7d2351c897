// Reading and refusing config.json.

#include "model/model_config.h"

#include <cmath>
#include <map>

#include "base/files.h"
#include "base/folders.h"
#include "base/test_folder.h"
#include "model/test_configs.h"

namespace leeway {
namespace {

using testing::edited;
using testing::expect_refused;
using testing::expect_same;
using testing::kGoldens;
using testing::kLlama;
using testing::kQwen2;
using testing::kQwen3;
using testing::parsed;
using testing::small_config;

// ---------------------------------------------------------------------------------------------
// Reading

TEST(ModelConfig, ReadsAQwen3File) {
  const ModelConfig config = parsed(kQwen3);
  ModelConfig expected;
  expected.family = Family::qwen3;
  expected.vocab_size = 151936;
  expected.hidden_size = 1024;
  expected.intermediate_size = 3072;
  expected.num_hidden_layers = 28;
  expected.num_attention_heads = 16;
  expected.num_key_value_heads = 8;
  expected.head_dim = 128;
  expected.max_position_embeddings = 40960;
  expected.rope_theta = 1e6;
  expected.tie_word_embeddings = true;
  expected.qk_norm = true;
  expected.eos_token_id = {151645};
  expect_same(config, expected);
  EXPECT_EQ(config.source, kQwen3);
}

TEST(ModelConfig, ReadsAQwen2FileWithItsBiasesAndAnUnusedWindow) {
  const ModelConfig config = parsed(kQwen2);
  EXPECT_EQ(config.family, Family::qwen2);
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_TRUE(config.qkv_bias);
  EXPECT_FALSE(config.output_bias);
  EXPECT_FALSE(config.qk_norm);
  // transformers ignores the key for this family.
  expect_same(parsed(edited(kQwen2, "attention_bias", "true")), config);
  expect_same(parsed(edited(kQwen2, "attention_bias", "false")), config);
}

TEST(ModelConfig, ReadsALlama3File) {
  const ModelConfig config = parsed(kLlama);
  EXPECT_EQ(config.family, Family::llama);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.rms_norm_eps, 1e-5);
  EXPECT_EQ(config.rope_theta, 5e5);
  EXPECT_EQ(config.llama3_rope, (Llama3Rope{8.0, 1.0, 4.0, 8192}));
  EXPECT_EQ(config.eos_token_id, (std::vector<int32_t>{128001, 128008, 128009}));
  EXPECT_FALSE(config.qkv_bias || config.output_bias || config.qk_norm);
}

TEST(ModelConfig, ReadsTheGoldenFolders) {
  const ModelConfig qwen3 = load_model_config(kGoldens + "/qwen3-tied");
  EXPECT_EQ(qwen3.family, Family::qwen3);
  EXPECT_EQ(qwen3.head_dim, 32);
  EXPECT_EQ(qwen3.rope_theta, 1e6);
  EXPECT_FALSE(qwen3.llama3_rope);
  EXPECT_TRUE(qwen3.eos_token_id.empty());
  const ModelConfig llama = load_model_config(kGoldens + "/llama3-rope");
  EXPECT_EQ(llama.rope_theta, 5e5);
  EXPECT_EQ(llama.llama3_rope, (Llama3Rope{8.0, 1.0, 4.0, 128}));
  EXPECT_EQ(llama.eos_token_id, std::vector<int32_t>{2});
}

TEST(ModelConfig, BothSpellingsOfTheRotarySettingsSayTheSame) {
  const std::string bare = edited(edited(kLlama, "rope_scaling", ""), "rope_theta", "");
  const std::string llama3 = R"("factor": 8, "low_freq_factor": 1, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192)";
  const ModelConfig config = parsed(kLlama);
  const std::string modern = "{\"rope_type\": \"llama3\", \"rope_theta\": 5e5, " + llama3 + "}";
  expect_same(parsed(edited(bare, "rope_parameters", modern)), config);
  expect_same(parsed(edited(kLlama, "rope_parameters", modern)), config);
  const std::string old = "{\"type\": \"llama3\", " + llama3 + "}";
  expect_same(parsed(edited(kLlama, "rope_scaling", old)), config);
  const std::string both = "{\"type\": \"llama3\", \"rope_type\": \"llama3\", " + llama3 + "}";
  expect_same(parsed(edited(kLlama, "rope_scaling", both)), config);
}

TEST(ModelConfig, NoRotaryTypeIsTheDefaultOne) {
  const std::string bare = edited(edited(kLlama, "rope_scaling", ""), "rope_theta", "");
  for (const char* value : {"", "null", "{}", R"({"rope_type": "default"})",
                            R"({"type": "default"})", R"({"rope_type": null})"}) {
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
      const ModelConfig config = parsed(edited(bare, key, value));
      EXPECT_FALSE(config.llama3_rope) << key << value;
      EXPECT_EQ(config.rope_theta, 10000.0) << key << value;
    }
  }
}

TEST(ModelConfig, AbsentAndNullKeysHaveTheirDefaults) {
  for (const char* nothing : {"", "null"}) {
    EXPECT_EQ(parsed(edited(kQwen3, "head_dim", nothing)).head_dim, 128);
    EXPECT_EQ(parsed(edited(kLlama, "head_dim", nothing)).head_dim, 4096 / 32);
    EXPECT_EQ(parsed(edited(kQwen2, "num_key_value_heads", nothing)).num_key_value_heads, 14);
    EXPECT_EQ(parsed(edited(kLlama, "rms_norm_eps", nothing)).rms_norm_eps, 1e-6);
    EXPECT_EQ(parsed(edited(kLlama, "rope_theta", nothing)).rope_theta, 10000.0);
    EXPECT_EQ(parsed(edited(kQwen2, "initializer_range", nothing)).initializer_range, 0.02);
    EXPECT_FALSE(parsed(edited(kQwen3, "tie_word_embeddings", nothing)).tie_word_embeddings);
    EXPECT_TRUE(parsed(edited(kLlama, "eos_token_id", nothing)).eos_token_id.empty());
    EXPECT_EQ(parsed(edited(kLlama, "hidden_act", nothing)).family, Family::llama);
    EXPECT_EQ(parsed(edited(kQwen3, "quantization_config", nothing)).family, Family::qwen3);
    EXPECT_EQ(parsed(edited(kQwen3, "architectures", nothing)).family, Family::qwen3);
    EXPECT_EQ(parsed(edited(kQwen2, "model_type", nothing)).family, Family::qwen2);
  }
}

TEST(ModelConfig, AttentionBiasIsOfAllFourProjections) {
  for (const std::string& text : {kQwen3, kLlama}) {
    const ModelConfig config = parsed(edited(text, "attention_bias", "true"));
    EXPECT_TRUE(config.qkv_bias);
    EXPECT_TRUE(config.output_bias);
  }
}

// ---------------------------------------------------------------------------------------------
// Refusals

struct Row {
  std::string name;
  const std::string& base;
  std::string key, value;          // empty value: the key is removed
  std::vector<std::string> words;  // expected in the message, besides the file and the key
};
void PrintTo(const Row& row, std::ostream* stream) { *stream << row.name; }

std::string row_name(const ::testing::TestParamInfo<Row>& info) { return info.param.name; }

class BadModelConfig : public ::testing::TestWithParam<Row> {};

TEST_P(BadModelConfig, IsRefusedWithKeyAndValue) {
  const Row& row = GetParam();
  std::vector<std::string> words = row.words;
  words.insert(words.end(), {"config.json: ", row.key});
  expect_refused([&] { parsed(edited(row.base, row.key, row.value)); }, words);
}

const std::vector<Row> kRows = {
    {"AnotherArchitecture",
     kQwen3,
     "architectures",
     R"(["MistralForCausalLM"])",
     {"MistralForCausalLM", "Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"}},
    {"ARewardModel", kQwen2, "architectures", R"(["Qwen2ForRewardModel"])", {"not supported"}},
    {"TwoArchitectures",
     kQwen2,
     "architectures",
     R"(["Qwen2ForCausalLM", "LlamaForCausalLM"])",
     {"LlamaForCausalLM", "not supported"}},
    {"TextForArchitectures", kQwen3, "architectures", R"("Qwen3ForCausalLM")", {"list"}},
    {"ANumberInArchitectures", kQwen3, "architectures", "[3]", {"list of texts"}},
    {"AModelTypeOfAnotherFamily",
     kQwen3,
     "model_type",
     R"("llama")",
     {"\"llama\"", "Qwen3ForCausalLM"}},
    {"ANumberForModelType", kQwen3, "model_type", "3", {"= 3: must be text"}},
    {"NoVocabulary", kQwen3, "vocab_size", "", {"is missing"}},
    {"NoHiddenSize", kQwen3, "hidden_size", "null", {"is missing"}},
    {"NoIntermediateSize", kQwen3, "intermediate_size", "", {"is missing"}},
    {"NoLayerCount", kQwen3, "num_hidden_layers", "", {"is missing"}},
    {"NoHeadCount", kQwen3, "num_attention_heads", "", {"is missing"}},
    {"NoPositionCount", kQwen3, "max_position_embeddings", "", {"is missing"}},
    {"NoLayers", kQwen3, "num_hidden_layers", "0", {"= 0: must be a whole number from 1"}},
    {"NoKeyHeads", kQwen3, "num_key_value_heads", "0", {"= 0: must be a whole number from 1"}},
    {"NoHeadSize", kQwen3, "head_dim", "0", {"= 0: must be a whole number from 1"}},
    {"ANegativeSize", kQwen3, "hidden_size", "-1024", {"= -1024: must be"}},
    {"AFraction", kQwen3, "hidden_size", "1024.5", {"= 1024.5: must be a whole number"}},
    {"AFloat", kQwen3, "hidden_size", "1024.0", {"must be a whole number"}},
    {"TextForASize", kQwen3, "hidden_size", R"("1024")", {"= \"1024\": must be"}},
    {"AFlagForASize", kQwen3, "hidden_size", "true", {"= true: must be"}},
    {"AHugeSize", kQwen3, "intermediate_size", "9223372036854775807", {"must be", "to 4194304"}},
    {"ASizeBeyondIntegers", kQwen3, "vocab_size", "99999999999999999999", {"must be"}},
    {"TooManyPositions", kQwen3, "max_position_embeddings", "1073741825", {"to 1073741824"}},
    {"HeadsThatDoNotDivideTheHiddenSize",
     kLlama,
     "num_attention_heads",
     "24",
     {"does not divide hidden_size = 4096"}},
    {"KeyHeadsThatDoNotDivide",
     kLlama,
     "num_key_value_heads",
     "5",
     {"= 5: does not divide num_attention_heads = 32"}},
    {"AnOddHead", kQwen3, "head_dim", "127", {"= 127: must be even"}},
    {"AnotherActivation", kQwen3, "hidden_act", R"("gelu")", {"= \"gelu\"", "silu"}},
    {"AnMlpBias", kLlama, "mlp_bias", "true", {"= true: not supported"}},
    {"ASlidingWindow", kQwen2, "use_sliding_window", "true", {"= true: sliding"}},
    {"TextForAFlag", kQwen2, "tie_word_embeddings", R"("yes")", {"= \"yes\": must be true or"}},
    {"ALayerWithAWindow",
     kQwen3,
     "layer_types",
     R"(["full_attention", "sliding_attention"])",
     {"layer 1", "sliding_attention"}},
    {"TooFewLayerTypes",
     kQwen3,
     "layer_types",
     R"(["full_attention"])",
     {"names 1 layers", "num_hidden_layers = 28"}},
    {"QuantizedWeights",
     kQwen3,
     "quantization_config",
     R"({"quant_method": "fp8"})",
     {"quantized weights are not supported"}},
    {"AZeroTheta", kQwen3, "rope_theta", "0", {"must be positive"}},
    {"ANegativeTheta", kQwen3, "rope_theta", "-1e4", {"= -10000: must be positive"}},
    {"TextForTheta", kQwen3, "rope_theta", R"("1e6")", {"must be a number"}},
    {"AZeroEps", kQwen3, "rms_norm_eps", "0.0", {"must be positive"}},
    {"ANegativeInitialRange", kQwen3, "initializer_range", "-0.1", {"must be from 0 to 1"}},
    {"PartialRotary", kQwen3, "partial_rotary_factor", "0.5", {"= 0.5: not supported"}},
    {"AListForScaling", kQwen3, "rope_scaling", "[]", {"= []: must be an object"}},
    {"LinearScaling",
     kLlama,
     "rope_scaling",
     R"({"type": "linear", "factor": 2.0})",
     {"rope_scaling.type = \"linear\": not supported; supported: default, llama3"}},
    {"YarnScaling",
     kLlama,
     "rope_scaling",
     R"({"rope_type": "yarn", "factor": 4.0})",
     {"rope_scaling.rope_type = \"yarn\": not supported"}},
    {"LongRope",
     kLlama,
     "rope_parameters",
     R"({"rope_type": "longrope"})",
     {"rope_parameters.rope_type = \"longrope\": not supported"}},
    {"DynamicScaling",
     kLlama,
     "rope_parameters",
     R"({"rope_type": "dynamic", "factor": 2})",
     {"\"dynamic\""}},
    {"ANumberForTheRopeType", kLlama, "rope_scaling", R"({"rope_type": 3})", {"must be text"}},
    {"TwoRopeTypes",
     kLlama,
     "rope_scaling",
     R"({"rope_type": "default", "type": "yarn"})",
     {"rope_scaling.type = \"yarn\": contradicts rope_type = \"default\""}},
    {"ScalingAndParametersThatDisagree",
     kLlama,
     "rope_parameters",
     R"({"rope_type": "default"})",
     {"rope_scaling", "remove one"}},
    {"ThetasThatDisagree",
     kQwen3,
     "rope_parameters",
     R"({"rope_theta": 1e4})",
     {"rope_parameters.rope_theta = 10000: contradicts rope_theta = 1000000"}},
    {"RotarySettingsOfOneKindOfLayer",
     kQwen3,
     "rope_parameters",
     R"({"full_attention": {"rope_type": "default"}})",
     {"rope_parameters.full_attention"}},
    {"PartialRotaryParameters",
     kQwen3,
     "rope_parameters",
     R"({"partial_rotary_factor": 0.25})",
     {"rope_parameters.partial_rotary_factor = 0.25"}},
    {"Llama3WithoutAFactor",
     kLlama,
     "rope_scaling",
     R"({"rope_type": "llama3"})",
     {"rope_scaling.factor is missing"}},
    {"Llama3WithoutALength",
     kLlama,
     "rope_scaling",
     R"({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4})",
     {"rope_scaling.original_max_position_embeddings is missing"}},
    {"ANegativeEos", kLlama, "eos_token_id", "-1", {"= -1: must be a token id"}},
    {"TextInEos", kLlama, "eos_token_id", R"([1, "2"])", {"must be a token id"}},
    {"AHugeEos", kLlama, "eos_token_id", "2147483648", {"must be a token id"}},
};
INSTANTIATE_TEST_SUITE_P(Rows, BadModelConfig, ::testing::ValuesIn(kRows), row_name);

TEST(ModelConfig, Llama3NumbersOutOfRangeAreRefused) {
  const std::map<std::string, std::string> good = {{"factor", "8"},
                                                   {"low_freq_factor", "1"},
                                                   {"high_freq_factor", "4"},
                                                   {"original_max_position_embeddings", "64"}};
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"factor", "0.5"},
      {"factor", "NaN"},
      {"factor", "\"8\""},
      {"low_freq_factor", "0"},
      {"low_freq_factor", "4"},
      {"high_freq_factor", "1"},
      {"high_freq_factor", "-1"},
      {"factor", "Infinity"},
      {"high_freq_factor", "Infinity"},
      {"original_max_position_embeddings", "0"},
      {"original_max_position_embeddings", "1.5"}};
  auto text = [&](const std::string& key, const std::string& value) {
    std::map<std::string, std::string> rope = good;
    if (!key.empty()) rope[key] = value;
    std::string object = R"({"rope_type": "llama3")";
    for (const auto& [name, number] : rope) object += ", \"" + name + "\": " + number;
    const std::string base = edited(kLlama, "rope_scaling", "");
    return base.substr(0, base.size() - 1) + ", \"rope_scaling\": " + object + "}}";
  };
  EXPECT_EQ(parsed(text("", "")).llama3_rope, (Llama3Rope{8, 1, 4, 64}));
  for (const auto& [key, value] : bad) {
    SCOPED_TRACE(key + " = " + value);
    const std::string named = key == "low_freq_factor" && value == "4" ? "high_freq_factor" : key;
    expect_refused([&] { parsed(text(key, value)); }, {"config.json: ", named});
  }
}

// head_dim is given here; transformers requires divisibility anyway.
TEST(ModelConfig, ALlamasHeadsDivideItsHiddenSizeEvenWithAHeadSize) {
  const std::string text = edited(edited(kLlama, "num_key_value_heads", "8"), "head_dim", "128");
  EXPECT_EQ(parsed(text).head_dim, 128);
  expect_refused([&] { parsed(edited(text, "num_attention_heads", "24")); },
                 {"num_attention_heads = 24: does not divide hidden_size = 4096"});
  EXPECT_EQ(parsed(edited(kQwen3, "num_attention_heads", "24")).num_attention_heads, 24);
}

TEST(ModelConfig, WhatIsNoJsonObjectIsRefusedWithItsPlace) {
  expect_refused([] { parsed(""); }, {"config.json line 1, column 1"});
  expect_refused([] { parsed("{\n\"a\": }"); }, {"config.json line 2, column 6"});
  expect_refused([] { parsed("[]"); }, {"config.json: must be an object"});
  expect_refused([] { parsed("{}"); }, {"architectures and model_type are missing"});
  expect_refused([] { parsed(R"({"model_type": "gpt2"})"); },
                 {"model_type = \"gpt2\": not supported", "Qwen3ForCausalLM"});
  expect_refused([] { parsed(kQwen3.substr(0, kQwen3.size() / 2)); }, {"config.json line"});
  expect_refused([] { load_model_config("/nowhere/model"); },
                 {"/nowhere/model: there is no such folder; Leeway downloads nothing",
                  "hf download NAME --local-dir FOLDER", "leeway convert FILE.gguf FOLDER"});
  const testing::TestFolder folder;
  expect_refused([&] { load_model_config(folder.path()); }, {"/config.json: cannot open"});
  write_file_atomically(folder.at("config.json"), "{}");
  expect_refused([&] { load_model_config(folder.at("config.json")); },
                 {"config.json: is a file, and a model is a folder"});
  expect_refused([] { check_model_folder("model.path = \"x/y\"", "x/y"); },
                 {"model.path = \"x/y\": there is no such folder"});
  const testing::TestFolder run;
  make_folders(run.at("weights/step_2"));
  expect_refused([&] { load_model_config(run.path()); },
                 {"is the folder of a run", run.path() + "/weights"});
}

TEST(ModelConfig, AKeyGivenTwiceIsRefused) {
  const std::string twice = kQwen3.substr(0, kQwen3.size() - 1) + ", \"head_dim\": 64}";
  expect_refused([&] { parsed(twice); }, {"config.json: \"head_dim\" is given twice"});
  const std::string rope = R"({"rope_type": "default", "rope_type": "llama3"})";
  expect_refused([&] { parsed(edited(kQwen3, "rope_scaling", rope)); },
                 {"\"rope_scaling.rope_type\" is given twice"});
}

TEST(ModelConfig, DeepNestingIsRefusedAndBracketsInTextsAreNotNesting) {
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  const std::string start = kQwen3.substr(0, kQwen3.size() - 1);
  expect_refused([&] { parsed(start + ", \"x\": " + deep + "}"); }, {"nested more than 100 deep"});
  parsed(start + ", \"x\": \"\\\"" + std::string(1000, '[') + "\"}");
}

TEST(ModelConfig, ModelsMadeFromScratchAreCheckedToo) {
  for (const Family family : {Family::qwen3, Family::qwen2, Family::llama}) {
    check_model_config("new", small_config(family));
  }
  auto refused = [](auto change, const std::string& key) {
    ModelConfig config = small_config(Family::qwen3);
    change(config);
    expect_refused([&] { check_model_config("new", config); }, {"new: " + key});
  };
  refused([](ModelConfig& c) { c.vocab_size = 0; }, "vocab_size = 0");
  refused([](ModelConfig& c) { c.head_dim = 5; }, "head_dim = 5");
  refused([](ModelConfig& c) { c.num_key_value_heads = 3; }, "num_key_value_heads = 3");
  refused([](ModelConfig& c) { c.rope_theta = std::nan(""); }, "rope_theta = nan");
  refused([](ModelConfig& c) { c.eos_token_id = {-2}; }, "eos_token_id = -2");
  refused(
      [](ModelConfig& c) { c.llama3_rope = Llama3Rope{.original_max_position_embeddings = -1}; },
      "llama3 rope's original_max_position_embeddings = -1");
}

}  // namespace
}  // namespace leeway
