// Texts and conversations over HTTP, whole and streamed, and the bodies that other programs send.

#include <fmt/format.h>

#include "engine/test_support.h"
#include "generate/scoring.h"
#include "server/chain_model.h"
#include "server/test_support.h"

namespace leeway {
namespace {

using namespace testing;

std::vector<int32_t> ints(const rapidjson::Value& list) {
  std::vector<int32_t> values;
  for (const auto& item : list.GetArray()) values.push_back(item.GetInt());
  return values;
}

// With the NUL bytes that a random model says.
std::string words(const rapidjson::Value& value) {
  return value.IsNull() ? "" : std::string(value.GetString(), value.GetStringLength());
}

void append(std::vector<int32_t>& to, const rapidjson::Value& list) {
  for (const int32_t id : ints(list)) to.push_back(id);
}

// The whole answer and the stream of the same request say the same.
TEST(ServerText, StreamsHaveTheTextOfTheWhole) {
  const RunningServer running;
  TestClient client = running.client();
  for (const char* more : {"", R"(, "stop": ["\n", "e", "zz"])", R"(, "temperature": 0.3)",
                           R"(, "stop_token_ids": [10, 40, 41, 42])"}) {
    for (const int seed : {1, 2, 3}) {
      const std::string body =
          fmt::format(R"({{"prompt": ["Once", "upon a"], "max_tokens": 40, "n": 2, "seed": {}, )"
                      R"("logprobs": 0, "return_token_ids": true{})",
                      seed, more);
      const HttpReply whole = client.post("/v1/completions", body + "}");
      ASSERT_EQ(whole.status, 200) << whole.body;
      const rapidjson::Document answer = parsed_json(whole.body);
      const HttpReply streamed =
          client.post("/v1/completions",
                      body + R"(, "stream": true, "stream_options": {"include_usage": true}})");
      ASSERT_EQ(streamed.status, 200) << streamed.body;
      struct Choice {
        std::string text, finish;
        std::vector<int32_t> ids, versions;
        size_t logprobs = 0;
      } choices[4];
      int completion_tokens = -1;
      for (const rapidjson::Document& event : events_of(streamed)) {
        if (event.HasMember("usage")) {
          completion_tokens = event["usage"]["completion_tokens"].GetInt();
        }
        for (const auto& part : event["choices"].GetArray()) {
          Choice& choice = choices[part["index"].GetInt()];
          choice.text += words(part["text"]);
          append(choice.ids, part["token_ids"]);
          append(choice.versions, part["leeway"]["versions"]);
          choice.logprobs += part["logprobs"]["token_logprobs"].Size();
          if (!part["finish_reason"].IsNull()) choice.finish = part["finish_reason"].GetString();
        }
      }
      EXPECT_EQ(completion_tokens, answer["usage"]["completion_tokens"].GetInt());
      for (int i = 0; i < 4; ++i) {
        const auto& expected = answer["choices"][i];
        EXPECT_EQ(choices[i].text, words(expected["text"]));
        EXPECT_EQ(choices[i].finish, expected["finish_reason"].GetString());
        EXPECT_EQ(choices[i].ids, ints(expected["token_ids"]));
        EXPECT_EQ(choices[i].versions, ints(expected["leeway"]["versions"]));
        EXPECT_EQ(choices[i].logprobs, choices[i].ids.size());
        EXPECT_EQ(choices[i].text.find('\n') == std::string::npos ||
                      std::string_view(more).find("\"e\"") == std::string_view::npos,
                  true);
      }
    }
  }
}

TEST(ServerText, EchoScoresThePrompt) {
  const Parameters weights = byte_weights(1);
  const RunningServer running;
  TestClient client = running.client();
  const std::vector<int32_t> prompt = byte_ids("some words");
  const std::vector<float> expected = score_tokens(weights, {prompt}, {.threads = 1}, nullptr)[0];
  const rapidjson::Document scored = parsed_json(
      client
          .post("/v1/completions",
                R"({"prompt": "some words", "max_tokens": 0, "echo": true, "logprobs": 1})")
          .body);
  const auto& choice = scored["choices"][0];
  EXPECT_STREQ(choice["text"].GetString(), "some words");
  const auto& values = choice["logprobs"]["token_logprobs"];
  ASSERT_EQ(values.Size(), prompt.size());
  EXPECT_TRUE(values[0].IsNull());
  for (rapidjson::SizeType i = 1; i < values.Size(); ++i) {
    EXPECT_EQ(static_cast<float>(values[i].GetDouble()), expected[i - 1]);
  }
  // vLLM's form of the same, and SGLang's.
  const rapidjson::Document vllm =
      parsed_json(client
                      .post("/v1/completions",
                            R"({"prompt": "some words", "max_tokens": 1, "prompt_logprobs": 0})")
                      .body);
  const auto& list = vllm["choices"][0]["prompt_logprobs"];
  ASSERT_EQ(list.Size(), prompt.size());
  EXPECT_EQ(static_cast<float>(list[1]["111"]["logprob"].GetDouble()), expected[0]);
  const rapidjson::Document sglang = parsed_json(
      client
          .post("/generate", R"({"text": "some words", "sampling_params": {"max_new_tokens": 1}, )"
                             R"("return_logprob": true, "logprob_start_len": 0})")
          .body);
  const auto& input = sglang["meta_info"]["input_token_logprobs"];
  ASSERT_EQ(input.Size(), prompt.size());
  EXPECT_EQ(static_cast<float>(input[3][0].GetDouble()), expected[2]);
}

TEST(ServerText, ChatStreamsWhatItAnswersWhole) {
  const RunningServer running;
  TestClient client = running.client();
  for (const char* more : {"", R"(, "stop": ["a", "e", "i"])", R"(, "temperature": 0.5)"}) {
    for (const int seed : {1, 2, 3, 4}) {
      const std::string body = fmt::format(
          R"({{"messages": [{{"role": "user", "content": "hi"}}], "max_tokens": 60, "seed": {}, )"
          R"("logprobs": true, "return_token_ids": true{})",
          seed, more);
      const rapidjson::Document whole =
          parsed_json(client.post("/v1/chat/completions", body + "}").body);
      const auto& message = whole["choices"][0]["message"];
      std::string content, reasoning, finish;
      std::vector<int32_t> ids;
      size_t logprobs = 0;
      bool first = true;
      for (const rapidjson::Document& event :
           events_of(client.post("/v1/chat/completions", body + R"(, "stream": true})"))) {
        const auto& part = event["choices"][0];
        const auto& delta = part["delta"];
        if (first) {
          EXPECT_STREQ(delta["role"].GetString(), "assistant");
        }
        first = false;
        if (delta.HasMember("content")) content += words(delta["content"]);
        if (delta.HasMember("reasoning_content")) {
          reasoning += words(delta["reasoning_content"]);
        }
        append(ids, part["token_ids"]);
        logprobs += part["logprobs"]["content"].Size();
        if (!part["finish_reason"].IsNull()) finish = part["finish_reason"].GetString();
      }
      EXPECT_EQ(content, words(message["content"]));
      EXPECT_EQ(reasoning, words(message["reasoning_content"]));
      EXPECT_EQ(ids, ints(whole["choices"][0]["token_ids"]));
      EXPECT_EQ(logprobs, ids.size());
      EXPECT_EQ(finish, whole["choices"][0]["finish_reason"].GetString());
    }
  }
}

TEST(ServerText, ConversationsAreRenderedAsTheRendererDoes) {
  const RunningServer running;
  TestClient client = running.client();
  const ModelText text = byte_text("qwen3");
  const std::string messages =
      R"([{"role": "developer", "content": "be brief"}, {"role": "user", "content": )"
      R"([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}])";
  RenderOptions options;
  options.add_generation_prompt = true;
  options.enable_thinking = false;
  const std::vector<int32_t> expected = text.renderer
                                            ->render({{.role = Role::system, .content = "be brief"},
                                                      {.role = Role::user, .content = "ab"}},
                                                     options)
                                            .ids;
  const rapidjson::Document answer = parsed_json(
      client
          .post("/v1/chat/completions",
                fmt::format(R"({{"messages": {}, "max_tokens": 2, "return_token_ids": true, )"
                            R"("chat_template_kwargs": {{"enable_thinking": false}}}})",
                            messages))
          .body);
  EXPECT_EQ(ints(answer["prompt_token_ids"]), expected);
  EXPECT_EQ(answer["usage"]["prompt_tokens"].GetInt(), static_cast<int>(expected.size()));
}

TEST(ServerText, CallsToolsAndShowsThinking) {
  const std::vector<std::string> controls = chain_tokens(control_tokens_of("qwen3"));
  ServedText served;
  for (auto* text : {&served.text, &served.chat}) {
    *text = std::make_unique<ModelText>();
    (*text)->tokenizer = make_byte_tokenizer(controls);
    (*text)->renderer = make_renderer("qwen3", (*text)->tokenizer.get());
    (*text)->end_ids = (*text)->renderer->stop_token_ids();
    (*text)->vocab_size = 320;
  }
  const RunningServer running(small_options(), std::move(served), tool_calling_weights(controls));
  TestClient client = running.client();
  const std::string messages = R"({"messages": [{"role": "user", "content": "1 + 2?"}])";
  const std::string tools =
      R"(, "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}])";
  const rapidjson::Document answer =
      parsed_json(client.post("/v1/chat/completions", messages + tools + "}").body);
  const auto& choice = answer["choices"][0];
  EXPECT_STREQ(choice["finish_reason"].GetString(), "tool_calls");
  EXPECT_STREQ(choice["message"]["reasoning_content"].GetString(), "A");
  EXPECT_TRUE(choice["message"]["content"].IsNull());
  ASSERT_EQ(choice["message"]["tool_calls"].Size(), 1u);
  const auto& call = choice["message"]["tool_calls"][0];
  EXPECT_STREQ(call["function"]["name"].GetString(), "add");
  const rapidjson::Document arguments = parsed_json(call["function"]["arguments"].GetString());
  EXPECT_EQ(arguments["b"].GetInt(), 2);
  EXPECT_FALSE(std::string(call["id"].GetString()).empty());
  // Streamed, the call comes whole, and no piece of it as content.
  std::string reasoning;
  int calls = 0;
  for (const rapidjson::Document& event :
       events_of(client.post("/v1/chat/completions", messages + tools + R"(, "stream": true})"))) {
    const auto& delta = event["choices"][0]["delta"];
    if (delta.HasMember("reasoning_content")) reasoning += words(delta["reasoning_content"]);
    if (delta.HasMember("content")) {
      EXPECT_STREQ(delta["content"].GetString(), "");
    }
    if (delta.HasMember("tool_calls")) {
      ++calls;
      EXPECT_EQ(delta["tool_calls"][0]["index"].GetInt(), 0);
    }
  }
  EXPECT_EQ(reasoning, "A");
  EXPECT_EQ(calls, 1);
  // Without tools, or where they are forbidden, the block is text.
  for (const std::string& body :
       {messages + "}", messages + tools + R"(, "tool_choice": "none"})"}) {
    const rapidjson::Document plain = parsed_json(client.post("/v1/chat/completions", body).body);
    EXPECT_STREQ(plain["choices"][0]["finish_reason"].GetString(), "stop");
    EXPECT_NE(std::string(plain["choices"][0]["message"]["content"].GetString()).find("add"),
              std::string::npos);
  }
}

TEST(ServerText, TokenizesAndBack) {
  const RunningServer running;
  TestClient client = running.client();
  const rapidjson::Document ids =
      parsed_json(client.post("/tokenize", R"({"prompt": "abc"})").body);
  EXPECT_EQ(ints(ids["tokens"]), (std::vector<int32_t>{97, 98, 99}));
  EXPECT_EQ(ids["count"].GetInt(), 3);
  const rapidjson::Document text =
      parsed_json(client.post("/detokenize", R"({"tokens": [97, 98, 99]})").body);
  EXPECT_STREQ(text["prompt"].GetString(), "abc");
}

// The bodies that vLLM's clients, prime-rl's and SGLang's send, with the keys that mean nothing
// here; and where those programs look in the answer.
TEST(ServerText, TakesTheBodiesOfOtherPrograms) {
  const RunningServer running;
  TestClient client = running.client();
  const rapidjson::Document vllm = parsed_json(
      client
          .post("/inference/v1/generate",
                R"({"model": "small", "token_ids": [1, 2, 3], "sampling_params": {"temperature": )"
                R"(1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 4, "logprobs": 1, )"
                R"("seed": 1, "n": 1, "repetition_penalty": 1.0, "min_tokens": 0, )"
                R"("skip_special_tokens": false, "detokenize": false}, "cache_salt": "7", )"
                R"("priority": 0, "request_id": "r1", "stream": false})")
          .body);
  EXPECT_STREQ(vllm["request_id"].GetString(), "r1");
  EXPECT_EQ(vllm["choices"][0]["token_ids"].Size(), 4u);
  EXPECT_EQ(vllm["choices"][0]["logprobs"]["content"].Size(), 4u);
  EXPECT_STREQ(vllm["choices"][0]["finish_reason"].GetString(), "length");

  const rapidjson::Document chat = parsed_json(
      client
          .post("/v1/chat/completions",
                R"({"model": "small", "messages": [{"role": "user", "content": "hi"}], )"
                R"("max_completion_tokens": 5, "temperature": 1.0, "logprobs": true, "n": 1, )"
                R"("return_token_ids": true, "return_tokens_as_token_ids": true, "cache_salt": )"
                R"("0", "extra_body": {}, "top_k": -1, "min_p": 0.0, "min_tokens": 0, )"
                R"("repetition_penalty": 1.0, "seed": 3})")
          .body);
  const auto& logprobs = chat["choices"][0]["logprobs"]["content"];
  const std::vector<int32_t> ids = ints(chat["choices"][0]["token_ids"]);
  ASSERT_EQ(logprobs.Size(), ids.size());
  for (rapidjson::SizeType i = 0; i < logprobs.Size(); ++i) {
    EXPECT_EQ(logprobs[i]["token"].GetString(), fmt::format("token_id:{}", ids[i]));
  }

  const rapidjson::Document sglang = parsed_json(
      client
          .post("/generate",
                R"({"input_ids": [1, 2, 3], "sampling_params": {"temperature": 0.7, "top_p": 1.0, )"
                R"("top_k": 1073741824, "max_new_tokens": 5, "stop": null, "stop_token_ids": )"
                R"(null, "skip_special_tokens": false, "no_stop_trim": true, )"
                R"("spaces_between_special_tokens": false, "ignore_eos": true, "sampling_seed": )"
                R"(9}, "return_logprob": true, "logprob_start_len": -1, "rid": "x", )"
                R"("stream": false})")
          .body);
  EXPECT_EQ(sglang["output_ids"].Size(), 5u);
  const auto& meta = sglang["meta_info"];
  EXPECT_STREQ(meta["id"].GetString(), "x");
  EXPECT_STREQ(meta["finish_reason"]["type"].GetString(), "length");
  EXPECT_STREQ(meta["weight_version"].GetString(), "0");
  EXPECT_EQ(meta["completion_tokens"].GetInt(), 5);
  ASSERT_EQ(meta["output_token_logprobs"].Size(), 5u);
  EXPECT_EQ(meta["output_token_logprobs"][2][1].GetInt(), sglang["output_ids"][2].GetInt());

  // SGLang's streams send all that there is each time.
  const auto events = events_of(client.post(
      "/generate", R"({"text": "ab", "sampling_params": {"max_new_tokens": 6, "sampling_seed": 2, )"
                   R"("ignore_eos": true}, "stream": true})"));
  ASSERT_FALSE(events.empty());
  EXPECT_EQ(events.back()["output_ids"].Size(), 6u);
  for (size_t i = 1; i < events.size(); ++i) {
    EXPECT_GE(events[i]["output_ids"].Size(), events[i - 1]["output_ids"].Size());
  }
}

TEST(ServerText, KeysThatAreNearlyKnownAreRefusedAndOthersAreNot) {
  const RunningServer running;
  TestClient client = running.client();
  const auto reply = [&](const std::string& more) {
    return client.post("/v1/completions", R"({"prompt": "ab", "max_tokens": 2, )" + more + "}");
  };
  for (const auto& [given, meant] :
       std::vector<std::pair<std::string, std::string>>{{"temprature", "temperature"},
                                                        {"temperatrue", "temperature"},
                                                        {"max_token", "max_tokens"},
                                                        {"Logprobs", "logprobs"},
                                                        {"stop_tokens_ids", "stop_token_ids"}}) {
    const auto refused = reply(fmt::format(R"("{}": 1)", given));
    EXPECT_EQ(refused.status, 400) << given;
    EXPECT_NE(refused.body.find(given + ": is no key of a request; did you mean " + meant),
              std::string::npos)
        << refused.body;
  }
  for (const char* other : {"user", "store", "cache_salt", "top_n", "priority", "echo", "tokens"}) {
    EXPECT_EQ(reply(fmt::format(R"("{}": null)", other)).status, 200) << other;
  }
  EXPECT_EQ(reply(R"("best_of": 2)").status, 400);
  EXPECT_EQ(reply(R"("n": 2, "best_of": 3)").status, 400);
  EXPECT_EQ(reply(R"("n": 2, "best_of": 2)").status, 200);
  const auto weights =
      client.post("/v1/load_lora_adapter", R"({"lora_name": "a", "lora_path": "x"})");
  EXPECT_EQ(weights.status, 403);
  EXPECT_NE(weights.body.find("permission_error"), std::string::npos) << weights.body;
}

// Both dialects answer what the model itself gives, unless the client asks for what was drawn from.
TEST(ServerText, LogProbabilitiesAreThoseBeforeTemperature) {
  const RunningServer running;
  TestClient client = running.client();
  Request request;
  request.prompt = {97, 98};
  request.max_new_tokens = 6;
  request.sampling.temperature = 0.5f;
  request.seed = 4;
  const Results results = run_all(byte_weights(1), one_thread(), {request});
  const SampledSequence& expected = results.begin()->second;
  const std::string start =
      R"({"prompt": [97, 98], "max_tokens": 6, "temperature": 0.5, "seed": 4, "logprobs": 0, )"
      R"("ignore_eos": true)";
  const rapidjson::Document raw = parsed_json(client.post("/v1/completions", start + "}").body);
  const rapidjson::Document drawn = parsed_json(
      client.post("/v1/completions", start + R"(, "logprobs_mode": "processed_logprobs"})").body);
  const rapidjson::Document sglang =
      parsed_json(client
                      .post("/generate",
                            R"({"input_ids": [97, 98], "return_logprob": true, "sampling_params": )"
                            R"({"max_new_tokens": 6, "temperature": 0.5, "sampling_seed": 4, )"
                            R"("ignore_eos": true}})")
                      .body);
  for (rapidjson::SizeType i = 0; i < 6; ++i) {
    const auto value = [&](const rapidjson::Document& answer) {
      return static_cast<float>(answer["choices"][0]["logprobs"]["token_logprobs"][i].GetDouble());
    };
    EXPECT_EQ(value(raw), expected.raw_logprobs[i]);
    EXPECT_EQ(value(drawn), expected.processed_logprobs[i]);
    EXPECT_EQ(static_cast<float>(sglang["meta_info"]["output_token_logprobs"][i][0].GetDouble()),
              expected.raw_logprobs[i]);
  }
}

}  // namespace
}  // namespace leeway
