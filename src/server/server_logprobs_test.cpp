// The most likely tokens beside the sampled one, on all routes that have log-probabilities, against
// a softmax in double over the logits of a whole pass.

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "engine/test_support.h"
#include "server/test_support.h"

namespace leeway {
namespace {

using namespace testing;

constexpr int kTop = 5;

struct Candidate {
  int32_t id;
  double logprob;
};

// All tokens that may follow each prefix of `ids`, the most likely first.
std::vector<std::vector<Candidate>> reference(const std::vector<int32_t>& ids) {
  const Parameters weights = byte_weights(1);
  const auto vocabulary = static_cast<size_t>(weights.config().vocab_size);
  const std::vector<float> logits = WholePass(weights, Precision::float32).logits(ids);
  std::vector<std::vector<Candidate>> all;
  for (size_t row = 0; row < ids.size(); ++row) {
    const std::span<const float> z = std::span(logits).subspan(row * vocabulary, vocabulary);
    double total = 0;
    for (const float value : z) total += std::exp(static_cast<double>(value));
    std::vector<Candidate>& list = all.emplace_back();
    for (size_t id = 0; id < vocabulary; ++id) {
      list.push_back({static_cast<int32_t>(id), static_cast<double>(z[id]) - std::log(total)});
    }
    std::stable_sort(list.begin(), list.end(),
                     [](const Candidate& a, const Candidate& b) { return a.logprob > b.logprob; });
  }
  return all;
}

int32_t id_in(const std::string& name) {
  EXPECT_TRUE(name.starts_with("token_id:")) << name;
  return std::stoi(name.substr(9));
}

class ServerLogprobs : public ::testing::Test {
 protected:
  rapidjson::Document post(const std::string& path, const std::string& body) {
    const HttpReply reply = client_.post(path, body);
    EXPECT_EQ(reply.status, 200) << reply.body;
    return parsed_json(reply.body);
  }
  // The answer of a request for one sample, without most likely tokens.
  rapidjson::Document completion(const std::string& more) {
    return post("/v1/completions",
                R"({"prompt": [97, 98, 99], "max_tokens": 8, "seed": 5, "temperature": 0.8, )"
                R"("top_k": 40, "ignore_eos": true, "return_token_ids": true, )"
                R"("return_tokens_as_token_ids": true, "stream": false)" +
                    more + "}");
  }
  void expect_top(const std::vector<Candidate>& got, const std::vector<Candidate>& expected) {
    ASSERT_EQ(got.size(), static_cast<size_t>(kTop));
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].id, expected[i].id);
      EXPECT_NEAR(got[i].logprob, expected[i].logprob, 1e-5);
    }
  }

  RunningServer running_;
  TestClient client_ = running_.client();
  std::vector<int32_t> prompt_ = {97, 98, 99};
};

TEST_F(ServerLogprobs, CompletionsHaveTheMostLikelyTokensAndTheSampledOne) {
  const rapidjson::Document plain = completion(R"(, "logprobs": 0)");
  const rapidjson::Document answer = completion(fmt::format(R"(, "logprobs": {})", kTop));
  const auto& choice = answer["choices"][0];
  const auto& lists = choice["logprobs"];
  std::vector<int32_t> ids = prompt_;
  for (const auto& id : choice["token_ids"].GetArray()) ids.push_back(id.GetInt());
  const auto expected = reference(ids);
  size_t beyond = 0;  // sampled tokens that are not among the most likely
  for (rapidjson::SizeType i = 0; i < lists["tokens"].Size(); ++i) {
    // Asking for more changes neither the tokens nor a bit of their own values.
    EXPECT_EQ(choice["token_ids"][i].GetInt(), plain["choices"][0]["token_ids"][i].GetInt());
    EXPECT_EQ(lists["token_logprobs"][i].GetDouble(),
              plain["choices"][0]["logprobs"]["token_logprobs"][i].GetDouble());
    EXPECT_EQ(plain["choices"][0]["logprobs"]["top_logprobs"][i].MemberCount(), 1u);
    const auto& members = lists["top_logprobs"][i];
    std::vector<Candidate> got;
    for (const auto& member : members.GetObject()) {
      got.push_back({id_in(member.name.GetString()), member.value.GetDouble()});
    }
    const char* sampled = lists["tokens"][i].GetString();
    ASSERT_TRUE(members.HasMember(sampled));
    EXPECT_EQ(members[sampled].GetDouble(), lists["token_logprobs"][i].GetDouble());
    if (got.size() > kTop) {
      ++beyond;
      EXPECT_EQ(got.back().id, id_in(sampled));
      got.pop_back();
    }
    expect_top(got, expected[prompt_.size() - 1 + i]);
  }
  EXPECT_GT(beyond, 0u) << "the test wants samples of both kinds";
  EXPECT_LT(beyond, 8u);
}

TEST_F(ServerLogprobs, EchoesAndPromptLogprobsHaveThemForThePrompt) {
  const auto expected = reference(prompt_);
  const rapidjson::Document answer = completion(fmt::format(
      R"(, "echo": true, "logprobs": {0}, "prompt_logprobs": {0}, "max_tokens": 1)", kTop));
  const auto& choice = answer["choices"][0];
  EXPECT_TRUE(choice["logprobs"]["top_logprobs"][0].IsNull());
  EXPECT_TRUE(choice["prompt_logprobs"][0].IsNull());
  for (rapidjson::SizeType i = 1; i < prompt_.size(); ++i) {
    std::vector<Candidate> echoed, scored(kTop);
    for (const auto& member : choice["logprobs"]["top_logprobs"][i].GetObject()) {
      echoed.push_back({id_in(member.name.GetString()), member.value.GetDouble()});
    }
    echoed.resize(kTop);
    expect_top(echoed, expected[i - 1]);
    const auto& own = choice["prompt_logprobs"][i];
    EXPECT_EQ(own.MemberBegin()->name.GetString(), std::to_string(prompt_[i]));
    for (const auto& member : own.GetObject()) {
      if (!member.value.HasMember("rank")) continue;  // the prompt's token
      scored.at(member.value["rank"].GetUint() - 1) = {std::stoi(member.name.GetString()),
                                                       member.value["logprob"].GetDouble()};
    }
    expect_top(scored, expected[i - 1]);
  }
}

TEST_F(ServerLogprobs, ChatHasThemWholeAndStreamed) {
  const std::string body = fmt::format(
      R"({{"messages": [{{"role": "user", "content": "hi"}}], "max_tokens": 70, "seed": 2, )"
      R"("logprobs": true, "top_logprobs": {}, "return_token_ids": true, )"
      R"("return_tokens_as_token_ids": true)",
      kTop);
  const rapidjson::Document whole = post("/v1/chat/completions", body + "}");
  std::vector<int32_t> ids;
  for (const auto& id : whole["prompt_token_ids"].GetArray()) ids.push_back(id.GetInt());
  const size_t prompt = ids.size();
  for (const auto& id : whole["choices"][0]["token_ids"].GetArray()) ids.push_back(id.GetInt());
  const auto expected = reference(ids);
  const auto& content = whole["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(content.Size(), ids.size() - prompt);
  for (rapidjson::SizeType i = 0; i < content.Size(); ++i) {
    std::vector<Candidate> got;
    for (const auto& entry : content[i]["top_logprobs"].GetArray()) {
      got.push_back({id_in(entry["token"].GetString()), entry["logprob"].GetDouble()});
    }
    expect_top(got, expected[prompt - 1 + i]);
  }
  // The stream has the same entries, in order.
  const HttpReply streamed = client_.post("/v1/chat/completions", body + R"(, "stream": true})");
  rapidjson::SizeType at = 0;
  for (const rapidjson::Document& event : events_of(streamed)) {
    if (event["choices"][0]["logprobs"].IsNull()) continue;
    for (const auto& entry : event["choices"][0]["logprobs"]["content"].GetArray()) {
      ASSERT_LT(at, content.Size());
      EXPECT_EQ(entry, content[at++]);
    }
  }
  EXPECT_EQ(at, content.Size());
}

TEST_F(ServerLogprobs, TokenRoutesHaveThemInBothDialects) {
  const rapidjson::Document vllm =
      post("/inference/v1/generate",
           fmt::format(R"({{"token_ids": [97, 98, 99], "sampling_params": {{"seed": 5, )"
                       R"("max_tokens": 8, "logprobs": {0}, "prompt_logprobs": {0}}}}})",
                       kTop));
  const rapidjson::Document sglang =
      post("/generate",
           fmt::format(R"({{"input_ids": [97, 98, 99], "sampling_params": )"
                       R"({{"sampling_seed": 5, "max_new_tokens": 8, "ignore_eos": true}}, )"
                       R"("return_logprob": true, "logprob_start_len": 0, )"
                       R"("top_logprobs_num": {}}})",
                       kTop));
  std::vector<int32_t> ids = prompt_;
  for (const auto& id : vllm["choices"][0]["token_ids"].GetArray()) ids.push_back(id.GetInt());
  const auto expected = reference(ids);
  const auto& meta = sglang["meta_info"];
  for (rapidjson::SizeType i = 0; i < 8; ++i) {
    ASSERT_EQ(sglang["output_ids"][i].GetInt(), ids[prompt_.size() + i]);
    std::vector<Candidate> entries, triples;
    for (const auto& entry :
         vllm["choices"][0]["logprobs"]["content"][i]["top_logprobs"].GetArray()) {
      EXPECT_EQ(id_in(entry["token"].GetString()), entry["token_id"].GetInt());
      entries.push_back({entry["token_id"].GetInt(), entry["logprob"].GetDouble()});
    }
    for (const auto& entry : meta["output_top_logprobs"][i].GetArray()) {
      triples.push_back({entry[1].GetInt(), entry[0].GetDouble()});
    }
    expect_top(entries, expected[prompt_.size() - 1 + i]);
    expect_top(triples, expected[prompt_.size() - 1 + i]);
  }
  EXPECT_TRUE(meta["input_top_logprobs"][0].IsNull());
  EXPECT_EQ(meta["input_top_logprobs"][2][0][1].GetInt(), expected[1][0].id);
  EXPECT_EQ(vllm["prompt_logprobs"].Size(), prompt_.size());
}

TEST_F(ServerLogprobs, MoreThanTwentyAndOtherDistributionsAreRefused) {
  const auto refused = [&](const std::string& path, const std::string& body,
                           const std::string& key) {
    const HttpReply reply = client_.post(path, body);
    EXPECT_EQ(reply.status, 400) << reply.body;
    EXPECT_NE(reply.body.find(key), std::string::npos) << reply.body;
  };
  refused("/v1/completions", R"({"prompt": "a", "logprobs": 21})", "logprobs");
  refused("/v1/completions", R"({"prompt": "a", "logprobs": -1})", "logprobs");
  refused("/v1/completions", R"({"prompt": "a", "prompt_logprobs": 21})", "prompt_logprobs");
  refused("/v1/completions",
          R"({"prompt": "a", "logprobs": 2, "logprobs_mode": "processed_logprobs"})",
          "raw_logprobs");
  const std::string chat = R"({"messages": [{"role": "user", "content": "a"}])";
  refused("/v1/chat/completions", chat + R"(, "logprobs": true, "top_logprobs": 21})",
          "top_logprobs");
  refused("/v1/chat/completions", chat + R"(, "top_logprobs": 2})", "needs logprobs");
  refused("/generate", R"({"input_ids": [1], "return_logprob": true, "top_logprobs_num": 21})",
          "top_logprobs_num");
  refused("/inference/v1/generate", R"({"token_ids": [1], "sampling_params": {"logprobs": 21}})",
          "logprobs");
}

// What is sent while the tokens come is what the whole answer has.
TEST_F(ServerLogprobs, TokenIdsStream) {
  for (const int seed : {1, 2, 3}) {
    const std::string body = fmt::format(
        R"({{"token_ids": [97, 98], "request_id": "r", "sampling_params": {{"n": 2, "seed": {}, )"
        R"("max_tokens": 30, "logprobs": 2, "stop_token_ids": [40, 41, 42, 43, 44]}})",
        seed);
    const rapidjson::Document whole = post("/inference/v1/generate", body + "}");
    const HttpReply streamed =
        client_.post("/inference/v1/generate",
                     body + R"(, "stream": true, "stream_options": {"include_usage": true}})");
    ASSERT_EQ(streamed.status, 200);
    EXPECT_NE(streamed.head.find("text/event-stream"), std::string::npos);
    std::vector<std::string> ids(2), finish(2);
    std::vector<rapidjson::SizeType> entries(2), tokens(2);
    int completion_tokens = 0;
    for (const rapidjson::Document& event : events_of(streamed)) {
      EXPECT_STREQ(event["request_id"].GetString(), "r");
      if (event.HasMember("usage")) {
        completion_tokens = event["usage"]["completion_tokens"].GetInt();
        EXPECT_EQ(event["usage"]["prompt_tokens"].GetInt(), 2);
      }
      for (const auto& part : event["choices"].GetArray()) {
        const size_t index = part["index"].GetUint();
        const auto& choice = whole["choices"][static_cast<rapidjson::SizeType>(index)];
        for (const auto& id : part["token_ids"].GetArray()) {
          EXPECT_EQ(id, choice["token_ids"][tokens[index]++]);
        }
        for (const auto& entry : part["logprobs"]["content"].GetArray()) {
          EXPECT_EQ(entry, choice["logprobs"]["content"][entries[index]++]);
        }
        if (!part["finish_reason"].IsNull()) finish[index] = part["finish_reason"].GetString();
      }
    }
    rapidjson::SizeType total = 0;
    for (size_t i = 0; i < 2; ++i) {
      const auto& choice = whole["choices"][static_cast<rapidjson::SizeType>(i)];
      EXPECT_EQ(tokens[i], choice["token_ids"].Size());
      EXPECT_EQ(entries[i], tokens[i]);
      EXPECT_EQ(finish[i], choice["finish_reason"].GetString());
      total += tokens[i];
    }
    EXPECT_EQ(completion_tokens, static_cast<int>(total));
  }
}

// SGLang's stream sends all that there is each time, and its last event is the whole answer.
TEST_F(ServerLogprobs, SglangStreamsEndWithTheWholeAnswer) {
  const std::string body =
      R"({"input_ids": [97, 98], "rid": "x", "return_logprob": true, "top_logprobs_num": 2, )"
      R"("sampling_params": {"max_new_tokens": 20, "sampling_seed": 3, "ignore_eos": true})";
  const rapidjson::Document whole = post("/generate", body + "}");
  const auto events = events_of(client_.post("/generate", body + R"(, "stream": true})"));
  ASSERT_FALSE(events.empty());
  for (const rapidjson::Document& event : events) {
    const auto& ids = event["output_ids"];
    for (rapidjson::SizeType i = 0; i < ids.Size(); ++i) EXPECT_EQ(ids[i], whole["output_ids"][i]);
    EXPECT_EQ(event["meta_info"]["output_token_logprobs"].Size(), ids.Size());
    EXPECT_EQ(event["meta_info"]["completion_tokens"].GetUint(), ids.Size());
  }
  for (size_t i = 0; i + 1 < events.size(); ++i) {
    EXPECT_TRUE(events[i]["meta_info"]["finish_reason"].IsNull());
  }
  EXPECT_EQ(events.back(), whole);
}

}  // namespace
}  // namespace leeway
