#include "server/server.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <filesystem>

#include "base/files.h"
#include "base/test_folder.h"
#include "engine/test_support.h"
#include "server/test_support.h"
#include "server/weights.h"

namespace leeway {
namespace {

using namespace testing;

ServedText no_text() {
  ServedText served;
  served.why_no_text = served.why_no_chat = "there is no tokenizer";
  return served;
}

std::string generate_body(const Request& request) {
  const SamplingSettings& s = request.sampling;
  return fmt::format(
      R"({{"token_ids": [{}], "sampling_params": {{"temperature": {}, "top_p": {}, "top_k": {}, )"
      R"("min_p": {}, "seed": {}, "n": {}, "max_tokens": {}, "stop_token_ids": [{}], )"
      R"("logprobs": 1}}}})",
      fmt::join(request.prompt, ","), s.temperature, s.top_p, s.top_k, s.min_p, request.seed,
      request.samples, request.max_new_tokens, fmt::join(request.stop_ids, ","));
}

// As a client reads it: text to double to float.
float float_of(const rapidjson::Value& value) { return static_cast<float>(value.GetDouble()); }

SampledSequence sequence_in(const rapidjson::Value& choice) {
  SampledSequence sequence;
  for (const auto& id : choice["token_ids"].GetArray()) sequence.ids.push_back(id.GetInt());
  for (const auto& entry : choice["logprobs"]["content"].GetArray()) {
    sequence.raw_logprobs.push_back(float_of(entry["logprob"]));
  }
  for (const auto& value : choice["leeway"]["processed_logprobs"].GetArray()) {
    sequence.processed_logprobs.push_back(float_of(value));
  }
  for (const auto& value : choice["leeway"]["versions"].GetArray()) {
    sequence.versions.push_back(value.GetInt());
  }
  const std::string finish = choice["finish_reason"].GetString();
  sequence.finish = finish == "stop"     ? Finish::stop
                    : finish == "length" ? Finish::length
                                         : Finish::cancelled;
  return sequence;
}

TEST(Server, SamplesOverHttpHaveTheBitsOfTheEngine) {
  const Parameters weights = tiny_weights(Family::qwen3, 3);
  const std::vector<Request> requests = assorted(40, 11);
  const Results expected = run_all(weights, options_of(64), requests);
  ServerOptions options = small_options();
  options.engine = options_of(48);
  const RunningServer running(options, no_text(), weights);
  // Many at a time, so that they share passes.
  std::vector<std::unique_ptr<TestClient>> clients;
  for (const Request& request : requests) {
    clients.push_back(std::make_unique<TestClient>(running.server.port()));
    const std::string body = generate_body(request);
    clients.back()->send(fmt::format(
        "POST /inference/v1/generate HTTP/1.1\r\nContent-Length: {}\r\n\r\n{}", body.size(), body));
  }
  size_t compared = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    const HttpReply reply = clients[i]->reply();
    ASSERT_EQ(reply.status, 200) << reply.body;
    const rapidjson::Document answer = parsed_json(reply.body);
    const auto& choices = answer["choices"];
    ASSERT_EQ(choices.Size(), static_cast<size_t>(requests[i].samples));
    for (rapidjson::SizeType k = 0; k < choices.Size(); ++k, ++compared) {
      EXPECT_EQ(choices[k]["index"].GetInt(), static_cast<int>(k));
      const SampledSequence got = sequence_in(choices[k]);
      const SampledSequence& wanted = expected.at({static_cast<int64_t>(i), k});
      expect_same(got, wanted);
      EXPECT_EQ(got.versions, wanted.versions);
    }
  }
  EXPECT_EQ(compared, expected.size());
}

TEST(Server, SaysWhatItServes) {
  const RunningServer running;
  TestClient client = running.client();
  EXPECT_EQ(client.get("/health").body, "{}");
  const rapidjson::Document models = parsed_json(client.get("/v1/models").body);
  EXPECT_STREQ(models["data"][0]["id"].GetString(), "small");
  EXPECT_STREQ(models["data"][0]["owned_by"].GetString(), "leeway");
  EXPECT_EQ(models["data"][0]["max_model_len"].GetInt(), 512);
  const rapidjson::Document info = parsed_json(client.get("/model_info").body);
  EXPECT_STREQ(info["weight_version"].GetString(), "0");
  EXPECT_EQ(info["leeway"]["version"].GetInt(), 0);
  EXPECT_EQ(info["leeway"]["vocab_size"].GetInt(), 300);
  EXPECT_EQ(info["leeway"]["dialect"].GetInt(), 1);
  EXPECT_EQ(info["leeway"]["checksum"].GetString(),
            fmt::format("{:08x}", checksum(byte_weights(1))));
  EXPECT_EQ(client.get("/nowhere").status, 404);
  EXPECT_EQ(client.get("/generate").status, 405);
  const HttpReply gone = client.get("/get_weight_version");
  EXPECT_EQ(gone.status, 404);
  EXPECT_NE(gone.body.find("/model_info"), std::string::npos);
  EXPECT_EQ(client.get("/health_generate").status, 200);
  EXPECT_EQ(client.get("/v1/loads").status, 200);
  EXPECT_EQ(client.post("/flush_cache", "").status, 200);
}

TEST(Server, CountsForDashboards) {
  const RunningServer running;
  TestClient client = running.client();
  ASSERT_EQ(client
                .post("/inference/v1/generate",
                      R"({"token_ids": [1, 2, 3], "sampling_params": {"n": 2, "max_tokens": 5}})")
                .status,
            200);
  EXPECT_EQ(metric(client, "vllm:num_requests_running"), 0);
  EXPECT_EQ(metric(client, "vllm:num_requests_waiting"), 0);
  EXPECT_EQ(metric(client, "vllm:kv_cache_usage_perc"), 0);
  EXPECT_EQ(metric(client, "vllm:generation_tokens_total"), 10);
  EXPECT_EQ(metric(client, "vllm:prompt_tokens_total"), 3);
  EXPECT_EQ(metric(client, "sglang:num_running_reqs"), 0);
  EXPECT_EQ(metric(client, "sglang:token_usage"), 0);
  EXPECT_EQ(metric(client, "leeway_engine_alive"), 1);
  EXPECT_GE(metric(client, "leeway_steps_total"), 5);
}

TEST(Server, WantsItsKeyOnAllRoutesButTwo) {
  ServerOptions options = small_options();
  options.api_key = "secret";
  const RunningServer running(options);
  TestClient client = running.client();
  EXPECT_EQ(client.get("/health").status, 200);
  EXPECT_EQ(client.get("/metrics").status, 200);
  for (const char* path : {"/v1/models", "/model_info", "/nowhere", "/is_paused"}) {
    EXPECT_EQ(client.get(path).status, 401) << path;
    for (const char* wrong : {"Bearer ", "Bearer secre", "Bearer secret2", "Bearer secretsecret",
                              "Basic secret", "secret"}) {
      EXPECT_EQ(client.call("GET", path, "", fmt::format("Authorization: {}\r\n", wrong)).status,
                401)
          << wrong;
    }
  }
  const HttpReply refused = client.post("/inference/v1/generate", "{}");
  EXPECT_EQ(refused.status, 401);
  EXPECT_NE(refused.body.find("authentication_error"), std::string::npos);
  EXPECT_EQ(refused.body.find("secret"), std::string::npos);
  EXPECT_EQ(client.call("GET", "/v1/models", "", "Authorization: Bearer secret\r\n").status, 200);
}

TEST(Server, LoadsWeightsByEveryDialectsRoute) {
  const TestFolder folder;
  const std::string root = folder.path();
  for (const uint64_t seed : {2, 3, 4, 5}) {
    save_parameters(byte_weights(seed), fmt::format("{}/step_{}", root, seed));
  }
  save_parameters(byte_weights(6), root + "/other");
  ServerOptions options = small_options();
  options.weights_root = root;
  const RunningServer running(options);
  TestClient client = running.client();
  const auto expect_loaded = [&](const std::string& path, const std::string& body, int version,
                                 uint64_t seed) {
    const HttpReply reply = client.post(path, body);
    ASSERT_EQ(reply.status, 200) << reply.body;
    const rapidjson::Document answer = parsed_json(reply.body);
    EXPECT_TRUE(answer["success"].GetBool());
    EXPECT_EQ(answer["leeway"]["version"].GetInt(), version);
    const std::string sum = fmt::format("{:08x}", checksum(byte_weights(seed)));
    EXPECT_EQ(answer["leeway"]["checksum"].GetString(), sum);
    const rapidjson::Document info = parsed_json(client.get("/model_info").body);
    EXPECT_EQ(info["leeway"]["version"].GetInt(), version);
    EXPECT_EQ(info["leeway"]["checksum"].GetString(), sum);
  };
  expect_loaded("/update_weights", fmt::format(R"({{"weight_dir": "{}/step_2"}})", root), 2, 2);
  expect_loaded("/update_weights",
                fmt::format(R"({{"update_info": {{"model_path": "{}/step_3"}}}})", root), 3, 3);
  expect_loaded("/update_weights_from_disk",
                fmt::format(R"({{"model_path": "{}/step_4", "weight_version": "40", )"
                            R"("abort_all_requests": true, "flush_cache": true}})",
                            root),
                40, 4);
  expect_loaded("/collective_rpc",
                fmt::format(R"({{"method": "reload_weights", "kwargs": {{"weights_path": )"
                            R"("{}/step_5"}}}})",
                            root),
                5, 5);
  expect_loaded("/update_weights", fmt::format(R"({{"weight_dir": "{}/other"}})", root), 6, 6);
  // Sampled tokens say so.
  const rapidjson::Document answer = parsed_json(
      client.post("/inference/v1/generate", R"({"token_ids": [1], "sampling_params": {}})").body);
  for (const auto& version : answer["choices"][0]["leeway"]["versions"].GetArray()) {
    EXPECT_EQ(version.GetInt(), 6);
  }
}

TEST(Server, RefusesWeightsAndKeepsTheOldOnes) {
  const TestFolder folder, elsewhere;
  const std::string root = folder.path();
  save_parameters(byte_weights(2), root + "/good");
  save_parameters(byte_weights(2), elsewhere.path() + "/good");
  save_parameters(tiny_weights(Family::qwen3, 1), root + "/other_model");
  std::filesystem::create_directory(root + "/empty");
  std::filesystem::create_directory_symlink(elsewhere.path(), root + "/link");
  save_parameters(byte_weights(2), root + "/damaged");
  const FileSum sum = sum_of_file(root + "/damaged/model.safetensors");
  write_file_atomically(root + "/damaged/checksum.json",
                        fmt::format(R"({{"version": 9, "files": {{"model.safetensors": )"
                                    R"({{"bytes": {}, "crc32c": {}}}}}}})",
                                    sum.bytes, sum.crc32c ^ 1));
  ServerOptions options = small_options();
  options.weights_root = root;
  const RunningServer running(options);
  TestClient client = running.client();
  const auto status = [&](const std::string& dir, const std::string& more = "") {
    return client.post("/update_weights", fmt::format(R"({{"weight_dir": "{}"{}}})", dir, more))
        .status;
  };
  EXPECT_EQ(status(root + "/nowhere"), 403);
  EXPECT_EQ(status(elsewhere.path() + "/good"), 403);
  EXPECT_EQ(status(root + "/link/good"), 403);
  EXPECT_EQ(status(root + "/../"), 403);
  EXPECT_EQ(status("/etc"), 403);
  EXPECT_EQ(status(root + "/empty"), 400);
  EXPECT_EQ(status(root + "/other_model"), 400);
  EXPECT_EQ(status(root + "/damaged"), 400);
  EXPECT_EQ(status(root + "/good", R"(, "weight_version": -1)"), 400);
  EXPECT_EQ(status(root + "/good", R"(, "weight_version": "new")"), 400);
  EXPECT_EQ(client.post("/update_weights", "{}").status, 400);
  EXPECT_EQ(client.post("/collective_rpc", R"({"method": "shell"})").status, 400);
  EXPECT_EQ(client.post("/collective_rpc", R"({"method": "reload_weights"})").status, 400);
  const rapidjson::Document info = parsed_json(client.get("/model_info").body);
  EXPECT_EQ(info["leeway"]["version"].GetInt(), 0);
  EXPECT_EQ(status(root + "/good"), 200);

  const RunningServer without_root;
  TestClient other = without_root.client();
  EXPECT_EQ(
      other.post("/update_weights", fmt::format(R"({{"weight_dir": "{}/good"}})", root)).status,
      403);
}

TEST(Server, PausesAndGoesOn) {
  const RunningServer running;
  TestClient control = running.client(), sampler = running.client();
  const std::string body = R"({"token_ids": [1, 2], "request_id": "one",)"
                           R"( "sampling_params": {"max_tokens": 3, "seed": 1}})";
  const auto start = [&] {
    sampler.send(fmt::format("POST /inference/v1/generate HTTP/1.1\r\nContent-Length: {}\r\n\r\n{}",
                             body.size(), body));
  };
  EXPECT_EQ(control.post("/pause?mode=keep", "").status, 200);
  EXPECT_EQ(control.get("/is_paused").body, R"({"is_paused": true})");
  EXPECT_EQ(control.get("/health_generate").status, 503);
  start();
  EXPECT_TRUE(soon([&] { return metric(control, "vllm:num_requests_waiting") == 1; }));
  EXPECT_EQ(control.post("/resume", "").status, 200);
  EXPECT_EQ(sampler.reply().status, 200);
  EXPECT_EQ(control.get("/is_paused").body, R"({"is_paused": false})");
  // Aborted while it waits: it ends with what it has, which is nothing.
  EXPECT_EQ(control.post("/pause_generation", R"({"mode": "in_place"})").status, 200);
  start();
  EXPECT_TRUE(soon([&] { return metric(control, "vllm:num_requests_waiting") == 1; }));
  EXPECT_EQ(control.post("/abort_request", R"({"rid": "one"})").status, 200);
  const rapidjson::Document aborted = parsed_json(sampler.reply().body);
  EXPECT_STREQ(aborted["choices"][0]["finish_reason"].GetString(), "abort");
  EXPECT_EQ(aborted["choices"][0]["token_ids"].Size(), 0u);
  EXPECT_EQ(control.post("/continue_generation", "{}").status, 200);
  EXPECT_EQ(control.post("/pause?mode=sideways", "").status, 400);
  EXPECT_EQ(control.post("/pause_generation", R"({"mode": 3})").status, 400);
  EXPECT_EQ(control.post("/abort_request", "{}").status, 400);
}

// A drained server has answered everything, a paused one with what there is.
TEST(Server, DrainsBeforeItEnds) {
  ServerOptions patient = small_options();
  patient.drain_seconds = 600;  // as long as the request takes
  const auto start = [&] {
    return std::make_unique<RunningServer>(patient, byte_served_text(), byte_weights(1, 8192));
  };
  auto running = start();
  TestClient sampler = running->client(), idle = running->client();
  const std::string body =
      R"({"token_ids": [1, 2], "sampling_params": {"max_tokens": 2000, "seed": 1}})";
  sampler.send(fmt::format("POST /inference/v1/generate HTTP/1.1\r\nContent-Length: {}\r\n\r\n{}",
                           body.size(), body));
  // While it runs: the others count requests that have ended.
  ASSERT_TRUE(soon([&] { return metric(idle, "leeway_sampled_tokens_total") > 0; }));
  running->end();
  const HttpReply reply = sampler.reply();
  ASSERT_EQ(reply.status, 200);
  EXPECT_EQ(parsed_json(reply.body)["choices"][0]["token_ids"].Size(), 2000u);
  EXPECT_FALSE(idle.read_some()) << "a connection without a request is closed";

  running = start();
  TestClient control = running->client(), waiting = running->client();
  control.post("/pause?mode=keep", "");
  waiting.send(fmt::format("POST /inference/v1/generate HTTP/1.1\r\nContent-Length: {}\r\n\r\n{}",
                           body.size(), body));
  ASSERT_TRUE(soon([&] { return metric(control, "vllm:num_requests_waiting") == 1; }));
  running->end();
  EXPECT_STREQ(parsed_json(waiting.reply().body)["choices"][0]["finish_reason"].GetString(),
               "abort");
}

TEST(Server, NamesVersionsAndFolders) {
  EXPECT_EQ(version_of_folder("a/step_12"), 12);
  EXPECT_EQ(version_of_folder("step_0/"), 0);
  for (const char* other :
       {"step_", "step_x", "a/step_1/b", "step_-1", "step_1x", "", "step_99999999999"}) {
    EXPECT_FALSE(version_of_folder(other)) << other;
  }
}

TEST(Server, AnswersIdsWithoutATokenizer) {
  const RunningServer running(small_options(), no_text());
  TestClient client = running.client();
  for (const char* path : {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}) {
    const HttpReply reply =
        client.post(path, R"({"prompt": "a", "messages": [{"role": "user", "content": "a"}]})");
    EXPECT_EQ(reply.status, 400) << path;
    EXPECT_NE(reply.body.find("there is no tokenizer"), std::string::npos) << reply.body;
  }
  const HttpReply reply = client.post(
      "/generate", R"({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}})");
  EXPECT_EQ(reply.status, 200) << reply.body;
  EXPECT_EQ(client.post("/generate", R"({"text": "a"})").status, 400);
  const std::string ids =
      R"({"prompt": [1, 2], "max_tokens": 3, "ignore_eos": true, "seed": 1, "logprobs": 1, )"
      R"("return_token_ids": true)";
  const HttpReply whole = client.post("/v1/completions", ids + "}");
  ASSERT_EQ(whole.status, 200) << whole.body;
  for (const char* part : {R"("text": "")", R"("token_ids": [)", R"("tokens": ["token_id:)",
                           R"("versions": [0,0,0])", R"("completion_tokens": 3)"}) {
    EXPECT_NE(whole.body.find(part), std::string::npos) << part << " " << whole.body;
  }
  const HttpReply streamed = client.post("/v1/completions", ids + R"(, "stream": true})");
  EXPECT_EQ(streamed.status, 200) << streamed.body;
  EXPECT_NE(streamed.body.find("[DONE]"), std::string::npos) << streamed.body;
  EXPECT_EQ(client.post("/v1/completions", ids + R"(, "stop": "a"})").status, 400);
}

}  // namespace
}  // namespace leeway
