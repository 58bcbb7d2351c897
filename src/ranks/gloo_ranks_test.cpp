// Ranks by Gloo, as threads of one process: what sanitizers can see. tests/ranks_process_test.cpp
// has them as processes.

#include "ranks/gloo_ranks.h"

#include <gtest/gtest.h>

#include <functional>
#include <thread>

#include "ranks/ranks_test_support.h"
#include "ranks/sockets.h"

namespace leeway {
namespace {

TEST(GlooRanks, NeedNothingForOneRank) {
  const auto ranks = join_ranks({});
  EXPECT_EQ(every_call(*ranks, 3, 100), expected_of_every_call(0, 1, 3, 100));
}

#ifdef LEEWAY_GLOO

std::vector<std::string> on_all(int size, const std::function<void(Ranks&)>& body) {
  Descriptor listener = listen_at("127.0.0.1", 0);
  RanksOptions options{.size = size, .leader_port = port_of(listener), .job = "test"};
  std::vector<std::string> problems(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    options.rank = r;
    options.listener = r == 0 ? listener.release() : -1;
    threads.emplace_back([&, options] {
      try {
        body(*join_ranks(options));
      } catch (const Lost& problem) {
        problems[static_cast<size_t>(options.rank)] = problem.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return problems;
}

TEST(GlooRanks, GiveWhatFollowsFromTheNumbers) {
  for (int size = 2; size <= 5; ++size) {
    const auto problems = on_all(size, [&](Ranks& ranks) {
      for (uint64_t seed = 0; seed < 8; ++seed) {
        EXPECT_EQ(every_call(ranks, seed, 3000),
                  expected_of_every_call(ranks.rank(), size, seed, 3000))
            << "rank " << ranks.rank() << " of " << size;
      }
    });
    for (const std::string& problem : problems) EXPECT_EQ(problem, "");
  }
}

TEST(GlooRanks, SumInPiecesWhatIsLargerThanOne) {
  const size_t length = (size_t(4) << 20) / sizeof(float) * 2 + 5;  // more than two of the largest
  const auto problems = on_all(2, [&](Ranks& ranks) {
    std::vector<float> whole(length * 2);
    for (size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<float>(i % 1001);
    const std::vector<size_t> bounds = {0, length, length * 2};
    std::vector<float> part(length);
    ASSERT_TRUE(ranks.reduce_scatter(whole, bounds, part));
    size_t wrong = 0;
    const size_t begin = bounds[static_cast<size_t>(ranks.rank())];
    for (size_t i = 0; i < length; ++i) wrong += part[i] != 2.0f * whole[begin + i];
    EXPECT_EQ(wrong, 0u);
  });
  for (const std::string& problem : problems) EXPECT_EQ(problem, "");
}

TEST(GlooRanks, AbortWakesAllThatWait) {
  const auto problems = on_all(4, [&](Ranks& ranks) {
    ranks.barrier();
    if (ranks.rank() == 0) ranks.abort("rank 0: the disk is full");
    if (ranks.rank() == 1) ranks.receive(0, Channel::sampling);
    if (ranks.rank() == 2) ranks.receive(2, Channel::training);  // its own, which nobody sent
    ranks.barrier();
  });
  for (const std::string& problem : problems) EXPECT_EQ(problem, "rank 0: the disk is full");
}

// A rank that left has sent what it sent, and no more.
TEST(GlooRanks, ReceiveTheLastWordsOfOneThatLeft) {
  const auto problems = on_all(3, [](Ranks& ranks) {
    if (ranks.rank() == 2) {
      ranks.send(0, Channel::training, std::string(1000000, 'w'));
      return;
    }
    if (ranks.rank() == 1) return;
    EXPECT_EQ(ranks.receive(2, Channel::training), std::string(1000000, 'w'));
    ranks.receive(2, Channel::training);
  });
  EXPECT_EQ(problems[0].substr(0, 8), "rank 2 (");
  EXPECT_TRUE(problems[0].ends_with("): left the group")) << problems[0];
  EXPECT_EQ(problems[1], "");
  EXPECT_EQ(problems[2], "");
}

TEST(GlooRanks, DoNotWaitForMessagesThatNobodyReceives) {
  for (const std::string& problem : on_all(3, [](Ranks& ranks) {
         for (int to = 0; to < 3; ++to) ranks.send(to, Channel::sampling, "unread");
         ranks.barrier();
       })) {
    EXPECT_EQ(problem, "");
  }
}

#else

TEST(GlooRanks, AreRefusedWithoutGlooAndNameThePackage) {
  try {
    join_ranks({.size = 2});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("libgloo-dev"), std::string::npos);
  }
}

#endif

}  // namespace
}  // namespace leeway
