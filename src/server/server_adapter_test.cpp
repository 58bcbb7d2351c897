// Adapters that are loaded into a server while it runs.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "generate/scoring.h"
#include "model/adapter_io.h"
#include "model/test_files.h"
#include "server/test_support.h"

namespace leeway {
namespace {

using namespace testing;

Parameters adapter_of(uint64_t seed, uint64_t base = 1) {
  Parameters adapter(
      std::make_shared<const Parameters>(byte_weights(base)),
      {.rank = 4, .alpha = 8.0, .targets = {"q_proj", "down_proj"}, .base_path = ""});
  Rng rng(seed);
  for (float& value : adapter.flat()) value = static_cast<float>(0.2 * rng.normal());
  return adapter;
}

class AdapterServer : public ::testing::Test {
 protected:
  AdapterServer() {
    for (const uint64_t seed : {2, 3}) {
      save_parameters(adapter_of(seed), fmt::format("{}/step_{}", root_.path(), seed));
    }
    save_parameters(byte_weights(7), root_.path() + "/whole");
  }
  ServerOptions options() const {
    ServerOptions options = small_options();
    options.weights_root = root_.path();
    return options;
  }
  std::string load_body(const std::string& name, const std::string& folder) const {
    return fmt::format(R"({{"lora_name": "{}", "lora_path": "{}/{}"}})", name, root_.path(),
                       folder);
  }
  // The log-probabilities of what a request for this model samples, as the server says and as the
  // weights give.
  static void expect_sampled_by(TestClient& client, const std::string& model,
                                const Parameters& weights) {
    const HttpReply reply = client.post(
        "/inference/v1/generate",
        fmt::format(R"({{"model": "{}", "token_ids": [1, 2, 3], )"
                    R"("sampling_params": {{"max_tokens": 5, "logprobs": 1, "seed": 3}}}})",
                    model));
    ASSERT_EQ(reply.status, 200) << reply.body;
    const rapidjson::Document answer = parsed_json(reply.body);
    const auto& choice = answer["choices"][0];
    std::vector<int32_t> ids = {1, 2, 3};
    for (const auto& id : choice["token_ids"].GetArray()) ids.push_back(id.GetInt());
    const auto scores = score_tokens(weights, {ids}, {.threads = 1}, nullptr);
    for (rapidjson::SizeType t = 0; t < choice["token_ids"].Size(); ++t) {
      EXPECT_EQ(static_cast<float>(choice["logprobs"]["content"][t]["logprob"].GetDouble()),
                scores[0][2 + t]);
    }
  }

  TestFolder root_;
};

TEST_F(AdapterServer, AnAdapterIsThePolicyUnderItsOwnNameAndTheModels) {
  const RunningServer running(options());
  TestClient client = running.client();
  for (const auto& [path, seed] : std::vector<std::pair<std::string, int>>{
           {"/v1/load_lora_adapter", 2}, {"/load_lora_adapter", 3}}) {
    const std::string name = fmt::format("sorter-{}", seed);
    const HttpReply reply = client.post(path, load_body(name, fmt::format("step_{}", seed)));
    ASSERT_EQ(reply.status, 200) << reply.body;
    const rapidjson::Document answer = parsed_json(reply.body);
    EXPECT_EQ(answer["leeway"]["version"].GetInt(), seed);
    const Parameters adapter = adapter_of(static_cast<uint64_t>(seed));
    EXPECT_EQ(answer["leeway"]["checksum"].GetString(), fmt::format("{:08x}", checksum(adapter)));
    expect_sampled_by(client, name, adapter);
    expect_sampled_by(client, "small", adapter);
    const rapidjson::Document models = parsed_json(client.get("/v1/models").body);
    ASSERT_EQ(models["data"].Size(), 2u);
    EXPECT_EQ(models["data"][1]["id"].GetString(), name);
    EXPECT_STREQ(models["data"][1]["parent"].GetString(), "small");
  }
  // The one before is gone.
  EXPECT_EQ(
      client.post("/inference/v1/generate", R"({"model": "sorter-2", "token_ids": [1]})").status,
      404);
  EXPECT_EQ(client.post("/v1/unload_lora_adapter", R"({"lora_name": "sorter-2"})").status, 404);
  const HttpReply unloaded = client.post("/v1/unload_lora_adapter", R"({"lora_name": "sorter-3"})");
  ASSERT_EQ(unloaded.status, 200) << unloaded.body;
  EXPECT_EQ(parsed_json(unloaded.body)["leeway"]["version"].GetInt(), 4);
  expect_sampled_by(client, "small", byte_weights(1));
  EXPECT_EQ(parsed_json(client.get("/v1/models").body)["data"].Size(), 1u);
}

TEST_F(AdapterServer, AdaptersAreOverTheWeightsThatAreThere) {
  const RunningServer running(options());
  TestClient client = running.client();
  ASSERT_EQ(client.post("/v1/load_lora_adapter", load_body("a", "step_2")).status, 200);
  // Whole weights take the place of both, and the next adapter is over them; one that was trained
  // over the model before is not.
  ASSERT_EQ(
      client.post("/update_weights", fmt::format(R"({{"weight_dir": "{}/whole"}})", root_.path()))
          .status,
      200);
  expect_sampled_by(client, "small", byte_weights(7));
  const HttpReply other = client.post("/v1/load_lora_adapter", load_body("b", "step_3"));
  EXPECT_EQ(other.status, 400);
  EXPECT_NE(other.body.find("trained over other weights"), std::string::npos) << other.body;
  save_parameters(adapter_of(4, 7), root_.path() + "/step_4");
  ASSERT_EQ(client.post("/v1/load_lora_adapter", load_body("b", "step_4")).status, 200);
  expect_sampled_by(
      client, "b",
      load_adapter(root_.path() + "/step_4", std::make_shared<const Parameters>(byte_weights(7))));
}

TEST_F(AdapterServer, MistakesAreNamedAndChangeNothing) {
  const TestFolder elsewhere;
  save_parameters(adapter_of(2), elsewhere.path() + "/step_9");
  const RunningServer running(options());
  TestClient client = running.client();
  const auto refused = [&](const std::string& body, int status, const std::string& word) {
    const HttpReply reply = client.post("/v1/load_lora_adapter", body);
    EXPECT_EQ(reply.status, status) << body;
    EXPECT_NE(reply.body.find(word), std::string::npos) << reply.body;
  };
  refused("{}", 400, "lora_name");
  refused(R"({"lora_name": "a"})", 400, "lora_path");
  refused(R"({"lora_name": 3, "lora_path": "x"})", 400, "lora_name");
  refused(load_body("small", "step_2"), 400, "own name");
  refused(load_body("a", "nowhere"), 403, "--weights-root");
  refused(fmt::format(R"({{"lora_name": "a", "lora_path": "{}/step_9"}})", elsewhere.path()), 403,
          "--weights-root");
  refused(load_body("a", "whole"), 400, "adapter_config.json");
  EXPECT_EQ(client.post("/v1/unload_lora_adapter", R"({"lora_name": "a"})").status, 404);
  const rapidjson::Document info = parsed_json(client.get("/model_info").body);
  EXPECT_EQ(info["leeway"]["version"].GetInt(), 0);
  EXPECT_STREQ(info["leeway"]["adapter"].GetString(), "");
  expect_sampled_by(client, "small", byte_weights(1));
}

}  // namespace
}  // namespace leeway
