#include "generate/generation.h"

#include <gtest/gtest.h>

#include "generate/completion_text.h"
#include "generate/test_support.h"
#include "leeway/error.h"

namespace leeway {
namespace {

using testing::byte_ids;

class Generation : public ::testing::Test {
 protected:
  Generation() : weights_(testing::byte_weights(4)), engine_(weights_, 0, testing::one_thread()) {
    settings_.max_new_tokens = 40;
    settings_.limit_is_given = true;
  }

  std::vector<Generated> run(const GenerationPrompt& prompt, const GenerationEvents& events = {}) {
    return generate(engine_, *text_.tokenizer, positions(), prompt, settings_, events);
  }
  int64_t positions() const { return most_positions(engine_, weights_.config()); }

  ModelText text_ = testing::byte_text("qwen2.5");
  Parameters weights_;
  Engine engine_;
  GenerationSettings settings_;
  GenerationPrompt prompt_{.ids = byte_ids("Hello"), .samples = 1, .seed = 3};
};

TEST_F(Generation, StreamedTextIsTheTextAndItsTokensThoseOfAPlainRequest) {
  prompt_.samples = 3;
  std::vector<std::string> streamed(3);
  GenerationEvents events;
  size_t most = 0, sampled = 0;
  events.on_text = [&](int64_t i, const TextPiece& piece) {
    streamed[static_cast<size_t>(i)] += piece.text;
  };
  events.on_pass = [&](size_t tokens, size_t of) { sampled = tokens, most = of; };
  const std::vector<Generated> loud = run(prompt_, events), silent = run(prompt_);
  ASSERT_EQ(loud.size(), 3u);
  EXPECT_EQ(most, 120u);
  EXPECT_EQ(sampled, 120u);
  engine_.submit({.prompt = prompt_.ids, .samples = 3, .max_new_tokens = 40, .seed = 3});
  const std::vector<SampledSequence> plain = run_to_end(engine_, nullptr);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(loud[i].text, streamed[i]);
    EXPECT_EQ(loud[i].text, silent[i].text);
    EXPECT_EQ(loud[i].sequence.ids, plain[i].ids);
    EXPECT_EQ(silent[i].sequence.raw_logprobs, plain[i].raw_logprobs);
    EXPECT_EQ(loud[i].sequence.finish, Finish::length);
  }
}

TEST_F(Generation, AStopTextEndsItsSampleAloneAndIsNotInTheText) {
  prompt_.samples = 4;
  const std::vector<Generated> whole = run(prompt_);
  // Two sampled bytes of the second sample that are letters, so that they are whole characters.
  std::string stop;
  const std::vector<int32_t>& ids = whole[1].sequence.ids;
  for (size_t i = 1; i + 1 < ids.size() && stop.empty(); ++i) {
    if (ids[i] < 128 && ids[i + 1] < 128) {
      stop = {static_cast<char>(ids[i]), static_cast<char>(ids[i + 1])};
    }
  }
  ASSERT_EQ(stop.size(), 2u);
  settings_.stop_texts = {stop};
  const std::vector<Generated> stopped = run(prompt_);
  for (size_t i = 0; i < stopped.size(); ++i) {
    const size_t at = whole[i].text.find(stop);
    EXPECT_EQ(stopped[i].text, whole[i].text.substr(0, at));
    EXPECT_EQ(stopped[i].sequence.finish, at == std::string::npos ? Finish::length : Finish::stop);
    const auto& all = whole[i].sequence.ids;
    const auto& some = stopped[i].sequence.ids;
    ASSERT_LE(some.size(), all.size());
    EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin()));
    EXPECT_EQ(some.size(), stopped[i].sequence.raw_logprobs.size());
  }
  EXPECT_EQ(stopped[1].sequence.finish, Finish::stop);
}

TEST_F(Generation, TheIdThatEndsACompletionIsATokenButNoText) {
  const std::vector<Generated> whole = run(prompt_);
  const int32_t end = whole[0].sequence.ids[5];
  settings_.stop_ids = {end};
  const Generated stopped = run(prompt_).front();
  EXPECT_EQ(stopped.sequence.finish, Finish::stop);
  EXPECT_EQ(stopped.sequence.ids.back(), end);
  TextStream stream(*text_.tokenizer, {}, false);
  for (size_t i = 0; i + 1 < stopped.sequence.ids.size(); ++i) stream.push(stopped.sequence.ids[i]);
  stream.finish();
  EXPECT_EQ(stopped.text, stream.text());
}

TEST_F(Generation, IsEndedByItsCallerAndTheEngineServesTheNextOne) {
  GenerationEvents events;
  size_t passes = 0;
  events.stop = [&] { return ++passes == 7; };
  const Generated cut = run(prompt_, events).front();
  EXPECT_EQ(cut.sequence.finish, Finish::cancelled);
  EXPECT_EQ(cut.sequence.ids.size(), 7u);
  const Generated whole = run(prompt_).front();
  EXPECT_TRUE(
      std::equal(cut.sequence.ids.begin(), cut.sequence.ids.end(), whole.sequence.ids.begin()));
  // What a caller throws while it is shown text leaves the engine idle too.
  events.stop = nullptr;
  events.on_text = [](int64_t, const TextPiece&) { throw Error("the pipe is closed"); };
  EXPECT_THROW(run(prompt_, events), Error);
  EXPECT_TRUE(engine_.idle());
  EXPECT_EQ(run(prompt_).front().text, whole.text);
}

TEST_F(Generation, AnUngivenLimitGivesWayToWhatFitsAndAGivenOneDoesNot) {
  prompt_.ids.assign(500, 'a');
  EXPECT_THROW(run(prompt_), Error);
  settings_.limit_is_given = false;
  EXPECT_EQ(run(prompt_).front().sequence.ids.size(), 12u);
  prompt_.ids.assign(512, 'a');
  try {
    run(prompt_);
    FAIL() << "there is no room";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("512 tokens leave no room"), std::string::npos)
        << error.what();
  }
}

TEST_F(Generation, FlagsComeBeforeTheFolderAndThatBeforeDefaults) {
  text_.generation.temperature = 0.6f;
  text_.generation.top_k = 20;
  text_.generation.max_new_tokens = 64;
  GenerationFlags flags;
  flags.temperature = 0.2f;
  flags.stop_ids = {9};
  GenerationSettings settings = generation_settings(flags, text_);
  EXPECT_FLOAT_EQ(settings.sampling.temperature, 0.2f);
  EXPECT_EQ(settings.sampling.top_k, 20);
  EXPECT_FLOAT_EQ(settings.sampling.top_p, 1.0f);
  EXPECT_EQ(settings.max_new_tokens, 64);
  EXPECT_FALSE(settings.limit_is_given);
  EXPECT_EQ(settings.stop_ids.size(), text_.end_ids.size() + 1);
  text_.generation.not_applied = {"repetition_penalty 1.05"};
  const std::string said = settings_text(flags, text_);
  EXPECT_NE(said.find("without repetition_penalty 1.05"), std::string::npos) << said;
  EXPECT_EQ(said.find("temperature"), std::string::npos) << "it is not the folder's: " << said;
  EXPECT_NE(said.find("renderer qwen2.5, top_k 20, max_new_tokens 64, ends at"), std::string::npos)
      << said;
  EXPECT_NE(said.find("<|im_end|>"), std::string::npos) << said;
  flags.top_p = 2.0f;
  EXPECT_THROW(generation_settings(flags, text_), Error);
  flags.top_p.reset();
  flags.stop_texts = {""};
  EXPECT_THROW(generation_settings(flags, text_), Error);
}

// A completion as the model could have sampled it.
Generated made(const ModelText& text, const std::string& reply) {
  Generated generated;
  generated.text = reply;
  generated.sequence.ids = text.tokenizer->encode(reply, SpecialTokens::recognise);
  generated.sequence.ids.push_back(text.end_ids.front());
  generated.sequence.raw_logprobs.assign(generated.sequence.ids.size(), -0.5f);
  generated.sequence.processed_logprobs = generated.sequence.raw_logprobs;
  return generated;
}

TEST(CompletionJson, TakesARepliesPartsApart) {
  const ModelText text = testing::byte_text("qwen3");
  const Generated generated =
      made(text,
           "<think>\nhm\n</think>\n\nHi.\n<tool_call>\n{\"name\": \"add\", \"arguments\": "
           "{\"a\": 1}}\n</tool_call>\n<tool_call>\n{oops\n</tool_call>");
  const std::string json = generated_json(generated, text.renderer.get(), {});
  for (const char* part :
       {"\"content\": \"Hi.\"", "\"reasoning\": \"hm\"", "\"finish\": \"stop\"",
        "{\"type\": \"function\", \"function\": {\"name\": \"add\", \"arguments\": {\"a\": 1}}, "
        "\"status\": \"ok\"",
        "\"arguments\": \"\"}, \"status\": \"invalid_json\", \"raw\": \"<tool_call>\\n{oops"}) {
    EXPECT_NE(json.find(part), std::string::npos) << part << " is not in " << json;
  }
  const std::string plain = generated_json(generated, nullptr, {});
  EXPECT_NE(plain.find("\"content\": \"<think>"), std::string::npos) << plain;
  EXPECT_NE(plain.find("\"reasoning\": null, \"tool_calls\": []"), std::string::npos) << plain;
}

}  // namespace
}  // namespace leeway
