// Thread pool, files, JSON, and escaping text for terminals.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <numeric>
#include <thread>
#include <vector>

#include "base/files.h"
#include "base/json.h"
#include "base/printable.h"
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

TEST(Team, HandsOutEveryIndexOnceLoopAfterLoop) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    pool.run_team([&](Team& team) {
      EXPECT_EQ(team.size(), threads);
      for (int64_t round = 0; round < 2000; ++round) {
        const int64_t count = round % 23;
        std::vector<std::atomic<int>> seen(static_cast<size_t>(count));
        team.for_each(count, [&](int64_t i) { ++seen[static_cast<size_t>(i)]; });
        for (const auto& times : seen) ASSERT_EQ(times, 1) << "round " << round;
      }
    });
  }
}

TEST(Team, NoTwoThreadsShareANumberAtATime) {
  ThreadPool pool(4);
  pool.run_team([&](Team& team) {
    std::vector<std::atomic<int>> inside(4);
    for (int round = 0; round < 200; ++round) {
      team.for_each(64, [&](int64_t, int thread) {
        ASSERT_EQ(inside[static_cast<size_t>(thread)]++, 0);
        std::this_thread::yield();
        --inside[static_cast<size_t>(thread)];
      });
    }
  });
}

TEST(Team, WhatALoopWroteIsThereAfterIt) {
  ThreadPool pool(3);
  pool.run_team([&](Team& team) {
    std::vector<int64_t> values(1000, 0);
    for (int64_t round = 1; round < 300; ++round) {
      team.for_each(1000, [&](int64_t i) { values[static_cast<size_t>(i)] += i; });
      for (int64_t i = 0; i < 1000; i += 37) {
        ASSERT_EQ(values[static_cast<size_t>(i)], i * round);
      }
    }
  });
}

TEST(Team, DoesNotWaitForThreadsThatTookNothing) {
  // Other threads keep all cores busy; the caller still makes progress by itself.
  std::atomic<bool> stop{false};
  std::vector<std::thread> busy;
  for (unsigned k = 0; k < 2 * std::thread::hardware_concurrency(); ++k) {
    busy.emplace_back([&] {
      while (!stop) {
      }
    });
  }
  ThreadPool pool(8);
  int64_t total = 0;
  pool.run_team([&](Team& team) {
    for (int round = 0; round < 2000; ++round) {
      std::atomic<int64_t> sum{0};
      team.for_each(8, [&](int64_t i) { sum += i; });
      total += sum;
    }
  });
  stop = true;
  for (std::thread& thread : busy) thread.join();
  EXPECT_EQ(total, 28 * 2000);
}

TEST(Team, RethrowsWhenTheLoopHasEndedAndGoesOn) {
  ThreadPool pool(3);
  std::atomic<int> calls{0};
  pool.run_team([&](Team& team) {
    EXPECT_THROW(team.for_each(50,
                               [&](int64_t i) {
                                 ++calls;
                                 if (i == 7) throw Error("seven");
                               }),
                 Error);
    EXPECT_EQ(calls, 50);
    team.for_each(5, [&](int64_t) { ++calls; });
  });
  EXPECT_EQ(calls, 55);
}

TEST(Team, ScratchGrowsAndKeepsWhatItHeld) {
  ThreadPool pool(2);
  pool.run_team([&](Team& team) {
    std::byte* memory = team.scratch(100);
    memory[99] = std::byte{7};
    EXPECT_EQ(team.scratch(50)[99], std::byte{7});
    memory = team.scratch(100000);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 64, 0u);
    team.for_each(100000, [&](int64_t i) { memory[i] = std::byte{1}; });
    EXPECT_EQ(team.scratch(1)[99999], std::byte{1});
  });
}

TEST(Team, CallersFromSeveralThreadsTakeTurns) {
  ThreadPool pool(3);
  std::atomic<int> inside{0}, total{0};
  std::vector<std::thread> callers;
  for (int k = 0; k < 4; ++k) {
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        pool.run_team([&](Team& team) {
          EXPECT_EQ(inside++, 0);
          team.for_each(10, [&](int64_t) { ++total; });
          --inside;
        });
        pool.run(3, [&](size_t) { ++total; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 4 * 100 * 13);
}

TEST(Team, PoolsComeAndGo) {
  std::atomic<int> total{0};
  for (int k = 0; k < 100; ++k) {
    ThreadPool pool(1 + k % 4);
    if (k % 3 != 0) pool.run_team([&](Team& team) { team.for_each(2, [&](int64_t) { ++total; }); });
  }
  EXPECT_EQ(total, 132);
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
  // Invalid UTF-8 becomes as many U+FFFD as Python's errors="replace" produces.
  JsonWriter text;
  text.begin_array().value("a\xFF\"\xE2\x82").value("\xED\xA0\x80").value("\u20AC").end_array();
  EXPECT_EQ(text.text(), "[\"a\uFFFD\\\"\uFFFD\", \"\uFFFD\uFFFD\uFFFD\", \"\u20AC\"]");
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

TEST(Json, AZeroIsZeroHoweverItIsWritten) {
  const std::string zeros = "0." + std::string(29, '0');
  for (const std::string& text :
       {std::string("0e-30"), std::string("0.0e-25"), zeros, "-" + zeros, zeros + "E+300"}) {
    const auto json = parse_json("t", "[1, " + text + ", 2.5, \"0e-30\", 10e-30]");
    EXPECT_EQ(json[1].GetDouble(), 0.0) << text;
    EXPECT_EQ(json[2].GetDouble(), 2.5);
    EXPECT_STREQ(json[3].GetString(), "0e-30");
    EXPECT_EQ(json[4].GetDouble(), 10e-30);
  }
  EXPECT_FALSE(with_plain_zeros("[0, 0.5, 100e3, \"0.0000\", \"\\\"0e-5\"]"));
  for (const char* wrong : {"[0.e5]", "[00.000]", "[0e]", "[0.0000.0]"}) {
    EXPECT_THROW(parse_json("t", wrong), Error) << wrong;
  }
}

TEST(Json, NestingIsBoundedAndBracketsInTextsAreNotNesting) {
  const auto nested = [](size_t depth) {
    return std::string(depth, '[') + std::string(depth, ']');
  };
  EXPECT_NO_THROW(parse_json("file.json", nested(kDeepestNesting)));
  for (const std::string& deep : {nested(kDeepestNesting + 1), nested(1000000),
                                  std::string(1000000, '['), "{\"a\": " + nested(1000000)}) {
    try {
      parse_json("file.json", deep);
      FAIL() << deep.size();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("nested more than 100 deep"), std::string::npos)
          << error.what();
    }
  }
  EXPECT_NO_THROW(parse_json("file.json", "[\"\\\"" + std::string(1000, '[') + "\"]"));
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

TEST(Printable, KeepsWhatIsHarmless) {
  for (const std::string text :
       {"", "plain, with \n newline and \t tab", "\u00e4\u4e2d\U0001f600 \u00a0", "\x7e ~ \\"}) {
    EXPECT_EQ(printable(text), text);
  }
}

TEST(Printable, FitsIntoAWidthByCharacters) {
  const std::string text = "\u00e4\u4e2dcdefg";
  EXPECT_EQ(fitting(text, 7), text);
  EXPECT_EQ(fitting(text, 8), text);
  EXPECT_EQ(fitting(text, 6), "\u00e4\u4e2dc...");
  EXPECT_EQ(fitting(text, 4), "\u00e4...");
  EXPECT_EQ(fitting(text, 3), "...");
  EXPECT_EQ(fitting(text, 2), "..");
  EXPECT_EQ(fitting(text, 0), "");
  EXPECT_EQ(fitting("", 0), "");
}

TEST(Printable, WritesOutWhatSteersATerminal) {
  EXPECT_EQ(printable("\033[2J"), "\\u001b[2J");
  EXPECT_EQ(printable("a\rb\bc\x7f"
                      "d\a"),
            "a\\u000db\\u0008c\\u007fd\\u0007");
  EXPECT_EQ(printable(std::string_view("\0", 1)), "\\u0000");
  EXPECT_EQ(printable("\u009b2J\u0085"), "\\u009b2J\\u0085");                 // C1
  EXPECT_EQ(printable("\u202eabc\u2066\u200f"), "\\u202eabc\\u2066\\u200f");  // direction marks
}

TEST(Printable, WritesOutBytesThatAreNoText) {
  EXPECT_EQ(printable("\xff"
                      "a"),
            "\\xffa");
  EXPECT_EQ(printable("\x9b"
                      "2J"),
            "\\x9b2J");
  EXPECT_EQ(printable("\xc0\x80"), "\\xc0\\x80");                    // overlong form
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // beyond U+10FFFF
  EXPECT_EQ(printable("\xe4\xb8"), "\\xe4\\xb8");                    // truncated
}

TEST(Files, AreThereOrNotOrCannotBeLookedAt) {
  EXPECT_TRUE(is_present("/"));
  EXPECT_FALSE(is_present("/nosuch/file"));
  EXPECT_FALSE(is_present("/dev/null/file"));
  const std::string name(300, 'n');
  try {
    (void)is_present(name);
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(name + ": cannot access: File name too long"),
              std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace leeway
