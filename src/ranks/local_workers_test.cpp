// Workers that are shells: what they are told, what they leave behind.

#include "ranks/local_workers.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <thread>

#include "base/test_folder.h"
#include "leeway/error.h"
#include "ranks/gloo_ranks.h"
#include "ranks/rendezvous.h"

namespace leeway {
namespace {

LocalWorkersOptions shell(int size, const std::string& script, const std::string& folder) {
  return {.size = size, .program = "/bin/sh", .arguments = {"-c", script}, .log_folder = folder};
}

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(LocalWorkers, AreToldWhoTheyAreAndWriteToAFileEach) {
  const testing::TestFolder folder;
  ::setenv("TORCHELASTIC_RUN_ID", "outer", 1);
  ::setenv("SLURM_STEP_ID", "7", 1);
  LocalWorkers workers(shell(3,
                             "echo $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR "
                             "$MASTER_PORT $LEEWAY_WORKER x$TORCHELASTIC_RUN_ID x$SLURM_STEP_ID "
                             ">&2; cat; echo $LEEWAY_JOB",
                             folder.at("logs/deep")));
  ::unsetenv("TORCHELASTIC_RUN_ID");
  ::unsetenv("SLURM_STEP_ID");
  EXPECT_EQ(workers.wait(60), "");
  const RanksOptions leader = workers.leader();
  EXPECT_EQ(leader.rank, 0);
  EXPECT_EQ(leader.size, 3);
  for (const int rank : {1, 2}) {
    const std::string r = std::to_string(rank);
    EXPECT_EQ(text_of(folder.at("logs/deep/rank_" + r + ".log")),
              r + " 3 " + r + " 3 127.0.0.1 " + std::to_string(leader.leader_port) + " 1 x x\n" +
                  leader.job + "\n");
  }
  ::close(leader.listener);
}

TEST(LocalWorkers, HaveOneLinePerFailure) {
  const testing::TestFolder folder;
  LocalWorkers workers(
      shell(3, "echo some; echo problem $RANK; test $RANK = 1 || exit 7", folder.path()));
  EXPECT_EQ(workers.wait(60),
            "rank 2 ended with exit code 7: " + folder.at("rank_2.log") + " ends with: problem 2");
}

TEST(LocalWorkers, AreNotWaitedForWhenOneFailsBeforeItCame) {
  const testing::TestFolder folder;
  LocalWorkers workers(shell(2, "echo no such file; exit 2", folder.path()));
  try {
    meet(workers.leader());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.what(), "rank 1 ended with exit code 2: " + folder.at("rank_1.log") +
                                " ends with: no such file");
  }
}

TEST(LocalWorkers, AreEndedAfterTheLimitAndLeaveNobodyBehind) {
  const testing::TestFolder folder;
  // It does not end by SIGTERM.
  LocalWorkers workers(
      shell(2, "trap '' TERM; echo up; while :; do sleep 0.1; done", folder.path()));
  while (text_of(folder.at("rank_1.log")).empty()) std::this_thread::yield();
  EXPECT_EQ(workers.wait(0.01).substr(0, 31), "rank 1 was killed by signal 9: ");
  EXPECT_EQ(::kill(workers.process(1), 0), -1);
}

TEST(LocalWorkers, DoNotGetTheTerminalsSignals) {
  const testing::TestFolder folder;
  LocalWorkers workers(shell(2, "sleep 1000", folder.path()));
  // The group is the worker's own as soon as it runs.
  while (::getpgid(workers.process(1)) != workers.process(1)) std::this_thread::yield();
}

TEST(LocalWorkers, EndWithRankZero) {
  const testing::TestFolder folder;
  const pid_t leader = ::fork();
  if (leader == 0) {
    const LocalWorkers workers(shell(2, "echo $$; sleep 1000", folder.path()));
    ::pause();
    ::_exit(0);
  }
  std::string line;
  while (!line.ends_with('\n')) line = text_of(folder.at("rank_1.log"));
  ::kill(leader, SIGKILL);
  ::waitpid(leader, nullptr, 0);
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  const auto gone = [&] {
    const std::string state = text_of("/proc/" + line.substr(0, line.size() - 1) + "/stat");
    return state.empty() || state.find(") Z ") != std::string::npos;
  };
  while (!gone() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  EXPECT_TRUE(gone());
}

TEST(LocalWorkers, KeepATemporaryFolderOnlyIfSomethingWentWrong) {
  std::string kept, removed;
  {
    LocalWorkers good(shell(2, "true", "")), bad(shell(2, "exit 1", ""));
    removed = good.log_folder();
    kept = bad.log_folder();
    EXPECT_EQ(good.wait(60), "");
    EXPECT_NE(bad.wait(60), "");
  }
  EXPECT_FALSE(path_exists(removed));
  EXPECT_TRUE(path_exists(kept + "/rank_1.log"));
  remove_tree(kept);
}

TEST(LocalWorkers, SayWhatCannotBeStarted) {
  const testing::TestFolder folder;
  LocalWorkers workers({.size = 2, .program = "/no/such/program", .log_folder = folder.path()});
  EXPECT_EQ(workers.wait(60),
            "rank 1 ended with exit code 127: " + folder.at("rank_1.log") + " is empty");
  EXPECT_THROW(LocalWorkers(shell(2, "true", folder.write("file", "") + "/logs")), Error);
}

}  // namespace
}  // namespace leeway
