#include "engine/request.h"

#include <gtest/gtest.h>

#include <string>

#include "kernels/attention.h"
#include "leeway/error.h"

namespace leeway {
namespace {

constexpr RequestLimits kLimits{
    .vocabulary = 50, .positions = 100, .sequences = 8, .blocks = 12, .block_bytes = 1000};

Request request(int64_t prompt, int64_t max_new_tokens, int64_t samples = 1) {
  Request r;
  r.prompt.assign(static_cast<size_t>(prompt), 3);
  r.max_new_tokens = max_new_tokens;
  r.samples = samples;
  return r;
}

std::string refusal(const Request& r) {
  try {
    check_request(r, kLimits);
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(CheckRequest, SaysWhatIsWrongWithItsValueAndTheLimit) {
  const auto with = [](Request r, auto change) {
    change(r);
    return r;
  };
  const Request good = request(4, 4);
  const std::vector<std::pair<Request, std::vector<std::string>>> bad{
      {request(0, 4), {"prompt is empty"}},
      {with(good, [](Request& r) { r.prompt[2] = 50; }), {"prompt[2] is 50", "0 to 49"}},
      {with(good, [](Request& r) { r.prompt[0] = -1; }), {"prompt[0] is -1", "0 to 49"}},
      {with(good,
            [](Request& r) {
              r.stop_ids = {4, 77};
            }),
       {"stop_ids[1] is 77", "0 to 49"}},
      {request(4, 4, 0), {"samples is 0"}},
      {request(4, 4, 9), {"samples is 9", "max_sequences is 8"}},
      {request(4, 0), {"max_new_tokens is 0"}},
      {request(4, -7), {"max_new_tokens is -7"}},
      {request(60, 41), {"60 tokens", "max_new_tokens 41", "max_position_embeddings is 100"}},
      {request(4, INT64_MAX), {"max_position_embeddings is 100"}},
      {request(101, 1), {"101 tokens", "max_position_embeddings is 100"}},
      {with(good, [](Request& r) { r.sampling.top_p = 0.0f; }), {"top_p is 0"}},
      {with(good, [](Request& r) { r.sampling.temperature = -1.0f; }), {"temperature is -1"}},
      {request(20, 60, 4), {"17 KV-cache blocks", "17000 bytes", "12 (12000 bytes)", "kv_bytes"}}};
  for (const auto& [r, words] : bad) {
    const std::string message = refusal(r);
    for (const std::string& word : words) {
      EXPECT_NE(message.find(word), std::string::npos) << message << "; expected: " << word;
    }
  }
}

TEST(CheckRequest, TakesWhatJustFits) {
  EXPECT_EQ(refusal(request(1, 99)), "accepted");
  EXPECT_EQ(refusal(request(99, 1)), "accepted");
  EXPECT_EQ(refusal(request(60, 40)), "accepted");
  EXPECT_EQ(refusal(request(64, 17, 8)), "accepted");  // 4 blocks and 8 times 1
  EXPECT_NE(refusal(request(64, 18, 8)), "accepted");  // 8 times 2
}

// Counts, position by position, which blocks have to be there.
TEST(BlockNeed, IsThePromptsFullBlocksOnceAndTheRestForEachSample) {
  for (int64_t prompt = 1; prompt <= 50; ++prompt) {
    for (int64_t tokens = 1; tokens <= 50; ++tokens) {
      const BlockNeed need = block_need(request(prompt, tokens));
      int64_t shared = 0, own = 0;
      for (int64_t first = 0; first < prompt + tokens - 1; first += kBlockKeys) {
        // The last token of a sample is not written.
        const bool written_by_samples = first + kBlockKeys > prompt && tokens > 1;
        ++(written_by_samples ? own : shared);
      }
      ASSERT_EQ(need.shared, shared) << prompt << " " << tokens;
      ASSERT_EQ(need.own, own) << prompt << " " << tokens;
      ASSERT_EQ(need.of(7), shared + 7 * own);
    }
  }
}

TEST(Finish, HasAName) {
  EXPECT_STREQ(name_of(Finish::stop), "stop");
  EXPECT_STREQ(name_of(Finish::length), "length");
  EXPECT_STREQ(name_of(Finish::cancelled), "cancelled");
}

}  // namespace
}  // namespace leeway
