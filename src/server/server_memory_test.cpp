// New weights from the memory of a GPU: what a server accepts and refuses. The memory is pretended:
// a handle's first byte says which weights it stands for.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "leeway/error.h"
#include "server/test_support.h"

namespace leeway {
namespace {

using namespace testing;

constexpr const char* kKey = "Authorization: Bearer secret\r\n";

WeightSharing fake_sharing(int& taken) {
  WeightSharing sharing;
  sharing.device = "GPU-1";
  sharing.take = [&taken](const SharedWeights& shared, const ModelConfig& config,
                          PolicyVersion version) {
    ++taken;
    const auto seed = static_cast<uint64_t>(shared.handle[0]);
    if (seed == 0) throw Error("the memory of the other process cannot be opened");
    Parameters weights = seed == 9 ? byte_weights(9, 256) : byte_weights(seed);
    if (seed == 8) weights.of(0)[1] = NAN;
    EXPECT_EQ(config.vocab_size, 300);
    return std::make_shared<const PolicySnapshot>(std::move(weights), version);
  };
  return sharing;
}

ServerOptions sharing_options(int& taken) {
  ServerOptions options = small_options();
  options.sharing = fake_sharing(taken);
  options.api_key = "secret";
  return options;
}

SharedWeights shared_of(uint64_t seed) {
  SharedWeights shared{.device = "GPU-1", .count = 100};
  shared.handle.assign(kWeightHandleBytes, '\0');
  shared.handle[0] = static_cast<char>(seed);
  shared.checksum = checksum(byte_weights(seed));
  return shared;
}

std::string body_of(const SharedWeights& shared, const std::string& more = "") {
  return fmt::format(R"({{"cuda_ipc": {}, "weight_version": 7{}}})", shared_weights_json(shared),
                     more);
}

TEST(ServerMemory, WeightsAreTakenAndSampledWith) {
  int taken = 0;
  const RunningServer running(sharing_options(taken));
  TestClient client = running.client();
  const auto info = [&] { return parsed_json(client.call("GET", "/model_info", "", kKey).body); };
  EXPECT_STREQ(info()["leeway"]["device"].GetString(), "GPU-1");
  const HttpReply reply = client.call("POST", "/update_weights", body_of(shared_of(3)), kKey);
  ASSERT_EQ(reply.status, 200) << reply.body;
  const rapidjson::Document answer = parsed_json(reply.body);
  EXPECT_EQ(answer["leeway"]["version"].GetInt(), 7);
  const std::string sum = fmt::format("{:08x}", checksum(byte_weights(3)));
  EXPECT_EQ(answer["leeway"]["checksum"].GetString(), sum);
  EXPECT_EQ(info()["leeway"]["checksum"].GetString(), sum);
  const std::string request =
      R"({"token_ids": [1, 2], "sampling_params": {"max_tokens": 5, "seed": 1}})";
  ServerOptions plain = small_options();
  const RunningServer expected(plain, byte_served_text(), byte_weights(3));
  const auto choices = [&](TestClient from) {
    const rapidjson::Document json =
        parsed_json(from.call("POST", "/inference/v1/generate", request, kKey).body);
    std::vector<int> ids;
    for (const auto& id : json["choices"][0]["token_ids"].GetArray()) ids.push_back(id.GetInt());
    return ids;
  };
  EXPECT_EQ(choices(running.client()), choices(expected.client()));
}

TEST(ServerMemory, WhatIsNotAsItShouldBeIsRefusedAndTheOldWeightsStay) {
  int taken = 0;
  const RunningServer running(sharing_options(taken));
  TestClient client = running.client();
  const auto status = [&](const std::string& body) {
    return client.call("POST", "/update_weights", body, kKey).status;
  };
  EXPECT_EQ(client.post("/update_weights", body_of(shared_of(3))).status, 401) << "without the key";
  SharedWeights bad = shared_of(3);
  bad.device = "GPU-2";
  EXPECT_EQ(status(body_of(bad)), 400);
  bad = shared_of(3);
  bad.handle.pop_back();
  EXPECT_EQ(status(body_of(bad)), 400);
  bad.handle += "xy";
  EXPECT_EQ(status(body_of(bad)), 400);
  bad = shared_of(3);
  bad.offset = -1;
  EXPECT_EQ(status(body_of(bad)), 400);
  bad.offset = (int64_t{1} << 50) + 1;
  EXPECT_EQ(status(body_of(bad)), 400);
  EXPECT_EQ(status(body_of(shared_of(3), R"(, "weight_dir": "/tmp")")), 400);
  for (const char* body :
       {R"({"cuda_ipc": {}})", R"({"cuda_ipc": 1})", R"({"cuda_ipc": []})",
        R"({"cuda_ipc": {"device": "GPU-1"}})", R"({"cuda_ipc": {"device": 5}})"}) {
    EXPECT_EQ(status(body), 400) << body;
  }
  const std::string good = body_of(shared_of(3));
  for (const char* key : {"device", "handle", "offset", "count", "layout", "checksum"}) {
    std::string without = good;
    without.replace(without.find(fmt::format("\"{}\"", key)) + 1, 1, "_");
    EXPECT_EQ(status(without), 400) << key;
  }
  EXPECT_EQ(taken, 0) << "none of these reach the driver";
  EXPECT_EQ(status(body_of(shared_of(0))), 400) << "memory that cannot be opened";
  EXPECT_EQ(status(body_of(shared_of(8))), 400) << "weights that are not finite";
  EXPECT_EQ(status(body_of(shared_of(9))), 400) << "weights of another model";
  const rapidjson::Document info = parsed_json(client.call("GET", "/model_info", "", kKey).body);
  EXPECT_EQ(info["leeway"]["version"].GetInt(), 0);
  EXPECT_EQ(info["leeway"]["checksum"].GetString(),
            fmt::format("{:08x}", checksum(byte_weights(1))));
  EXPECT_EQ(status(body_of(shared_of(2))), 200);
}

TEST(ServerMemory, IsForThoseWhoWereStartedForItWithAKeyOnLoopback) {
  {
    const RunningServer plain;
    TestClient client = plain.client();
    const HttpReply reply = client.post("/update_weights", body_of(shared_of(3)));
    EXPECT_EQ(reply.status, 403);
    EXPECT_NE(reply.body.find("--device-weights"), std::string::npos) << reply.body;
    EXPECT_FALSE(parsed_json(client.get("/model_info").body)["leeway"].HasMember("device"));
  }
  int taken = 0;
  const auto start = [&](const ServerOptions& options) {
    Server server(options, std::make_shared<const PolicySnapshot>(byte_weights(1), 0),
                  byte_served_text());
  };
  ServerOptions options = sharing_options(taken);
  options.api_key.clear();
  EXPECT_THROW(start(options), Error);
  options = sharing_options(taken);
  options.http.host = "0.0.0.0";
  EXPECT_THROW(start(options), Error);
}

}  // namespace
}  // namespace leeway
