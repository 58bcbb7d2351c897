#include "server/http_message.h"

#include <gtest/gtest.h>

#include "base/rng.h"

namespace leeway {
namespace {

const std::string kPost =
    "POST /v1/x?mode=keep&a=%20b+c&empty HTTP/1.1\r\nHost: a\r\nX-Name:  some value \r\n"
    "Content-Length: 5\r\n\r\nhello";
const std::string kChunked =
    "POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;ext=1\r\nhello\r\n4\r\n you\r\n0\r\n"
    "Trailer: x\r\n\r\n";

// However the bytes arrive, the request is the same.
TEST(HttpParser, ReadsRequestsCutAnywhere) {
  for (size_t cut = 1; cut < kPost.size(); ++cut) {
    HttpParser parser{HttpLimits{}};
    ASSERT_EQ(parser.feed(std::string_view(kPost).substr(0, cut)), cut);
    ASSERT_FALSE(parser.complete());
    ASSERT_TRUE(parser.begun());
    ASSERT_EQ(parser.feed(kPost.substr(cut)), kPost.size() - cut);
    ASSERT_TRUE(parser.complete());
    const HttpRequest request = parser.take();
    EXPECT_EQ(request.method, "POST");
    EXPECT_EQ(request.path, "/v1/x");
    EXPECT_EQ(request.body, "hello");
    EXPECT_EQ(*request.header("x-name"), "some value");
    EXPECT_EQ(request.header("y"), nullptr);
    EXPECT_EQ(request.query_value("mode"), "keep");
    EXPECT_EQ(request.query_value("a"), " b c");
    EXPECT_EQ(request.query_value("empty"), "");
    EXPECT_FALSE(request.query_value("other"));
    EXPECT_TRUE(request.keep_alive);
    EXPECT_FALSE(parser.begun());
  }
}

TEST(HttpParser, ReadsChunksCutAnywhereAndStopsAfterTheRequest) {
  for (size_t cut = 1; cut < kChunked.size(); ++cut) {
    HttpParser parser{HttpLimits{}};
    const std::string rest = kChunked.substr(cut) + "GET / HTTP/1.0\r\n\r\n";
    parser.feed(std::string_view(kChunked).substr(0, cut));
    ASSERT_EQ(parser.feed(rest), kChunked.size() - cut);
    ASSERT_TRUE(parser.complete());
    EXPECT_EQ(parser.take().body, "hello you");
    parser.feed("GET / HTTP/1.0\r\n\r\n");
    ASSERT_TRUE(parser.complete());
    const HttpRequest second = parser.take();
    EXPECT_TRUE(second.http10);
    EXPECT_FALSE(second.keep_alive);
  }
}

int status_of(const std::string& bytes, HttpLimits limits = {}) {
  HttpParser parser(limits);
  parser.feed(bytes);
  return parser.complete() ? 200 : parser.error_status();
}

TEST(HttpParser, RefusesWhatIsAmbiguousOrTooLarge) {
  const std::string head = "POST / HTTP/1.1\r\n";
  EXPECT_EQ(status_of(head + "Content-Length: 1\r\nContent-Length: 1\r\n\r\nx"), 400);
  EXPECT_EQ(status_of(head + "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"), 400);
  EXPECT_EQ(status_of(head + "Transfer-Encoding: gzip, chunked\r\n\r\n"), 400);
  EXPECT_EQ(status_of(head + "Content-Length: +1\r\n\r\n"), 400);
  EXPECT_EQ(status_of(head + "Content-Length: 0x10\r\n\r\n"), 400);
  EXPECT_EQ(status_of(head + "Content-Length: -1\r\n\r\n"), 400);
  EXPECT_EQ(status_of(head + "Content-Length: 99999999999999999999999\r\n\r\n"), 400);
  EXPECT_EQ(status_of(head + "Content-Length: 999999999999\r\n\r\n"), 413);
  EXPECT_EQ(status_of(head + "Name : x\r\n\r\n"), 400);
  EXPECT_EQ(status_of(head + " folded: x\r\n\r\n"), 400);
  EXPECT_EQ(status_of(head + "no colon\r\n\r\n"), 400);
  EXPECT_EQ(status_of(head + "a: b\rc\r\n\r\n"), 400);
  EXPECT_EQ(status_of(head + std::string("a: b\0c\r\n\r\n", 10)), 400);
  EXPECT_EQ(status_of(head + "Expect: cake\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/2.0\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET /\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET nowhere HTTP/1.1\r\n\r\n"), 400);
  EXPECT_EQ(status_of("G@T / HTTP/1.1\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET http://a/b HTTP/1.1\r\n\r\n"), 200);
  EXPECT_EQ(status_of("\r\n\r\nGET / HTTP/1.1\r\n\r\n"), 200);
  EXPECT_EQ(status_of(head + "a: " + std::string(40'000, 'x') + "\r\n\r\n"), 431);
  EXPECT_EQ(status_of(std::string(40'000, '\n')), 431);
  std::string many = head;
  for (int i = 0; i < 101; ++i) many += "a: b\r\n";
  EXPECT_EQ(status_of(many + "\r\n"), 431);
  const std::string chunks = head + "Transfer-Encoding: chunked\r\n\r\n";
  EXPECT_EQ(status_of(chunks + "-5\r\n"), 400);
  EXPECT_EQ(status_of(chunks + "5\r\nhelloX\r\n"), 400);
  EXPECT_EQ(status_of(chunks + "ffffffffff\r\n"), 413);
  EXPECT_EQ(status_of(chunks + "8\r\n12345678\r\n8\r\n", {.body_bytes = 10}), 413);
}

TEST(HttpParser, TellsOnceThatTheClientWaits) {
  HttpParser parser{HttpLimits{}};
  parser.feed("POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n");
  EXPECT_TRUE(parser.take_continue());
  EXPECT_FALSE(parser.take_continue());
  parser.feed("{}");
  EXPECT_TRUE(parser.complete());
}

// Whatever comes: bytes are taken or the parser is done, and memory stays within the limits.
TEST(HttpParser, SurvivesAnyBytes) {
  Rng rng(5);
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = rng.below(2) == 0 ? kPost : kChunked;
    for (uint64_t edits = rng.below(6); edits > 0; --edits) {
      const size_t at = rng.below(bytes.size());
      switch (rng.below(3)) {
        case 0: bytes[at] = static_cast<char>(rng.below(256)); break;
        case 1: bytes.erase(at, rng.below(8)); break;
        default: bytes.insert(at, bytes.substr(rng.below(bytes.size()), rng.below(12)));
      }
      if (bytes.empty()) bytes = "x";
    }
    HttpParser parser({.header_bytes = 512, .headers = 10, .body_bytes = 64});
    std::string_view rest = bytes;
    while (!rest.empty() && parser.error_status() == 0) {
      const size_t count = std::min<size_t>(1 + rng.below(20), rest.size());
      const size_t taken = parser.feed(rest.substr(0, count));
      ASSERT_TRUE(taken == count || parser.complete() || parser.error_status() != 0);
      rest.remove_prefix(taken);
      if (parser.complete()) {
        ASSERT_LE(parser.take().body.size(), 64u);
      }
    }
  }
}

}  // namespace
}  // namespace leeway
