// Ranks that are processes: what they compute, and what the others do when one is killed, stands
// still, is cut off or was started wrongly.

#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <thread>

#include "base/rng.h"
#include "linked_namespaces.h"
#include "ranks/ranks_test_support.h"
#include "ranks/sockets.h"
#include "run_program.h"

namespace leeway {
namespace {

using Clock = std::chrono::steady_clock;
using Words = std::vector<std::string>;
using Variables = std::map<std::string, std::string>;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// One process of a group; it ends with this object.
class MemberProcess {
 public:
  MemberProcess(Words words, const Variables& variables, const std::string& output)
      : output_(output) {
    const pid_t parent = ::getpid();
    pid_ = ::fork();
    if (pid_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(1);
      for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
      const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
      run_detail::exec_child(words, {.stdout_file = output}, nothing, nothing, nothing);
    }
  }
  ~MemberProcess() {
    if (!ended()) {
      send(SIGKILL);
      ::waitpid(pid_, &status_, 0);
    }
  }
  MemberProcess(const MemberProcess&) = delete;
  MemberProcess& operator=(const MemberProcess&) = delete;

  pid_t pid() const { return pid_; }
  void send(int signal) const { ::kill(pid_, signal); }
  bool ended() {
    if (!ended_) ended_ = ::waitpid(pid_, &status_, WNOHANG) == pid_;
    return ended_;
  }
  int code() const { return WIFEXITED(status_) ? WEXITSTATUS(status_) : -WTERMSIG(status_); }
  std::string printed() const {
    std::error_code problem;
    return std::filesystem::exists(output_, problem) ? file_text(output_) : "";
  }

 private:
  const std::string output_;
  pid_t pid_ = -1;
  int status_ = 0;
  bool ended_ = false;
};

class RanksProcessTest : public ::testing::Test {
 protected:
  // Starts rank `rank` of `size`; `before` are words of a program that starts it.
  void start(int rank, int size, const Words& words, const Variables& more = {},
             const Words& before = {}) {
    Variables variables = {{"RANK", std::to_string(rank)},
                           {"WORLD_SIZE", std::to_string(size)},
                           {"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", std::to_string(port_)}};
    for (const auto& [name, value] : more) variables[name] = value;
    Words all = before;
    all.push_back(LEEWAY_RANKS_MEMBER);
    all.insert(all.end(), words.begin(), words.end());
    members_.push_back(std::make_unique<MemberProcess>(
        all, variables, folder_ / fmt::format("member_{}", started_++)));
  }
  void start_all(int size, const Words& words, const Variables& more = {}) {
    for (int rank = 0; rank < size; ++rank) start(rank, size, words, more);
  }

  bool wait_until(const std::function<bool()>& done, double limit = 120.0) {
    const auto begin = Clock::now();
    while (!done()) {
      if (seconds_since(begin) > limit) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
  }
  bool all_print(const std::string& text) {
    return wait_until([&] {
      return std::all_of(members_.begin(), members_.end(), [&](auto& member) {
        return contains(member->printed(), text) || member->ended();
      });
    });
  }
  bool all_end(int but = -1) {
    return wait_until([&] {
      bool all = true;
      for (size_t k = 0; k < members_.size(); ++k) {
        all &= static_cast<int>(k) == but || members_[k]->ended();
      }
      return all;
    });
  }
  MemberProcess& member(int k) { return *members_[static_cast<size_t>(k)]; }

  // A port that was free a moment ago.
  static int free_port() { return port_of(listen_at("127.0.0.1", 0)); }

  const TempFolder folder_;
  int port_ = free_port(), started_ = 0;
  std::vector<std::unique_ptr<MemberProcess>> members_;
};

TEST_F(RanksProcessTest, GiveWhatFollowsFromTheNumbers) {
  for (int size = 2; size <= 4; ++size) {
    members_.clear();
    port_ = free_port();
    start_all(size, {"calls", "16", "10000"});
    ASSERT_TRUE(all_end());
    for (int rank = 0; rank < size; ++rank) {
      std::string expected = "joined\n";
      for (uint64_t seed = 0; seed < 16; ++seed) {
        expected += expected_of_every_call(rank, size, seed, 10000) + "\n";
      }
      EXPECT_EQ(member(rank).code(), 0);
      EXPECT_EQ(member(rank).printed(), expected) << "rank " << rank << " of " << size;
    }
  }
}

TEST_F(RanksProcessTest, MoveWhatIsLargerThanAnyBuffer) {
  start_all(3, {"large", "20000001"});
  ASSERT_TRUE(all_end());
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(member(rank).code(), 0);
    EXPECT_EQ(member(rank).printed(), fmt::format("joined\nwrong sums: 0\n{}broadcast: true\n",
                                                  rank == 1 ? "the message is whole\n" : ""));
  }
}

// All others of a group end, with exit code 3 and the reason that begins with `lost`.
#define EXPECT_OTHERS_REPORT(victim, lost)                                         \
  for (int other = 0; other < static_cast<int>(members_.size()); ++other) {        \
    if (other == (victim)) continue;                                               \
    EXPECT_EQ(member(other).code(), 3) << "rank " << other;                        \
    EXPECT_TRUE(contains(member(other).printed(), std::string("lost: ") + (lost))) \
        << "rank " << other << ": " << member(other).printed();                    \
  }

std::string died(int rank, pid_t pid) {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  return fmt::format("rank {} (host {}, process {}): its process ended\n", rank, host, pid);
}

TEST_F(RanksProcessTest, EndWithinSecondsOfAKillAtAnyMomentAndNameTheRank) {
  double worst = 0.0;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Rng rng(seed);
    members_.clear();
    port_ = free_port();
    const int size = 2 + static_cast<int>(rng.below(3));
    const int victim = static_cast<int>(rng.below(static_cast<uint64_t>(size)));
    // With the largest, most kills meet a transfer that has begun.
    const Words lengths = {"1000", "100000", "3000000"};
    start_all(size, {"forever", lengths[seed % 3]});
    ASSERT_TRUE(all_print("running"));
    std::this_thread::sleep_for(std::chrono::microseconds(rng.below(200000)));
    const auto begin = Clock::now();
    member(victim).send(SIGKILL);
    ASSERT_TRUE(all_end());
    worst = std::max(worst, seconds_since(begin));
    EXPECT_OTHERS_REPORT(victim, died(victim, member(victim).pid()));
  }
  std::printf("all others had ended %.3f s after the kill, at worst\n", worst);
  EXPECT_LT(worst, 30.0);  // milliseconds where nothing else runs; five seconds are promised
}

// Before all have met, whoever came learns who did not, or who went.
TEST_F(RanksProcessTest, EndWhenOneIsKilledWhileTheyMeet) {
  for (uint64_t seed = 0; seed < 10; ++seed) {
    Rng rng(seed);
    members_.clear();
    port_ = free_port();
    const int victim = static_cast<int>(rng.below(3));
    start_all(3, {"forever", "1000"}, {{"START_TIMEOUT", "2"}});
    std::this_thread::sleep_for(std::chrono::microseconds(rng.below(60000)));
    member(victim).send(SIGKILL);
    ASSERT_TRUE(all_end());
    for (int other = 0; other < 3; ++other) {
      if (other == victim) continue;
      EXPECT_GT(member(other).code(), 1) << member(other).printed();
      // Rank 0 waits a little for those that come late, but not for ever.
      EXPECT_TRUE(contains(member(other).printed(), fmt::format("rank {}", victim)) ||
                  contains(member(other).printed(), "does not reach rank 0"))
          << "rank " << victim << " was killed: " << member(other).printed();
    }
  }
}

TEST_F(RanksProcessTest, NoticeOneThatStandsStill) {
  for (const int victim : {1, 0}) {
    members_.clear();
    port_ = free_port();
    start_all(3, {"forever", "1000"}, {{"LINK_TIMEOUT", "3"}});
    ASSERT_TRUE(all_print("running"));
    const auto begin = Clock::now();
    member(victim).send(SIGSTOP);
    ASSERT_TRUE(all_end(victim));
    std::printf("all others had ended %.3f s after the stop, with a limit of 3 s\n",
                seconds_since(begin));
    for (int other = 0; other < 3; ++other) {
      if (other == victim) continue;
      const std::string printed = member(other).printed();
      EXPECT_EQ(member(other).code(), 3);
      EXPECT_TRUE(contains(printed, fmt::format("lost: rank {} (", victim))) << printed;
      EXPECT_TRUE(contains(printed, "): no word for 3 s\n")) << printed;
    }
    member(victim).send(SIGCONT);
    ASSERT_TRUE(all_end());
    EXPECT_EQ(member(victim).code(), 3) << member(victim).printed();
  }
}

TEST_F(RanksProcessTest, DoNotTakeOneThatComputesForALostOne) {
  start_all(3, {"compute", "3"}, {{"LINK_TIMEOUT", "1"}});
  ASSERT_TRUE(all_end());
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(member(rank).code(), 0) << member(rank).printed();
}

TEST_F(RanksProcessTest, NoticeALinkThatIsCut) {
  const LinkedNamespaces network;
  if (!network.made()) GTEST_SKIP() << "needs the right to make network namespaces";
  const Variables variables = {{"MASTER_ADDR", LinkedNamespaces::kNear}, {"LINK_TIMEOUT", "4"}};
  start(0, 3, {"forever", "1000"}, variables, network.in_near());
  start(1, 3, {"forever", "1000"}, variables, network.in_near());
  start(2, 3, {"forever", "1000"}, variables, network.in_far());
  ASSERT_TRUE(all_print("running"));
  const auto begin = Clock::now();
  network.link(false);
  ASSERT_TRUE(all_end());
  const double took = seconds_since(begin);
  std::printf("all had ended %.3f s after the cut, with a limit of 4 s\n", took);
  EXPECT_GT(took, 2.0);
  EXPECT_LT(took, 60.0);
  for (const int near : {0, 1}) {
    EXPECT_TRUE(contains(member(near).printed(), "lost: rank 2 (")) << member(near).printed();
  }
  // It is alone, and whom it misses first is chance.
  EXPECT_TRUE(contains(member(2).printed(), "lost: rank 0 (") ||
              contains(member(2).printed(), "lost: rank 1 ("))
      << member(2).printed();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(member(rank).code(), 3);
    EXPECT_TRUE(contains(member(rank).printed(), "): no word for 4 s\n")) << member(rank).printed();
  }
}

// Rank 0 still hears all of them, but the data of two others has a network of its own.
TEST_F(RanksProcessTest, NoticeACutThatRankZeroDoesNotSee) {
  const LinkedNamespaces network;
  if (!network.made() || !network.add_second()) {
    GTEST_SKIP() << "needs the right to make network namespaces";
  }
  const auto with = [](const char* interface) {
    return Variables{{"MASTER_ADDR", LinkedNamespaces::kNear},
                     {"LINK_TIMEOUT", "4"},
                     {"LEEWAY_INTERFACE", interface}};
  };
  start(0, 3, {"forever", "1000"}, with("near2"), network.in_near());
  start(1, 3, {"forever", "1000"}, with("near2"), network.in_near());
  start(2, 3, {"forever", "1000"}, with("far2"), network.in_far());
  ASSERT_TRUE(all_print("running"));
  const auto begin = Clock::now();
  network.cut_second();
  ASSERT_TRUE(all_end());
  std::printf("all had ended %.3f s after the cut, with a limit of 4 s\n", seconds_since(begin));
  for (int rank = 0; rank < 3; ++rank) {
    const std::string printed = member(rank).printed();
    EXPECT_EQ(member(rank).code(), 3);
    EXPECT_TRUE(contains(printed, "lost: rank 1 (") || contains(printed, "lost: rank 2 ("))
        << printed;
    EXPECT_TRUE(contains(printed, "): no word for 4 s\n")) << printed;
  }
}

TEST_F(RanksProcessTest, ReportWhatARankAbortsWith) {
  start_all(3, {"abort"});
  ASSERT_TRUE(all_end());
  EXPECT_OTHERS_REPORT(-1, "rank 1: the disk is full\n");
}

TEST_F(RanksProcessTest, DoNotWaitForOneThatLeft) {
  start_all(3, {"leave"});
  ASSERT_TRUE(all_end());
  EXPECT_EQ(member(1).code(), 0) << member(1).printed();
  for (const int rank : {0, 2}) {
    EXPECT_EQ(member(rank).code(), 3);
    EXPECT_TRUE(contains(member(rank).printed(), "lost: rank 1 (")) << member(rank).printed();
    EXPECT_TRUE(contains(member(rank).printed(), "): left the group\n")) << member(rank).printed();
  }
}

TEST_F(RanksProcessTest, MayAllBeStartedByTheFirst) {
  members_.push_back(std::make_unique<MemberProcess>(
      Words{LEEWAY_RANKS_MEMBER, "local", "3", "calls", "2", "1000"},
      Variables{{"LOG_FOLDER", folder_.path().string()}}, folder_ / "rank_0.log"));
  ASSERT_TRUE(all_end());
  EXPECT_EQ(member(0).code(), 0) << member(0).printed();
  for (int rank = 0; rank < 3; ++rank) {
    const std::string printed = file_text(folder_ / fmt::format("rank_{}.log", rank));
    EXPECT_TRUE(contains(printed, expected_of_every_call(rank, 3, 1, 1000))) << printed;
  }
}

// ---------------------------------------------------------------------------------------------
// Groups that do not come about

TEST_F(RanksProcessTest, NameTheRanksThatDidNotCome) {
  for (const int rank : {0, 2}) start(rank, 4, {"forever", "1000"}, {{"START_TIMEOUT", "1"}});
  ASSERT_TRUE(all_end());
  for (const int k : {0, 1}) {
    EXPECT_EQ(member(k).code(), 2);
    EXPECT_EQ(member(k).printed(),
              fmt::format("error: 2 of 4 ranks came to 127.0.0.1, port {}, within 1 s; missing: "
                          "rank 1, 3\n",
                          port_));
  }
}

TEST_F(RanksProcessTest, SayThatNobodyAnswers) {
  start(1, 2, {"forever", "1000"}, {{"START_TIMEOUT", "-9"}});  // and the ten that rank 0 has more
  ASSERT_TRUE(all_end());
  EXPECT_EQ(member(0).code(), 2);
  EXPECT_TRUE(contains(member(0).printed(),
                       fmt::format("error: rank 1 of 2 does not reach rank 0 at 127.0.0.1, port "
                                   "{}, within 1 s: Connection refused; ",
                                   port_)))
      << member(0).printed();
}

TEST_F(RanksProcessTest, SayWhatDiffersBetweenThem) {
  start(0, 2, {"forever", "1000"});
  start(1, 3, {"forever", "1000"});
  ASSERT_TRUE(all_end());
  for (const int k : {0, 1}) {
    EXPECT_EQ(member(k).code(), 2);
    EXPECT_TRUE(contains(member(k).printed(), "error: rank 1 (")) << member(k).printed();
    EXPECT_TRUE(contains(member(k).printed(), "was started as one of 3 ranks, and rank 0 ("))
        << member(k).printed();
  }
  members_.clear();
  port_ = free_port();
  start(0, 2, {"forever", "1000"}, {{"VERSION", "1.0"}});
  start(1, 2, {"forever", "1000"}, {{"VERSION", "1.1"}});
  ASSERT_TRUE(all_end());
  for (const int k : {0, 1}) {
    EXPECT_EQ(member(k).code(), 2);
    EXPECT_TRUE(contains(member(k).printed(), "is leeway 1.1, and rank 0 ("))
        << member(k).printed();
    EXPECT_TRUE(contains(member(k).printed(), "all ranks need the same program\n"));
  }
  members_.clear();
  port_ = free_port();
  for (const int rank : {0, 1, 1}) start(rank, 3, {"forever", "1000"});
  ASSERT_TRUE(all_end());
  for (const int k : {0, 1, 2}) {
    EXPECT_EQ(member(k).code(), 2);
    EXPECT_TRUE(contains(member(k).printed(), "have the same rank\n")) << member(k).printed();
  }
}

TEST_F(RanksProcessTest, KeepTwoJobsApart) {
  start(0, 2, {"calls", "1", "10"}, {{"LEEWAY_JOB", "a"}});
  ASSERT_TRUE(wait_until([&] {
    std::string ignored;
    return connect_to("127.0.0.1", port_, 1.0, ignored).open();
  }));
  start(1, 2, {"calls", "1", "10"}, {{"LEEWAY_JOB", "b"}});
  ASSERT_TRUE(wait_until([&] { return member(1).ended(); }));
  EXPECT_EQ(member(1).code(), 2);
  EXPECT_TRUE(contains(member(1).printed(), "belongs to another job")) << member(1).printed();
  start(0, 2, {"calls", "1", "10"}, {{"LEEWAY_JOB", "b"}});
  ASSERT_TRUE(wait_until([&] { return member(2).ended(); }));
  EXPECT_EQ(member(2).printed(),
            fmt::format("error: cannot listen at 127.0.0.1, port {}: Address already in "
                        "use; another port for all ranks: LEEWAY_PORT=NUMBER\n",
                        port_));
  start(1, 2, {"calls", "1", "10"}, {{"LEEWAY_JOB", "a"}});
  ASSERT_TRUE(all_end());
  EXPECT_EQ(member(0).code(), 0) << member(0).printed();
  EXPECT_EQ(member(3).code(), 0) << member(3).printed();
}

// Bytes that are almost a greeting: the right beginning, lengths and fields of all kinds.
std::string nonsense(Rng& rng) {
  std::string bytes;
  const uint64_t kind = rng.below(5);
  if (kind > 0) bytes = "LWRh";
  if (kind > 1) {
    const uint32_t length = static_cast<uint32_t>(rng.below(3) == 0 ? rng.next() : rng.below(200));
    bytes.append(reinterpret_cast<const char*>(&length), sizeof length);
  }
  if (kind == 3) {
    FrameWriter writer;
    writer.number(1).text("test").text("torchrun").number(rng.below(4)).number(rng.below(4));
    bytes += writer.take().substr(0, rng.below(60));
  }
  for (uint64_t k = rng.below(300); k > 0; --k) bytes += static_cast<char>(rng.below(256));
  return kind == 4 ? "GET / HTTP/1.1\r\n\r\n" : bytes;
}

TEST_F(RanksProcessTest, AreNotDisturbedByStrangers) {
  start(0, 2, {"calls", "2", "1000"});
  std::vector<Descriptor> silent;  // they stay and say nothing, or not enough
  Rng rng(11);
  int heard = 0;
  for (int k = 0; k < 400; ++k) {
    Descriptor socket;
    ASSERT_TRUE(wait_until([&] {
      std::string ignored;
      socket = connect_to("127.0.0.1", port_, 1.0, ignored);
      return socket.open();
    }));
    const std::string bytes = nonsense(rng);
    heard += ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) > 0;
    if (silent.size() < 20 && rng.below(4) == 0) silent.push_back(std::move(socket));
  }
  EXPECT_GT(heard, 300);
  ASSERT_FALSE(member(0).ended()) << member(0).printed();
  start(1, 2, {"calls", "2", "1000"});
  ASSERT_TRUE(all_end());
  for (const int rank : {0, 1}) {
    EXPECT_EQ(member(rank).code(), 0) << member(rank).printed();
    EXPECT_TRUE(contains(member(rank).printed(), expected_of_every_call(rank, 2, 1, 1000)));
  }
}

}  // namespace
}  // namespace leeway
