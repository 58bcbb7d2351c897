// What the tests of environments share: replies, rewards, files that go away, refusals.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "base/test_folder.h"
#include "leeway/error.h"
#include "orchestrator/environment.h"

namespace leeway::testing {

// The call throws Error, and the message holds every one of `words`.
inline void expect_refused(const std::function<void()>& call,
                           const std::vector<std::string>& words) {
  try {
    call();
    ADD_FAILURE() << "not refused; expected: " << (words.empty() ? "" : words.front());
  } catch (const Error& error) {
    const std::string message = error.what();
    for (const std::string& word : words) {
      EXPECT_NE(message.find(word), std::string::npos) << "no \"" << word << "\" in: " << message;
    }
  }
}

// As sampled without a renderer.
inline Reply plain_reply(const std::string& text, bool truncated = false) {
  Reply reply;
  reply.text = reply.response.content = text;
  reply.truncated = truncated;
  return reply;
}

// As a renderer reads it: `text` has a stop token behind the content where it is closed.
inline Reply rendered_reply(const std::string& content, bool closed = true) {
  Reply reply;
  reply.text = "<think>hm 1 (A)</think>" + content + (closed ? "<|im_end|>" : "");
  reply.response.content = content;
  reply.response.reasoning = "hm 1 (A)";
  reply.response.closed = closed;
  reply.truncated = !closed;
  return reply;
}

// "exact 1 * 1, format 0.5 * 0" of the first reply.
inline std::string parts_of(const Turn& turn) {
  EXPECT_EQ(turn.kind, Turn::Kind::reward);
  std::string text;
  for (const RewardPart& part : turn.rewards) {
    text +=
        fmt::format("{}{} {} * {}", text.empty() ? "" : ", ", part.name, part.weight, part.value);
  }
  return text;
}

inline std::string parts_of(const Environment& environment, const Example& example,
                            const Reply& reply) {
  return parts_of(environment.start(example)->respond(reply));
}

// Of one message.
inline const std::string& prompt_of(const Example& example) {
  EXPECT_EQ(example.messages.size(), 1u);
  EXPECT_EQ(example.messages.front().role, Role::user);
  return example.messages.front().content;
}

}  // namespace leeway::testing
