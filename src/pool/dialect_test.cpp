// Request and answer bodies of the three dialects, as their servers' sources have them.
#include "pool/dialect.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>

#include "base/json.h"
#include "leeway/error.h"
#include "pool/answer_checks.h"

namespace leeway {
namespace {

Request request() {
  Request request;
  request.prompt = {1, 2, 3};
  request.samples = 2;
  request.max_new_tokens = 4;
  request.stop_ids = {9, 10};
  request.seed = 18446744073709551615u;
  return request;
}

rapidjson::Document body_of(const ServerCall& call) { return parse_json("body", call.body); }

std::string error_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Dialect, IsFoundByWhatTheServerSaysOfItself) {
  EXPECT_EQ(dialect_of(200, R"({"model_path":"m","weight_version":"3","leeway":{}})"),
            InferenceDialect::leeway);
  EXPECT_EQ(dialect_of(200, R"({"model_path":"m","weight_version":"default"})"),
            InferenceDialect::sglang);
  EXPECT_EQ(dialect_of(404, R"({"detail":"Not Found"})"), InferenceDialect::vllm);
  EXPECT_THROW(dialect_of(401, ""), Error);
  EXPECT_THROW(dialect_of(200, "<html>"), Error);
}

TEST(Dialect, LeewayAsksForTheSameDrawAsTheEngine) {
  const auto dialect = make_leeway_dialect();
  Request asked = request();
  asked.sampling = {.temperature = 0.7f, .top_k = 5, .top_p = 0.1f, .min_p = 1e-7f};
  const ServerCall call = dialect->generate(asked, "m", 3);
  EXPECT_EQ(call.path, "/inference/v1/generate");
  const auto body = body_of(call);
  const auto& params = body["sampling_params"];
  EXPECT_EQ(params["seed"].GetUint64(), asked.seed);
  EXPECT_EQ(static_cast<float>(params["temperature"].GetDouble()), 0.7f);
  EXPECT_EQ(static_cast<float>(params["top_p"].GetDouble()), 0.1f);
  EXPECT_EQ(static_cast<float>(params["min_p"].GetDouble()), 1e-7f);
  EXPECT_EQ(params["top_k"].GetInt(), 5);
  EXPECT_EQ(params["n"].GetInt(), 2);
  EXPECT_EQ(params["max_tokens"].GetInt(), 4);
  EXPECT_EQ(params["stop_token_ids"].Size(), 2u);
  EXPECT_EQ(body["token_ids"].Size(), 3u);
}

// Nine digits give every float32 back, through a double as well.
TEST(Dialect, LogprobsSurviveJsonBitForBit) {
  const auto dialect = make_leeway_dialect();
  std::mt19937 rng(5);
  Request asked = request();
  asked.samples = 1;
  for (int k = 0; k < 20000; ++k) {
    const float value = -std::exp(std::uniform_real_distribution<float>(-40.0f, 5.0f)(rng));
    const std::string text = fmt::format("{:.9g}", value);
    const auto samples = dialect->read_samples(
        asked,
        fmt::format(R"({{"choices":[{{"index":0,"token_ids":[9],"logprobs":{{"content":[)"
                    R"({{"token_id":9,"logprob":{0}}}]}},"finish_reason":"stop",)"
                    R"("leeway":{{"versions":[0],"processed_logprobs":[{0}]}}}}]}})",
                    text),
        0);
    ASSERT_EQ(std::memcmp(&samples[0].raw_logprobs[0], &value, sizeof value), 0) << text;
    ASSERT_EQ(std::memcmp(&samples[0].processed_logprobs[0], &value, sizeof value), 0) << text;
  }
}

TEST(Dialect, VllmSpeaksAsItsTokenRoute) {
  const auto dialect = make_vllm_dialect();
  EXPECT_EQ(dialect
                ->read_facts(R"({"object":"list","data":[{"id":"Qwen/Qwen3-0.6B","object":"model",
      "created":1,"owned_by":"vllm","root":"Qwen/Qwen3-0.6B","parent":null,"max_model_len":40960,
      "permission":[]}]})")
                .max_length,
            40960);
  const ServerCall call = dialect->generate(request(), "Qwen/Qwen3-0.6B", 7);
  const auto body = body_of(call);
  EXPECT_STREQ(body["model"].GetString(), "Qwen/Qwen3-0.6B");
  EXPECT_STREQ(body["cache_salt"].GetString(), "7");
  EXPECT_TRUE(body["sampling_params"]["ignore_eos"].GetBool());
  const auto samples = dialect->read_samples(request(), R"({"request_id":"g","choices":[
      {"index":0,"logprobs":{"content":[{"token":"token_id:5","logprob":-0.5,"bytes":null,
        "top_logprobs":[]},{"token":"token_id:9","logprob":-1.25,"bytes":null,"top_logprobs":[]}]},
       "finish_reason":"stop","token_ids":[5,9]},
      {"index":1,"logprobs":{"content":[{"logprob":-0.5},{"logprob":-0.5},{"logprob":-0.5},
        {"logprob":-0.5}]},"finish_reason":"length","token_ids":[5,6,7,8]}],
      "prompt_logprobs":null,"kv_transfer_params":null})",
                                             7);
  ASSERT_EQ(samples.size(), 2u);
  EXPECT_EQ(samples[0].ids, (std::vector<int32_t>{5, 9}));
  EXPECT_EQ(samples[0].processed_logprobs, (std::vector<float>{-0.5f, -1.25f}));
  EXPECT_EQ(samples[1].versions, std::vector<PolicyVersion>(4, 7));
  EXPECT_EQ(samples[1].finish, Finish::length);
  check_samples(request(), samples, {.vocab_size = 11, .oldest = 7, .newest = 8});
  EXPECT_EQ(dialect->pause().path, "/pause?mode=keep&clear_cache=false");
  const auto updates = dialect->update("/w/step_8", 8);
  ASSERT_EQ(updates.size(), 2u);
  EXPECT_EQ(updates[0].body, R"({"weight_dir": "/w/step_8"})");
  EXPECT_EQ(updates[1].body,
            R"({"method": "reload_weights", "kwargs": {"weights_path": "/w/step_8"}})");
}

TEST(Dialect, SglangSpeaksAsItsGenerateRoute) {
  const auto dialect = make_sglang_dialect();
  const auto body = body_of(dialect->generate(request(), "", 0));
  EXPECT_EQ(body["input_ids"].Size(), 3u);
  EXPECT_TRUE(body["return_logprob"].GetBool());
  EXPECT_EQ(body["sampling_params"]["top_k"].GetInt(), -1);
  const std::string one = R"({"text":"x","output_ids":[5,10],"meta_info":{"id":"a",
      "finish_reason":{"type":"stop","matched":10},"prompt_tokens":3,"weight_version":"2",
      "output_token_logprobs":[[-0.25,5,null],[-1.5,10,null]],"completion_tokens":2}})";
  Request single = request();
  single.samples = 1;
  const auto samples = dialect->read_samples(single, one, 2);
  ASSERT_EQ(samples.size(), 1u);
  EXPECT_EQ(samples[0].ids, (std::vector<int32_t>{5, 10}));
  EXPECT_EQ(samples[0].raw_logprobs, (std::vector<float>{-0.25f, -1.5f}));
  EXPECT_EQ(dialect->read_samples(request(), "[" + one + "," + one + "]", 2).size(), 2u);
  const auto aborted = dialect->read_samples(
      single, R"({"meta_info":{"finish_reason":{"type":"abort","message":"Abort before prefill"},
      "output_token_logprobs":[]}})",
      2);
  EXPECT_EQ(aborted[0].finish, Finish::cancelled);
  dialect->check_updated(R"({"success":true,"message":"Succeeded to update model weights."})", 2,
                         0);
  EXPECT_THROW(dialect->check_updated(R"({"success":false,"message":"no"})", 2, 0), Error);
}

TEST(Dialect, AdaptersHaveANameForEachVersion) {
  const std::string loads = R"({"lora_name": "leeway-8", "lora_path": "/w/step_8"})";
  const std::string unloads = R"({"lora_name": "leeway-7"})";
  const auto ours = make_dialect(InferenceDialect::leeway, ServedWeights::adapter);
  const auto load = ours->update("/w/step_8", 8);
  ASSERT_EQ(load.size(), 1u);
  EXPECT_EQ(load[0].path, "/v1/load_lora_adapter");
  EXPECT_EQ(load[0].body,
            R"({"lora_name": "leeway-8", "lora_path": "/w/step_8", "weight_version": 8})");
  EXPECT_FALSE(ours->forget(7).has_value());  // the next takes its place
  EXPECT_FALSE(ours->has_already(400, "already"));

  const auto vllm = make_dialect(InferenceDialect::vllm, ServedWeights::adapter);
  const auto either = vllm->update("/w/step_8", 8);
  ASSERT_EQ(either.size(), 2u);
  EXPECT_EQ(either[0].path, "/v1/load_lora_adapter");
  EXPECT_EQ(either[1].path, "/load_lora_adapter");
  EXPECT_EQ(either[0].body, loads);
  EXPECT_EQ(vllm->forget(7)->path, "/v1/unload_lora_adapter");
  EXPECT_EQ(vllm->forget(7)->body, unloads);
  EXPECT_TRUE(vllm->has_already(400, "The lora adapter 'leeway-8' has already been loaded."));
  EXPECT_FALSE(vllm->has_already(400, "no such folder"));
  EXPECT_STREQ(body_of(vllm->generate(request(), "base", 8))["model"].GetString(), "leeway-8");

  const auto sglang = make_dialect(InferenceDialect::sglang, ServedWeights::adapter);
  EXPECT_EQ(sglang->update("/w/step_8", 8).at(0).path, "/load_lora_adapter");
  EXPECT_EQ(sglang->update("/w/step_8", 8).at(0).body, loads);
  EXPECT_EQ(sglang->forget(7)->path, "/unload_lora_adapter");
  EXPECT_STREQ(body_of(sglang->generate(request(), "base", 8))["lora_path"].GetString(),
               "leeway-8");
  EXPECT_FALSE(
      body_of(make_sglang_dialect()->generate(request(), "base", 8)).HasMember("lora_path"));
  EXPECT_FALSE(make_vllm_dialect()->forget(7).has_value());
}

TEST(Dialect, AnswersOfTheWrongKindAreNamed) {
  const auto read = [](const Dialect& dialect, const std::string& body) {
    return error_of([&] { dialect.read_samples(request(), body, 0); });
  };
  for (const auto& make : {make_leeway_dialect, make_vllm_dialect, make_sglang_dialect}) {
    const auto dialect = make(ServedWeights::whole);
    for (const char* body :
         {"", "null", "[1]", "\"x\"", "{}", R"({"choices":7})", R"({"choices":[7]})",
          R"({"choices":[{"index":0}]})", R"({"meta_info":[]})", "{\"choices\":[", "\xff"}) {
      EXPECT_NE(read(*dialect, body), "") << body;
    }
  }
  EXPECT_NE(read(*make_vllm_dialect(),
                 R"({"choices":[{"index":0,"token_ids":[1.5],"finish_reason":"stop"}]})")
                .find("token_ids"),
            std::string::npos);
}

}  // namespace
}  // namespace leeway
