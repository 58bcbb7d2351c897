// Writing config.json: the result must read back the same.

#include "base/rng.h"
#include "model/test_configs.h"

namespace leeway {
namespace {

using testing::bytes_of;
using testing::edited;
using testing::expect_same;
using testing::json_text;
using testing::kGoldens;
using testing::kLlama;
using testing::kQwen2;
using testing::kQwen3;
using testing::parsed;
using testing::small_config;

ModelConfig random_config(Rng& rng) {
  const Family family = static_cast<Family>(rng.below(3));
  ModelConfig config = small_config(family, rng.below(2) == 0, rng.below(2) == 0);
  auto size = [&](uint64_t most) { return static_cast<int64_t>(1 + rng.below(most)); };
  config.vocab_size = size(1 << 20);
  config.intermediate_size = size(1 << 16);
  config.num_hidden_layers = size(100);
  config.num_key_value_heads = size(16);
  config.num_attention_heads = config.num_key_value_heads * size(8);
  config.hidden_size = config.num_attention_heads * size(64);
  config.head_dim = 2 * size(128);
  config.max_position_embeddings = size(1 << 20);
  config.rms_norm_eps = 1e-6 + rng.uniform() * 1e-3;
  config.rope_theta = 1.0 + 1e6 * rng.uniform();
  config.initializer_range = rng.uniform();
  if (rng.below(2) == 0) {
    config.llama3_rope =
        Llama3Rope{1.0 + 10 * rng.uniform(), 0.5 + rng.uniform(), 2.0 + rng.uniform(), size(10000)};
  }
  for (uint64_t n = rng.below(4); n > 0; --n) {
    config.eos_token_id.push_back(static_cast<int32_t>(rng.below(1 << 20)));
  }
  return config;
}

TEST(ModelConfigJson, ANewModelReadsBackAsItIs) {
  Rng rng(11);
  for (int i = 0; i < 200; ++i) {
    const ModelConfig config = random_config(rng);
    const std::string text = model_config_json(config);
    SCOPED_TRACE(text);
    const ModelConfig back = parsed(text);
    expect_same(back, config);
    // Writing again changes nothing.
    EXPECT_EQ(model_config_json(back), text);
    if (HasFailure()) return;
  }
}

TEST(ModelConfigJson, ANewModelIsWrittenForOldAndNewTransformers) {
  ModelConfig config = small_config(Family::llama);
  config.llama3_rope = Llama3Rope{8.0, 1.0, 4.0, 64};
  config.eos_token_id = {7};
  const rapidjson::Document json = parse_json("json", model_config_json(config));
  EXPECT_EQ(json_text(json["architectures"]), R"(["LlamaForCausalLM"])");
  EXPECT_STREQ(json["model_type"].GetString(), "llama");
  EXPECT_EQ(json["rope_theta"].GetDouble(), 10000.0);
  EXPECT_STREQ(json["rope_scaling"]["rope_type"].GetString(), "llama3");
  EXPECT_FALSE(json["rope_scaling"].HasMember("rope_theta"));
  EXPECT_EQ(json["rope_parameters"]["rope_theta"].GetDouble(), 10000.0);
  EXPECT_EQ(json["rope_parameters"]["original_max_position_embeddings"].GetInt(), 64);
  EXPECT_STREQ(json["dtype"].GetString(), "float32");
  EXPECT_STREQ(json["torch_dtype"].GetString(), "float32");
  EXPECT_EQ(json["eos_token_id"].GetInt(), 7);
  EXPECT_TRUE(json["bos_token_id"].IsNull());
  EXPECT_FALSE(json["mlp_bias"].GetBool());
  // transformers checks the number types.
  EXPECT_TRUE(json["rope_theta"].IsDouble());
  EXPECT_TRUE(json["rope_scaling"]["factor"].IsDouble());
  EXPECT_TRUE(json["hidden_size"].IsInt());
}

TEST(ModelConfigJson, ASourceIsKeptButForItsDtype) {
  for (const std::string& source :
       {kQwen3, kQwen2, kLlama, bytes_of(kGoldens + "/qwen3-tied/config.json"),
        bytes_of(kGoldens + "/llama3-rope/config.json")}) {
    rapidjson::Document expected = parse_json("source", source);
    const rapidjson::Document written = parse_json("written", model_config_json(parsed(source)));
    const char* key = expected.HasMember("dtype") ? "dtype" : "torch_dtype";
    expected[key].SetString("float32");
    EXPECT_EQ(json_text(written), json_text(expected));
  }
}

TEST(ModelConfigJson, UnknownKeysOfASourceAreKept) {
  const std::string source =
      kQwen3.substr(0, kQwen3.size() - 1) +
      R"(, "auto_map": {"a": [1, 2.5, null]}, "limit": [Infinity, -Infinity, NaN], "text": "\u00e9\u0000\""})";
  const std::string text = model_config_json(parsed(source));
  EXPECT_NE(text.find("Infinity,\n    -Infinity,\n    NaN"), std::string::npos) << text;
  const rapidjson::Document json = parse_json("written", text);
  EXPECT_EQ(json_text(json["auto_map"]), R"({"a":[1,2.5,null]})");
  EXPECT_EQ(json["text"].GetStringLength(), 4u);
  EXPECT_EQ(json["transformers_version"].GetString(), std::string("4.51.0"));
}

TEST(ModelConfigJson, ASourceWithoutADtypeGetsBothSpellings) {
  const std::string text = model_config_json(parsed(edited(kQwen2, "torch_dtype", "")));
  const rapidjson::Document json = parse_json("written", text);
  EXPECT_STREQ(json["dtype"].GetString(), "float32");
  EXPECT_STREQ(json["torch_dtype"].GetString(), "float32");
}

TEST(ModelConfigJson, ChangedFieldsAreWrittenInTheSpellingOfTheSource) {
  for (const std::string& source : {kQwen3, kLlama, bytes_of(kGoldens + "/qwen3-tied/config.json"),
                                    bytes_of(kGoldens + "/llama3-rope/config.json")}) {
    ModelConfig config = parsed(source);
    const bool had_parameters = source.find("rope_parameters") != std::string::npos;
    config.num_hidden_layers = 5;
    config.vocab_size = 77;
    config.rope_theta = 1234.5;
    config.rms_norm_eps = 1e-3;
    config.initializer_range = 0.5;
    config.tie_word_embeddings = !config.tie_word_embeddings;
    config.eos_token_id = {1, 2};
    config.qkv_bias = config.output_bias = true;
    config.llama3_rope = config.llama3_rope ? std::nullopt : std::optional(Llama3Rope{2, 1, 3, 99});
    const std::string text = model_config_json(config);
    expect_same(parsed(text), config);
    EXPECT_EQ(text.find("rope_parameters") != std::string::npos, had_parameters) << text;
    EXPECT_EQ(text.find("rope_scaling") == std::string::npos, had_parameters) << text;
  }
}

}  // namespace
}  // namespace leeway
