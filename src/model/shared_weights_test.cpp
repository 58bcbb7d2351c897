#include "model/shared_weights.h"

#include <gtest/gtest.h>

#include "base/json.h"
#include "leeway/error.h"

namespace leeway {
namespace {

TEST(SharedWeights, AreWrittenAndReadBack) {
  SharedWeights shared{.device = "GPU-0", .offset = 512, .count = 1000, .layout = 0xab};
  for (size_t i = 0; i < kWeightHandleBytes; ++i) shared.handle += static_cast<char>(251 * i);
  shared.checksum = 0xfedcba98u;
  const rapidjson::Document json = parse_json("", shared_weights_json(shared));
  EXPECT_STREQ(json["device"].GetString(), "GPU-0");
  EXPECT_EQ(handle_bytes(json["handle"].GetString()), shared.handle);
  EXPECT_EQ(json["offset"].GetInt64(), 512);
  EXPECT_EQ(json["count"].GetInt64(), 1000);
  EXPECT_EQ(hexadecimal_sum(json["layout"].GetString()), 0xabu);
  EXPECT_EQ(hexadecimal_sum(json["checksum"].GetString()), shared.checksum);
}

TEST(SharedWeights, HandlesAndSumsOfAnotherFormAreRefused) {
  const std::string good(2 * kWeightHandleBytes, '0');
  EXPECT_EQ(handle_bytes(good), std::string(kWeightHandleBytes, '\0'));
  for (const std::string& bad : {std::string(), good.substr(1), good + "00", good.substr(1) + "g",
                                 good.substr(1) + "A", " " + good.substr(1)}) {
    EXPECT_THROW(handle_bytes(bad), Error) << bad;
  }
  for (const char* bad : {"", "0", "123456789", "0x123456", "ABCDEF01", "1234567 "}) {
    EXPECT_THROW(hexadecimal_sum(bad), Error) << bad;
  }
}

TEST(SharedWeights, LoopbackIsThisMachineAlone) {
  for (const char* host : {"localhost", "127.0.0.1", "127.1.2.3", "::1"}) {
    EXPECT_TRUE(is_loopback(host)) << host;
  }
  for (const char* host : {"", "0.0.0.0", "10.0.0.1", "128.0.0.1", "127.example.org",
                           "127.0.0.1.example.org", "::", "localhost.example.org"}) {
    EXPECT_FALSE(is_loopback(host)) << host;
  }
  for (const char* url : {"http://127.0.0.1:8000", "http://localhost", "http://[::1]:80/v1"}) {
    EXPECT_TRUE(is_loopback_url(url)) << url;
  }
  for (const char* url : {"", "127.0.0.1", "http://10.0.0.1:8000", "http://127.0.0.1@example.org",
                          "http://[::2]:1", "http://example.org/127.0.0.1"}) {
    EXPECT_FALSE(is_loopback_url(url)) << url;
  }
}

}  // namespace
}  // namespace leeway
