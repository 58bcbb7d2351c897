// Thread pool, files, JSON.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <numeric>
#include <thread>
#include <vector>

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

TEST(Team, EveryMemberRunsOnceWithARankOfItsOwn) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (int round = 0; round < 200; ++round) {
      std::vector<std::atomic<int>> seen(static_cast<size_t>(threads));
      std::atomic<int> wrong_size{0};
      pool.run_team([&](Team& team) {
        ++seen[static_cast<size_t>(team.rank())];
        if (team.size() != threads) ++wrong_size;
      });
      for (const std::atomic<int>& count : seen) ASSERT_EQ(count, 1) << threads << " threads";
      ASSERT_EQ(wrong_size, 0);
    }
  }
}

// Plain memory on purpose: what is written before a barrier is there after it.
TEST(Team, AfterABarrierMembersReadWhatOthersWroteBefore) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    std::vector<int> values(static_cast<size_t>(threads)), wrong(static_cast<size_t>(threads));
    for (int repeat = 0; repeat < 5; ++repeat) {
      pool.run_team([&](Team& team) {
        const auto own = static_cast<size_t>(team.rank());
        for (int round = 1; round <= 100; ++round) {
          values[own] = round;
          team.barrier();
          for (int value : values) wrong[own] += value != round;
          team.barrier();
        }
      });
    }
    EXPECT_EQ(std::accumulate(wrong.begin(), wrong.end(), 0), 0) << threads << " threads";
  }
}

TEST(Team, ForEachHandsOutEveryIndexOnceAndEndsWithABarrier) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (int64_t count : {0, 1, 2, 7, 500}) {
      std::vector<int> seen(static_cast<size_t>(count));
      std::atomic<int> wrong{0};
      const int rounds = 30;
      pool.run_team([&](Team& team) {
        for (int round = 1; round <= rounds; ++round) {
          team.for_each(count, [&](int64_t i) { ++seen[static_cast<size_t>(i)]; });
          for (int times : seen) wrong += times != round;
          team.barrier();
        }
      });
      EXPECT_EQ(wrong, 0) << threads << " threads, " << count << " indices";
      EXPECT_EQ(seen, std::vector<int>(static_cast<size_t>(count), rounds));
    }
  }
}

TEST(Team, ScratchIsSharedAndGrowsAndKeepsWhatItHeld) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    std::vector<std::byte*> places(static_cast<size_t>(threads));
    for (size_t bytes : {size_t{1}, size_t{100}, size_t{100000}}) {
      pool.run_team([&](Team& team) {
        std::byte* memory = team.scratch(bytes);
        places[static_cast<size_t>(team.rank())] = memory;
        team.for_each(static_cast<int64_t>(bytes),
                      [&](int64_t i) { memory[i] = static_cast<std::byte>(i * 7); });
      });
      EXPECT_EQ(places, std::vector<std::byte*>(static_cast<size_t>(threads), places[0]));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(places[0]) % 64, 0u);
      std::byte* const before = places[0];
      std::atomic<int> wrong{0};
      pool.run_team([&](Team& team) {
        std::byte* memory = team.scratch(bytes / 2);
        if (memory != before) ++wrong;
        for (size_t i = 0; i < bytes; ++i) wrong += memory[i] != static_cast<std::byte>(i * 7);
      });
      EXPECT_EQ(wrong, 0) << threads << " threads, " << bytes << " bytes";
    }
  }
}

TEST(Team, ScratchMayGrowBetweenTheLoopsOfOneRun) {
  ThreadPool pool(3);
  std::atomic<int> wrong{0};
  pool.run_team([&](Team& team) {
    for (int64_t count = 1; count <= 5000; count *= 2) {
      auto* memory =
          reinterpret_cast<int64_t*>(team.scratch(sizeof(int64_t) * static_cast<size_t>(count)));
      team.for_each(count, [&](int64_t i) { memory[i] = i; });
      for (int64_t i = 0; i < count; ++i) wrong += memory[i] != i;
      team.barrier();
    }
  });
  EXPECT_EQ(wrong, 0);
}

TEST(Team, TakesTurnsWithLoops) {
  for (int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    Rng rng(static_cast<uint64_t>(threads));
    for (int round = 0; round < 300; ++round) {
      const size_t count = rng.below(8);
      std::vector<std::atomic<int>> seen(count + 3);
      pool.run(count, [&](size_t i) { ++seen[i]; });
      std::atomic<int> members{0};
      pool.run_team([&](Team& team) {
        ++members;
        team.for_each(3, [&](int64_t i) { ++seen[count + static_cast<size_t>(i)]; });
      });
      ASSERT_EQ(members, threads);
      for (const std::atomic<int>& times : seen) ASSERT_EQ(times, 1);
    }
  }
}

TEST(Team, CallersFromSeveralThreadsTakeTurns) {
  ThreadPool pool(3);
  std::atomic<int> inside{0}, mixed{0}, sum{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&, c] {
      for (int round = 0; round < 40; ++round) {
        if (c == 0) {
          pool.run(5, [&](size_t) { ++sum; });
          continue;
        }
        pool.run_team([&](Team& team) {
          if (team.rank() == 0 && ++inside != 1) ++mixed;
          team.for_each(5, [&](int64_t) { ++sum; });
          if (team.rank() == 0) --inside;
        });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(mixed, 0);
  EXPECT_EQ(sum, 4 * 40 * 5);
}

TEST(Team, PoolsComeAndGo) {
  std::atomic<int> members{0};
  for (int round = 0; round < 50; ++round) {
    ThreadPool idle(3), pool(4);
    pool.run_team([&](Team& team) {
      ++members;
      team.barrier();
    });
  }
  EXPECT_EQ(members, 200);
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
