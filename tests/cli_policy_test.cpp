// `leeway logprobs` and `leeway generate`, end to end, on the golden models.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "cli_helpers.h"
#include "model/parameters.h"
#include "model/safetensors.h"

namespace leeway {
namespace {

namespace fs = std::filesystem;

std::string model_folder(const std::string& name) {
  return std::string(LEEWAY_SOURCE_DIR "/tests/data/hf/") + name;
}

// [rows][columns] of an integer tensor of a golden file.
std::vector<std::vector<int64_t>> golden_ids(const std::string& model, const std::string& name) {
  const SafetensorsFile file(model_folder(model) + "/golden.safetensors");
  const StoredTensor* tensor = file.find(name);
  std::vector<std::vector<int64_t>> rows(static_cast<size_t>(tensor->shape[0]));
  const auto width = static_cast<size_t>(tensor->shape[1]);
  const std::string bytes = tensor->bytes();
  for (size_t r = 0; r < rows.size(); ++r) {
    rows[r].resize(width);
    std::memcpy(rows[r].data(), bytes.data() + r * width * 8, width * 8);
  }
  return rows;
}

std::string tokens_json(const std::vector<std::vector<int64_t>>& lists) {
  std::string text = "{\"tokens\": [";
  for (size_t i = 0; i < lists.size(); ++i) {
    text += i == 0 ? "[" : ", [";
    for (size_t t = 0; t < lists[i].size(); ++t) {
      text += (t == 0 ? "" : ", ") + std::to_string(lists[i][t]);
    }
    text += "]";
  }
  return text + "]}";
}

RunResult logprobs(const std::string& model, const std::string& tokens,
                   const std::vector<std::string>& more = {}) {
  std::vector<std::string> args = {"logprobs", "--model", model, "--tokens", "-"};
  args.insert(args.end(), more.begin(), more.end());
  return run_program(args, {.input = tokens});
}

RunResult generate(const std::string& model, const std::string& tokens,
                   const std::vector<std::string>& more) {
  std::vector<std::string> args = {"generate", "--model", model, "--tokens", "-"};
  args.insert(args.end(), more.begin(), more.end());
  return run_program(args, {.input = tokens});
}

class PolicyCli : public testing::TestWithParam<std::string> {};

TEST_P(PolicyCli, LogprobsAreTransformers) {
  const auto ids = golden_ids(GetParam(), "input_ids");
  const SafetensorsFile file(model_folder(GetParam()) + "/golden.safetensors");
  std::vector<float> expected(static_cast<size_t>(file.find("logprobs")->size()));
  copy_as_float(*file.find("logprobs"), file.path(), expected);
  for (const char* numerics : {"exact", "fast"}) {
    const RunResult result =
        logprobs(model_folder(GetParam()), tokens_json(ids), {"--numerics", numerics});
    ASSERT_EQ(result.code, 0) << result;
    EXPECT_TRUE(contains(result.err, "tokens/s")) << result.err;
    const Document json = json_of(result.out);
    ASSERT_EQ(json["logprobs"].Size(), ids.size());
    size_t next = 0;
    for (const Json& row : json["logprobs"].GetArray()) {
      ASSERT_EQ(row.Size(), ids[0].size());
      EXPECT_TRUE(row[0].IsNull());
      for (rapidjson::SizeType t = 1; t < row.Size(); ++t) {
        EXPECT_NEAR(row[t].GetDouble(), static_cast<double>(expected[next++]), 1e-4);
      }
    }
  }
}

TEST_P(PolicyCli, GreedyTokensAreTransformersAndTheirLogprobsTheTrainers) {
  const auto greedy = golden_ids(GetParam(), "greedy");
  std::vector<std::vector<int64_t>> prompts;
  for (const auto& row : greedy) prompts.emplace_back(row.begin(), row.begin() + 16);
  const RunResult result = generate(model_folder(GetParam()), tokens_json(prompts),
                                    {"--max-new-tokens", "48", "--temperature", "0"});
  ASSERT_EQ(result.code, 0) << result;
  EXPECT_TRUE(contains(result.err, "tokens/s")) << result.err;
  const Document json = json_of(result.out);
  const RunResult trainer = logprobs(model_folder(GetParam()), tokens_json(greedy));
  const Document all = json_of(trainer.out);
  for (rapidjson::SizeType s = 0; s < greedy.size(); ++s) {
    ASSERT_EQ(json["tokens"][s].Size(), 48u);
    for (rapidjson::SizeType t = 0; t < 48; ++t) {
      EXPECT_EQ(json["tokens"][s][t].GetInt64(), greedy[s][16 + t]);
      // Equal text means equal bits.
      EXPECT_EQ(text_of(json["logprobs"][s][t]), text_of(all["logprobs"][s][16 + t]));
    }
    EXPECT_STREQ(json["finish"][s].GetString(), "length");
  }
}

INSTANTIATE_TEST_SUITE_P(Models, PolicyCli, testing::Values("qwen3-tied", "llama3-rope"),
                         [](const auto& model) {
                           std::string name = model.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

const std::string kModel = model_folder("qwen3-tied");

TEST(Generate, TheSameSeedGivesTheSameTokensWhateverElseIsAsked) {
  const std::vector<std::string> options = {"--max-new-tokens", "20", "--seed", "5"};
  const Document alone = json_of(generate(kModel, R"({"tokens": [[1, 2, 3]]})", options).out);
  const Document crowd =
      json_of(generate(kModel, R"({"tokens": [[1, 2, 3], [9], [4, 4, 4, 4]]})", options).out);
  EXPECT_EQ(text_of(alone["tokens"][0]), text_of(crowd["tokens"][0]));
  EXPECT_EQ(text_of(alone["logprobs"][0]), text_of(crowd["logprobs"][0]));
  const Document other = json_of(
      generate(kModel, R"({"tokens": [[1, 2, 3]]})", {"--max-new-tokens", "20", "--seed", "6"})
          .out);
  EXPECT_NE(text_of(alone["tokens"][0]), text_of(other["tokens"][0]));
}

TEST(Generate, SamplesFiltersStopsAndPrecisionsAreTaken) {
  const std::string prompt = R"({"tokens": [[1, 2, 3]]})";
  const Document many =
      json_of(generate(kModel, prompt, {"--max-new-tokens", "6", "--samples", "3"}).out);
  EXPECT_EQ(many["tokens"].Size(), 3u);
  EXPECT_NE(text_of(many["tokens"][0]), text_of(many["tokens"][1]));
  for (const char* precision : {"bf16", "int8"}) {
    const RunResult result =
        generate(kModel, prompt,
                 {"--max-new-tokens", "6", "--precision", precision, "--temperature", "0.7",
                  "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01"});
    ASSERT_EQ(result.code, 0) << result;
    const Document json = json_of(result.out);
    for (rapidjson::SizeType t = 0; t < 6; ++t) {
      EXPECT_GE(json["processed_logprobs"][0][t].GetDouble(), json["logprobs"][0][t].GetDouble());
    }
  }
  const Document greedy =
      json_of(generate(kModel, prompt, {"--max-new-tokens", "6", "--temperature", "0"}).out);
  const std::string first = std::to_string(greedy["tokens"][0][0].GetInt64());
  const Document stopped = json_of(
      generate(kModel, prompt, {"--max-new-tokens", "6", "--temperature", "0", "--stop-id", first})
          .out);
  EXPECT_EQ(stopped["tokens"][0].Size(), 1u);
  EXPECT_STREQ(stopped["finish"][0].GetString(), "stop");
}

TEST(Generate, RefusesWhatCannotBe) {
  const std::string prompt = R"({"tokens": [[1, 2, 3]]})";
  expect_mistake(generate(kModel, prompt, {"--max-new-tokens", "600"}),
                 {"tokens[0]", "512", "max_position_embeddings"});
  expect_mistake(generate(kModel, R"({"tokens": [[1], [1, 320]]})", {"--max-new-tokens", "4"}),
                 {"tokens[1][1]", "320", "0 to 319"});
  expect_mistake(generate(kModel, prompt, {"--max-new-tokens", "0"}), {"max-new-tokens"});
  expect_mistake(generate(kModel, prompt, {"--max-new-tokens", "4", "--temperature", "-1"}),
                 {"temperature", "-1"});
  expect_mistake(generate(kModel, prompt, {"--max-new-tokens", "4", "--top-p", "1.5"}),
                 {"top_p", "1.5"});
  expect_mistake(generate(kModel, prompt, {"--max-new-tokens", "4", "--stop-at-eos"}),
                 {"eos_token_id"});
  expect_mistake(generate(kModel, prompt, {"--max-new-tokens", "4", "--precision", "fp8"}),
                 {"--precision fp8", "GPU only", "int8", "--device cuda"});
  expect_mistake(generate(kModel, prompt, {"--max-new-tokens", "4", "--precision", "int4"}),
                 {"int4"});
  expect_mistake(generate(kModel, prompt,
                          {"--max-new-tokens", "400", "--samples", "200", "--kv-bytes", "1000000"}),
                 {"tokens[0]", "kv_bytes", "max_new_tokens 400"});
}

TEST(Logprobs, RefusesTokensThatAreNone) {
  expect_mistake(logprobs(kModel, "{"), {"standard input", "line 1"});
  expect_mistake(logprobs(kModel, "[]"), {"tokens"});
  expect_mistake(logprobs(kModel, "{}"), {"tokens"});
  expect_mistake(logprobs(kModel, R"({"tokens": 3})"), {"tokens"});
  expect_mistake(logprobs(kModel, R"({"tokens": [3]})"), {"tokens[0]"});
  expect_mistake(logprobs(kModel, R"({"tokens": [[1], []]})"), {"tokens[1]", "empty"});
  expect_mistake(logprobs(kModel, R"({"tokens": [[1, -1]]})"), {"tokens[0][1]", "-1"});
  expect_mistake(logprobs(kModel, R"({"tokens": [[1, 2.5]]})"), {"tokens[0][1]", "integer"});
  expect_mistake(logprobs(kModel, R"({"tokens": [[99999999999999999999]]})"), {"tokens[0][0]"});
  expect_mistake(logprobs(kModel, R"({"tokens": [[1]], "token": 1})"), {"unknown key", "token"});
  std::vector<int64_t> long_one(513, 1);
  expect_mistake(logprobs(kModel, tokens_json({long_one})), {"tokens[0]", "513", "512"});
  expect_mistake(run_program({"logprobs", "--model", kModel, "--tokens", "no/such.json"}),
                 {"no/such.json"});
}

TEST(Logprobs, OneTokenHasNoProbabilityAndNoSequenceNone) {
  EXPECT_EQ(logprobs(kModel, R"({"tokens": [[5]]})").out, "{\"logprobs\": [[null]]}\n");
  EXPECT_EQ(logprobs(kModel, R"({"tokens": []})").out, "{\"logprobs\": []}\n");
}

TEST(Init, MakesAModelFromAConfigAndASeed) {
  const TempFolder folder;
  const auto init = [&](const std::string& name, const std::string& seed,
                        const std::vector<std::string>& more = {}) {
    std::vector<std::string> args = {
        "init", "--config", kModel + "/config.json", "--seed", seed, "--output", folder / name};
    args.insert(args.end(), more.begin(), more.end());
    return run_program(args);
  };
  ASSERT_EQ(init("a", "1").code, 0);
  ASSERT_EQ(init("b", "1", {"--shard-bytes", "100000"}).code, 0);
  ASSERT_EQ(init("c", "2").code, 0);
  EXPECT_TRUE(fs::exists(folder / "a/model.safetensors"));
  EXPECT_TRUE(fs::exists(folder / "b/model.safetensors.index.json"));
  const std::string tokens = R"({"tokens": [[1, 2, 3, 4]]})";
  const std::string first = logprobs(folder / "a", tokens).out;
  EXPECT_TRUE(contains(first, "logprobs")) << first;
  EXPECT_EQ(first, logprobs(folder / "b", tokens).out);
  EXPECT_NE(first, logprobs(folder / "c", tokens).out);
  expect_mistake(init("a", "3"), {"a", "not an empty folder"});
  expect_mistake(run_program({"init", "--config", "no/such.json", "--output", folder / "d"}),
                 {"no/such.json"});
}

// A copy of the golden model with one file changed.
class BrokenModel {
 public:
  BrokenModel() {
    for (const char* name : {"config.json", "model.safetensors"}) {
      fs::copy_file(kModel + "/" + name, folder_.path() / name);
      fs::permissions(folder_.path() / name, fs::perms::owner_write, fs::perm_options::add);
    }
  }
  void change(const std::string& name, const std::function<std::string(std::string)>& edit) {
    std::ifstream in(folder_.path() / name, std::ios::binary);
    const std::string text(std::istreambuf_iterator<char>(in), {});
    std::ofstream(folder_.path() / name, std::ios::binary) << edit(text);
  }
  void replace(const std::string& name, const std::string& from, const std::string& to) {
    change(name, [&](std::string text) {
      const size_t at = text.find(from);
      EXPECT_NE(at, std::string::npos) << from;
      return text.replace(at, from.size(), to);
    });
  }
  void expect_refused(const std::vector<std::string>& words) const {
    const std::string folder = folder_.path().string();
    expect_mistake(logprobs(folder, R"({"tokens": [[1, 2]]})"), words);
    expect_mistake(generate(folder, R"({"tokens": [[1, 2]]})", {"--max-new-tokens", "2"}), words);
  }
  std::string path() const { return folder_.path().string(); }

 private:
  TempFolder folder_;
};

TEST(BrokenModels, ThatOverflowAreNotPrintedAsNull) {
  const TempFolder folder;
  Parameters parameters = load_parameters(kModel);
  float* norm = parameters.find("model.norm.weight");
  std::fill_n(norm, parameters.config().hidden_size, 3e38f);
  save_parameters(parameters, folder / "m");
  const std::string tokens = R"({"tokens": [[7], [1, 2]]})";
  expect_mistake(logprobs(folder / "m", tokens), {"tokens[1][1]", "not finite"});
  expect_mistake(generate(folder / "m", tokens, {"--max-new-tokens", "2"}), {"request"});
}

TEST(BrokenModels, AreRefusedByName) {
  {
    BrokenModel model;
    model.change("model.safetensors", [](std::string bytes) { return bytes.substr(0, 5000); });
    model.expect_refused({"model.safetensors"});
  }
  {
    BrokenModel model;
    model.change("model.safetensors", [](std::string bytes) { return bytes + "x"; });
    model.expect_refused({"model.safetensors"});
  }
  {
    BrokenModel model;  // a header longer than the file
    model.change("model.safetensors", [](std::string bytes) {
      bytes[4] = 1;
      return bytes;
    });
    model.expect_refused({"model.safetensors"});
  }
  {
    BrokenModel model;
    model.replace("model.safetensors", "layers.1.mlp.up_proj", "layers.1.mlp.up_prox");
    model.expect_refused({"model.layers.1.mlp.up_proj.weight"});
  }
  {
    BrokenModel model;  // 64 x 160 instead of 160 x 64
    model.replace("config.json", "\"intermediate_size\": 160", "\"intermediate_size\": 128");
    model.expect_refused({"mlp.", "128", "160"});
  }
  {
    BrokenModel model;
    model.replace("config.json", "Qwen3ForCausalLM", "GPT2LMHeadModel");
    model.expect_refused({"config.json", "GPT2LMHeadModel"});
  }
  {
    BrokenModel model;
    model.replace("config.json", "\"rope_type\": \"default\"", "\"rope_type\": \"yarn\"");
    model.expect_refused({"config.json", "yarn"});
  }
  {
    BrokenModel model;  // one layer more in the file than in the config
    model.replace("config.json", "\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2");
    model.replace("config.json", "\"full_attention\",", "");
    model.expect_refused({"model.layers.2."});
  }
  expect_mistake(logprobs("no/such/folder", R"({"tokens": [[1, 2]]})"), {"no/such/folder"});
}

}  // namespace
}  // namespace leeway
