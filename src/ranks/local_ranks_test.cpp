// Ranks that are threads: every call against what follows from the numbers alone, and how a group
// ends.

#include "ranks/local_ranks.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <thread>

#include "ranks/ranks_test_support.h"

namespace leeway {
namespace {

// Runs `body` on all ranks, each a thread; returns what each threw.
std::vector<std::string> on_all(int size, const std::function<void(Ranks&)>& body) {
  auto ranks = make_local_ranks(size);
  std::vector<std::string> problems(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, own = std::move(ranks[static_cast<size_t>(r)]), r]() mutable {
      try {
        body(*own);
      } catch (const Lost& problem) {
        problems[static_cast<size_t>(r)] = problem.what();
      }
      own.reset();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return problems;
}

TEST(LocalRanks, GiveWhatFollowsFromTheNumbers) {
  for (int size = 1; size <= 5; ++size) {
    for (uint64_t seed = 0; seed < 16; ++seed) {
      const size_t length = std::vector<size_t>{1, 5, 1000, 10000}[seed % 4];
      const auto problems = on_all(size, [&](Ranks& ranks) {
        EXPECT_EQ(every_call(ranks, seed, length),
                  expected_of_every_call(ranks.rank(), size, seed, length))
            << "rank " << ranks.rank() << " of " << size;
      });
      for (const std::string& problem : problems) EXPECT_EQ(problem, "");
    }
  }
}

TEST(LocalRanks, SumInTheOrderOfATreeOverRanks) {
  const std::vector<float> terms = {1e8f, 1.0f, -1e8f, 1.0f};
  on_all(4, [&](Ranks& ranks) {
    const std::vector<float> whole(4, terms[static_cast<size_t>(ranks.rank())]);
    const std::vector<size_t> bounds = {0, 1, 2, 3, 4};
    std::vector<float> part(1);
    EXPECT_TRUE(ranks.reduce_scatter(whole, bounds, part));
    EXPECT_EQ(part[0], (terms[0] + terms[1]) + (terms[2] + terms[3]));
  });
}

TEST(LocalRanks, AllowThePartToLieInTheWhole) {
  on_all(3, [](Ranks& ranks) {
    std::vector<float> whole(300, static_cast<float>(ranks.rank() + 1));
    const std::vector<size_t> bounds = {0, 100, 200, 300};
    const auto part = std::span(whole).subspan(bounds[static_cast<size_t>(ranks.rank())], 100);
    EXPECT_TRUE(ranks.reduce_scatter(whole, bounds, part));
    ranks.all_gather(whole, bounds);
    EXPECT_EQ(whole, std::vector<float>(300, 6.0f));
  });
}

TEST(LocalRanks, AbortWakesAllThatWait) {
  std::atomic<int> waiting = 0;
  const auto problems = on_all(4, [&](Ranks& ranks) {
    if (ranks.rank() == 0) {
      while (waiting < 3) std::this_thread::yield();
      ranks.abort("rank 0: the disk is full");
      throw Lost("");
    }
    ++waiting;
    if (ranks.rank() == 1) ranks.receive(0, Channel::sampling);
    if (ranks.rank() > 1) ranks.barrier();
  });
  for (int r = 1; r < 4; ++r)
    EXPECT_EQ(problems[static_cast<size_t>(r)], "rank 0: the disk is full");
}

TEST(LocalRanks, FailAllLaterCallsAfterAnAbort) {
  const auto problems = on_all(1, [](Ranks& ranks) {
    ranks.abort("first");
    ranks.abort("second");
    EXPECT_THROW(ranks.send(0, Channel::training, "a"), Lost);
    EXPECT_THROW(ranks.receive(0, Channel::training), Lost);
    ranks.barrier();
  });
  EXPECT_EQ(problems[0], "first");
}

TEST(LocalRanks, DoNotWaitForOneThatLeft) {
  const auto problems = on_all(3, [](Ranks& ranks) {
    if (ranks.rank() == 2) {
      ranks.send(0, Channel::training, "the last word");
      return;
    }
    if (ranks.rank() == 0) {
      EXPECT_EQ(ranks.receive(2, Channel::training), "the last word");
      ranks.receive(2, Channel::training);
    } else {
      ranks.barrier();
    }
  });
  EXPECT_EQ(problems[0], "rank 2: left the group");
  EXPECT_EQ(problems[1], "rank 2: left the group");
  EXPECT_EQ(problems[2], "");
}

TEST(LocalRanks, MayLeaveWhileOthersAreStillInTheLastBarrier) {
  for (int round = 0; round < 200; ++round) {
    for (const std::string& problem : on_all(4, [](Ranks& ranks) { ranks.barrier(); })) {
      EXPECT_EQ(problem, "");
    }
  }
}

}  // namespace
}  // namespace leeway
