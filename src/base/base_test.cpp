// Thread pool, files, JSON.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <numeric>

#include "base/files.h"
#include "base/json.h"
#include "base/rng.h"
#include "base/thread_pool.h"
#include "leeway/error.h"

namespace leeway {
namespace {

TEST(ThreadPool, RunsEveryIndexExactlyOnceLoopAfterLoop) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    EXPECT_EQ(pool.threads(), threads);
    for (size_t count : {0u, 1u, 2u, 3u, 100u, 1000u}) {
      for (int repeat = 0; repeat < 50; ++repeat) {
        std::vector<std::atomic<int>> seen(count);
        pool.run(count, [&](size_t i) { ++seen[i]; });
        for (size_t i = 0; i < count; ++i) ASSERT_EQ(seen[i], 1);
      }
    }
  }
}

TEST(ThreadPool, RethrowsAfterTheLoopHasEnded) {
  ThreadPool pool(3);
  std::atomic<int> ran{0};
  EXPECT_THROW(pool.run(100,
                        [&](size_t i) {
                          ++ran;
                          if (i == 7) throw Error("seven");
                        }),
               Error);
  EXPECT_EQ(ran, 100);
  EXPECT_NO_THROW(pool.run(10, [&](size_t) { ++ran; }));
}

TEST(ThreadPool, CallersFromSeveralThreadsTakeTurns) {
  ThreadPool pool(2);
  std::atomic<int> sum{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int k = 0; k < 50; ++k) pool.run(20, [&](size_t) { ++sum; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum, 4 * 50 * 20);
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = ::testing::TempDir() + "leeway_XXXXXX";
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryFolder() {
    ::unlink((path_ + "/file").c_str());
    ::rmdir(path_.c_str());
  }
  std::string file() const { return path_ + "/file"; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(Files, WriteThenReadIsTheSameAndReplacesWhole) {
  const TemporaryFolder folder;
  const std::string content = std::string("a\0b", 3) + std::string(200000, 'x');
  write_file_atomically(folder.file(), "old");
  write_file_atomically(folder.file(), content);
  EXPECT_EQ(read_file(folder.file()), content);
}

TEST(Files, ProblemsNameThePathAndTheReason) {
  const TemporaryFolder folder;
  auto message = [](auto act) {
    try {
      act();
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(message([&] { read_file(folder.file()); }).find("No such file"), std::string::npos);
  EXPECT_NE(message([&] { read_file(folder.path()); }).find("directory"), std::string::npos);
  EXPECT_NE(
      message([&] { write_file_atomically(folder.path() + "/no/file", "x"); }).find("No such file"),
      std::string::npos);
}

TEST(Json, WriterEscapesAndTurnsNonFiniteIntoNull) {
  JsonWriter json;
  json.begin_object()
      .key("a\"\n")
      .value(1.5)
      .key("b")
      .begin_array()
      .value(std::nan(""))
      .value(true);
  json.value("x\\y").null().end_array().key("c").begin_object().end_object().end_object();
  EXPECT_EQ(json.text(), "{\"a\\\"\\n\": 1.5, \"b\": [null, true, \"x\\\\y\", null], \"c\": {}}");
  EXPECT_NO_THROW(parse_json("self", json.text()));
}

TEST(Json, NumbersSurviveARoundTrip) {
  Rng rng(4);
  for (int k = 0; k < 10000; ++k) {
    const double value = std::ldexp(rng.uniform() - 0.5, static_cast<int>(rng.below(600)) - 300);
    JsonWriter json;
    json.begin_array().value(value).end_array();
    ASSERT_EQ(parse_json("n", json.text())[0].GetDouble(), value) << json.text();
  }
}

TEST(Json, ErrorsSayLineAndColumn) {
  try {
    parse_json("file.json", "{\n  \"a\": [1,\n  2,, 3]}");
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("file.json line 3, column 5"), std::string::npos)
        << error.what();
  }
  EXPECT_TRUE(std::isnan(parse_json("n", "[NaN]")[0].GetDouble()));
  EXPECT_TRUE(std::isinf(parse_json("n", "[-Infinity]")[0].GetDouble()));
}

TEST(Rng, IsTheSameSequenceEverywhere) {
  Rng rng(1);
  EXPECT_EQ(rng.next(), 10451216379200822465u);
  double sum = 0, squares = 0;
  for (int k = 0; k < 100000; ++k) {
    const double x = rng.normal();
    sum += x, squares += x * x;
  }
  EXPECT_NEAR(sum / 100000, 0.0, 0.02);
  EXPECT_NEAR(squares / 100000, 1.0, 0.02);
}

}  // namespace
}  // namespace leeway
