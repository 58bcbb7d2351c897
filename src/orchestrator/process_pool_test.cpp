#include "orchestrator/process_pool.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <set>
#include <sstream>

#include "leeway/error.h"
#include "orchestrator/environment_test_support.h"
#include "orchestrator/process_test_support.h"

namespace leeway {
namespace {

using ::leeway::testing::answer;
using ::leeway::testing::answering;
using ::leeway::testing::count_children;
using ::leeway::testing::count_open_files;
using ::leeway::testing::count_running;
using ::leeway::testing::TestFolder;
using ::leeway::testing::text_of_file;
using ::leeway::testing::wait_for;
using SteadyClock = std::chrono::steady_clock;

// Seconds, and a mark by which this test's own are found.
const std::string kForever = fmt::format("98{}", ::getpid());
// The reward is what the request has as "n".
const std::string kReward =
    R"(n=${line#*'"n": '}; n=${n%%[,\}]*}; )" + answer(R"("reward": $n, "pid": $$)");

// "reward" is the reward; "pid" goes where the failure's text would.
Turn read_reward(const JsonValue& answer) {
  const JsonValue* reward = answer.find("reward");
  if (reward == nullptr) throw Error("there is no reward in it");
  Turn turn;
  turn.rewards = {{.name = "reward", .value = std::atof(reward->text.c_str())}};
  if (const JsonValue* pid = answer.find("pid")) turn.failure = pid->text;
  return turn;
}

ProcessPoolSettings settings(const std::string& command, int64_t processes = 1,
                             double turn_timeout = 10.0) {
  return {.command = command, .processes = processes, .turn_timeout = turn_timeout};
}

// Nothing is left behind by any test: no process, no zombie, no open file.
class ProcessPoolTest : public ::testing::Test {
 protected:
  void SetUp() override {
    children_ = count_children();
    files_ = count_open_files();
  }
  void TearDown() override {
    EXPECT_EQ(count_children(), children_);
    EXPECT_EQ(count_open_files(), files_);
  }

  static Turn ask(ProcessPool& pool, const std::string& members = "\"n\": 1") {
    const uint64_t request = pool.submit(members);
    return wait_for([&] { return pool.poll(request); });
  }
  static void expect_failure(const Turn& turn, FailureKind kind,
                             const std::vector<std::string>& words) {
    ASSERT_EQ(turn.kind, Turn::Kind::failed);
    EXPECT_STREQ(name_of(turn.failure_kind), name_of(kind)) << turn.failure;
    for (const std::string& word : words) {
      EXPECT_NE(turn.failure.find(word), std::string::npos)
          << "no \"" << word << "\" in: " << turn.failure;
    }
  }
  // A program that does `what` for requests with "bad" in them: these fail, and the next request is
  // answered by another process.
  static void expect_replaced(const std::string& what, FailureKind kind,
                              const std::vector<std::string>& words, double turn_timeout = 10.0) {
    ProcessPool pool(
        settings(answering("case $line in *bad*) " + what + ";; *) " + kReward + ";; esac"), 1,
                 turn_timeout),
        read_reward);
    const Turn before = ask(pool);
    ASSERT_EQ(before.kind, Turn::Kind::reward) << before.failure;
    expect_failure(ask(pool, "\"n\": \"bad\""), kind, words);
    const Turn after = ask(pool);
    ASSERT_EQ(after.kind, Turn::Kind::reward) << after.failure;
    EXPECT_NE(before.failure, after.failure) << "the same process";
    // Nor is anything left that it started. Killed processes take a moment to disappear.
    const std::string started = std::string("sleep") + '\0' + kForever;
    for (int i = 0; i < 100000 && count_running(started) > 0; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    EXPECT_EQ(count_running(started), 0);
  }

 private:
  int children_ = 0, files_ = 0;
};

TEST_F(ProcessPoolTest, ThreeProcessesAnswerThreeHundredRequestsAtOnce) {
  ProcessPool pool(settings(answering(kReward), 3), read_reward);
  std::vector<uint64_t> open;
  for (int i = 0; i < 300; ++i) open.push_back(pool.submit(fmt::format("\"n\": {}", i)));
  std::set<std::string> pids;
  for (size_t i = 0; i < open.size(); ++i) {
    const Turn turn = wait_for([&] { return pool.poll(open[i]); });
    ASSERT_EQ(turn.kind, Turn::Kind::reward) << turn.failure;
    EXPECT_EQ(turn.rewards[0].value, static_cast<double>(i));
    pids.insert(turn.failure);
  }
  EXPECT_EQ(pids.size(), 3u);
}

TEST_F(ProcessPoolTest, RequestsAreTakenInOrderAndProcessesStartedWhenNeeded) {
  ProcessPool pool(settings(answering("n=$((n + 1)); " + answer(R"("reward": $n)")), 4),
                   read_reward);
  EXPECT_EQ(count_children(), 0);
  // One after the other: one process is enough, and counts them.
  for (int i = 1; i <= 5; ++i) EXPECT_EQ(ask(pool).rewards.at(0).value, i);
  EXPECT_EQ(count_children(), 1);

  ProcessPool single(settings(answering("n=$((n + 1)); " + answer(R"("reward": $n)"))),
                     read_reward);
  std::vector<uint64_t> open;
  for (int i = 0; i < 20; ++i) open.push_back(single.submit("\"n\": 1"));
  for (size_t i = 0; i < open.size(); ++i) {
    const Turn turn = wait_for([&] { return single.poll(open[i]); });
    EXPECT_EQ(turn.rewards.at(0).value, static_cast<double>(i + 1));
  }
}

TEST_F(ProcessPoolTest, AProcessThatHangsIsKilledWithAllItsOwn) {
  expect_replaced("echo thinking >&2; sleep " + kForever, FailureKind::timeout,
                  {"environment.turn_timeout", "0.2 s", "thinking"}, 0.2);
}

TEST_F(ProcessPoolTest, AProcessThatEndsCostsOneRequest) {
  expect_replaced("echo oh no >&2; exit 3", FailureKind::environment_error,
                  {"exit status 3", "before it answered", "oh no"});
  expect_replaced("kill -9 $$", FailureKind::environment_error, {"signal 9"});
  // Another process still has its output open.
  expect_replaced("sleep " + kForever + " & exit 4", FailureKind::environment_error,
                  {"exit status 4"});
  expect_replaced("exec >&-; sleep " + kForever, FailureKind::environment_error,
                  {"closed its output"});
}

TEST_F(ProcessPoolTest, OfStderrTheLastTwentyLinesAreKept) {
  ProcessPool pool(settings(answering("for i in 1 2 3 4 5 6; do for j in 1 2 3 4 5; do "
                                      "echo line-$i$j- >&2; done; done; "
                                      "head -c 3000 /dev/zero | tr '\\0' x >&2; exit 1")),
                   read_reward);
  const Turn turn = ask(pool);
  expect_failure(turn, FailureKind::environment_error, {"line-65-", "line-33-", "xxxx"});
  EXPECT_EQ(turn.failure.find("line-31-"), std::string::npos);
  EXPECT_LT(turn.failure.size(), 1000u);
}

TEST_F(ProcessPoolTest, ALineThatIsNoAnswerIsQuoted) {
  expect_replaced("printf 'gar\\001bage\\n'", FailureKind::bad_answer,
                  {"\"gar\\x01bage\"", "JSON"});
  expect_replaced("echo '[1]'", FailureKind::bad_answer, {"\"[1]\"", "an object"});
  expect_replaced(R"(echo '{"id": 7, "reward": 1}')", FailureKind::bad_answer,
                  {R"({\"id\": 7, \"reward\": 1})", "id must be the turn's"});
  expect_replaced(R"(echo '{"reward": 1}')", FailureKind::bad_answer, {"id"});
  expect_replaced(answer("\"x\": 1"), FailureKind::bad_answer, {"there is no reward in it"});
  const std::string many = "head -c 10000000 /dev/zero | tr '\\0' x";
  expect_replaced(many, FailureKind::bad_answer,
                  {"environment.max_output_bytes", "1048576", "xxx"});
}

TEST_F(ProcessPoolTest, ALineMayBeAsLongAsAllowed) {
  for (const bool allowed : {true, false}) {
    ProcessPoolSettings small = settings(answering(answer(R"("reward": 1, "pad": "1234567890")")));
    small.max_output_bytes = allowed ? 100 : 20;
    ProcessPool pool(small, read_reward);
    EXPECT_EQ(ask(pool).kind, allowed ? Turn::Kind::reward : Turn::Kind::failed);
  }
}

TEST_F(ProcessPoolTest, AnAnswerThatNobodyAskedForIsCountedNamedAndReplacesTheProcess) {
  struct Case {
    std::string more, words;
  };
  // After its answer a program writes more: anything, the same again, or a guess at the next turn.
  for (const Case& c : std::vector<Case>{
           {"echo more", "more"},
           {kReward, "a second answer to a turn"},
           {R"(echo "{\"id\": $((id + 1)), \"reward\": 9}")", "an answer before its turn"}}) {
    ProcessPool pool(settings(answering(kReward + "; " + c.more)), read_reward);
    std::set<std::string> pids;
    int64_t unasked = 0;
    std::string log;
    int answered = 0, failed = 0;
    for (int i = 0; i < 4; ++i) {
      const Turn turn = ask(pool);
      // A late line is taken as an answer to the next turn, which fails: a guess does not count.
      if (turn.kind == Turn::Kind::reward) {
        EXPECT_EQ(turn.rewards.at(0).value, 1.0);
        EXPECT_TRUE(pids.insert(turn.failure).second) << "the same process";
        ++answered;
      } else {
        expect_failure(turn, FailureKind::bad_answer, {});
        ++failed;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    ask(pool);  // looks at the last one's
    unasked += pool.take_unasked_answers();
    for (const std::string& line : pool.take_log()) log += line + "\n";
    EXPECT_GE(unasked, c.words == "more" ? 1 : 4) << answered << " answered, " << failed;
    EXPECT_NE(log.find("unasked answer: "), std::string::npos) << log;
    EXPECT_NE(log.find(c.words), std::string::npos) << log;
    EXPECT_EQ(pool.take_unasked_answers(), 0);
  }
}

TEST_F(ProcessPoolTest, IdsCannotBeGuessed) {
  const TestFolder folder;
  ProcessPool pool(settings(answering("echo $id >> " + folder.at("ids") + "; " + kReward)),
                   read_reward);
  for (int i = 0; i < 20; ++i) ASSERT_EQ(ask(pool).kind, Turn::Kind::reward);
  std::istringstream ids(text_of_file(folder.at("ids")));
  std::set<uint64_t> seen;
  uint64_t last = 0, rising = 0;
  for (uint64_t id; ids >> id;) {
    EXPECT_LT(id, uint64_t{1} << 53) << "no double holds it";
    rising += id > last ? 1 : 0;
    last = id;
    seen.insert(id);
  }
  EXPECT_EQ(seen.size(), 20u);
  EXPECT_LT(rising, 19u);
  EXPECT_GT(*seen.rbegin(), uint64_t{1} << 45);
}

TEST_F(ProcessPoolTest, NoDescendantGetsAway) {
  // In its own session, with its parent gone, ignoring every signal that can be ignored.
  const std::string daemon = "setsid sh -c 'trap \"\" TERM HUP INT; setsid sleep " + kForever +
                             " & sleep " + kForever + "' </dev/null >/dev/null 2>&1 & ";
  const std::string started = std::string("sleep") + '\0' + kForever;
  // For a program that ends, one that hangs, and one that is still running at the end.
  expect_replaced(daemon + "sleep 0.1; exit 3", FailureKind::environment_error, {"exit status 3"});
  expect_replaced(daemon + "sleep " + kForever, FailureKind::timeout, {"environment.turn_timeout"},
                  0.3);
  {
    ProcessPool pool(settings(answering(daemon + kReward)), read_reward);
    ASSERT_EQ(ask(pool).kind, Turn::Kind::reward);
    // `setsid sleep` looks like a running sleep until it has become one: the count has to last.
    int lasted = 0;
    for (int i = 0; i < 10000 && lasted < 10; ++i) {
      lasted = count_running(started) == 2 ? lasted + 1 : 0;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    EXPECT_EQ(lasted, 10);
  }
  EXPECT_EQ(count_running(started), 0);
}

TEST_F(ProcessPoolTest, LimitsEndAProgramAndAreNamed) {
  const auto fail_with = [&](const std::string& body, const ProcessLimits& limits,
                             const std::vector<std::string>& words) {
    ProcessPoolSettings limited = settings(answering(body));
    limited.limits = limits;
    ProcessPool pool(limited, read_reward);
    expect_failure(ask(pool), FailureKind::environment_error, words);
  };
  // Twelve children at most, whatever happens.
  fail_with("for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep " + kForever + " & done; wait",
            {.max_processes = 5}, {"environment.max_processes = 5", "there were 13"});
  fail_with("while :; do :; done", {.max_cpu_seconds = 1}, {"environment.max_cpu_seconds = 1"});
  // A line of 200 MB does not fit.
  fail_with("x=$(head -c 200000000 /dev/zero | tr '\\0' x); " + kReward,
            {.max_memory_bytes = 100'000'000}, {"environment.max_memory_bytes = 100000000"});
  // Within its limits a program works.
  ProcessPoolSettings limited = settings(answering(kReward));
  limited.limits = {.max_memory_bytes = 1'000'000'000, .max_cpu_seconds = 100, .max_processes = 10};
  ProcessPool pool(limited, read_reward);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(ask(pool).kind, Turn::Kind::reward);
}

TEST_F(ProcessPoolTest, GreetSaysWhetherAProgramStarts) {
  const auto greeting = [](const std::string& command, double turn_timeout = 10.0) {
    return ProcessPool(settings(command, 2, turn_timeout), read_reward).greet();
  };
  const auto expect_words = [](const std::string& text, const std::string& words) {
    EXPECT_NE(text.find(words), std::string::npos) << text;
  };
  EXPECT_EQ(greeting(answering(kReward)), "");
  expect_words(greeting("no-such-program-anywhere"), "exit status 127");
  expect_words(greeting("sleep " + kForever, 0.2), "no hello within 0.2 s");
  expect_words(greeting("echo '{\"type\": \"hello\", \"protocol\": 2}'; sleep " + kForever),
               "protocol \"2\"");
  // A program that starts at the second attempt is accepted.
  const TestFolder folder;
  EXPECT_EQ(greeting("[ -e " + folder.at("there") + " ] || { touch " + folder.at("there") +
                     "; exit 1; }; " + answering(kReward)),
            "");
  // The process that was greeted is the one that answers.
  ProcessPool pool(settings(answering(kReward)), read_reward);
  EXPECT_EQ(pool.greet(), "");
  EXPECT_EQ(count_children(), 1);
  EXPECT_EQ(ask(pool).kind, Turn::Kind::reward);
  EXPECT_EQ(count_children(), 1);
}

TEST_F(ProcessPoolTest, AProgramThatRepeatsWhatItIsSentIsSaidToDoSo) {
  ProcessPool pool(settings("cat"), read_reward);
  EXPECT_EQ(pool.greet(), "") << "the greeting may be repeated";
  expect_failure(ask(pool), FailureKind::bad_answer,
                 {"it repeats what it is sent instead of answering", "no reward"});
}

// The queue is given up for the reason that its processes were.
TEST_F(ProcessPoolTest, RequestsThatNoProcessTakesFailForTheReasonOfTheProcesses) {
  ProcessPool pool(settings("cat", 1, 0.3), read_reward);
  std::vector<uint64_t> open;
  for (int i = 0; i < 30; ++i) open.push_back(pool.submit("\"n\": 1"));
  for (const uint64_t request : open) {
    expect_failure(wait_for([&] { return pool.poll(request); }), FailureKind::bad_answer,
                   {"it repeats what it is sent"});
  }
}

TEST_F(ProcessPoolTest, BlankLinesAreNothing) {
  ProcessPool pool(settings("echo; " + answering("echo; " + kReward + "; echo")), read_reward);
  const Turn first = ask(pool), second = ask(pool);
  EXPECT_EQ(first.kind, Turn::Kind::reward) << first.failure;
  EXPECT_EQ(first.failure, second.failure);
}

TEST_F(ProcessPoolTest, AProgramThatCannotStartIsAnError) {
  ProcessPool pool(settings("no-such-program-anywhere --fast"), read_reward);
  expect_failure(
      ask(pool), FailureKind::environment_error,
      {"exit status 127", "environment.command", "no-such-program-anywhere --fast", "not found"});
}

TEST_F(ProcessPoolTest, HelloIsNeeded) {
  const auto first = [](const std::string& command, double turn_timeout = 10.0) {
    ProcessPool pool(settings(command, 1, turn_timeout), read_reward);
    return ask(pool);
  };
  expect_failure(first("sleep " + kForever, 0.2), FailureKind::timeout,
                 {"environment.turn_timeout", "no hello within 0.2 s"});
  expect_failure(first("echo no licence >&2; exit 5"), FailureKind::environment_error,
                 {"exit status 5", "before it said hello", "no licence"});
  expect_failure(first("echo Loading; sleep " + kForever), FailureKind::bad_answer,
                 {"\"Loading\""});
  expect_failure(first("echo '{\"type\": \"hello\"}'; sleep " + kForever), FailureKind::bad_answer,
                 {"first line must be", "protocol"});
}

TEST_F(ProcessPoolTest, AProgramOfAnotherVersionFailsEveryTurn) {
  const TestFolder folder;
  ProcessPool pool(settings("echo x >> " + folder.at("starts") +
                            "; echo '{\"type\": \"hello\", \"protocol\": 2}'; sleep " + kForever),
                   read_reward);
  std::vector<uint64_t> open;
  for (int i = 0; i < 5; ++i) open.push_back(pool.submit("\"n\": 1"));
  for (const uint64_t request : open) {
    expect_failure(wait_for([&] { return pool.poll(request); }), FailureKind::bad_answer,
                   {"protocol \"2\"", "protocol 1"});
  }
  expect_failure(ask(pool), FailureKind::bad_answer, {"protocol \"2\"", "protocol 1"});
  EXPECT_EQ(text_of_file(folder.at("starts")), "x\n");
}

TEST_F(ProcessPoolTest, AProgramThatDiesAtOnceIsStartedLessAndLessOften) {
  const TestFolder folder;
  ProcessPool pool(settings("echo x >> " + folder.at("starts") + "; exit 9", 1, 0.6), read_reward);
  std::vector<uint64_t> open;
  for (int i = 0; i < 20; ++i) open.push_back(pool.submit("\"n\": 1"));
  int ended = 0, late = 0;
  for (const uint64_t request : open) {
    const Turn turn = wait_for([&] { return pool.poll(request); });
    ASSERT_EQ(turn.kind, Turn::Kind::failed);
    EXPECT_NE(turn.failure.find("exit status 9"), std::string::npos) << turn.failure;
    EXPECT_EQ(turn.failure_kind, FailureKind::environment_error);
    ++(turn.failure.find("no process took") != std::string::npos ? late : ended);
  }
  // At 0, 0.1, 0.3 and 0.7 s or later; the rest wait in vain.
  EXPECT_LE(text_of_file(folder.at("starts")).size(), 2u * 4);
  EXPECT_GE(ended, 1);
  EXPECT_GE(late, 16);
}

TEST_F(ProcessPoolTest, WaitingBehindOthersIsNotLate) {
  ProcessPool pool(settings(answering("sleep 0.3; " + kReward), 1, 2.0), read_reward);
  std::vector<uint64_t> open;
  for (int i = 0; i < 10; ++i) open.push_back(pool.submit("\"n\": 1"));
  for (const uint64_t request : open) {
    const Turn turn = wait_for([&] { return pool.poll(request); });
    EXPECT_EQ(turn.kind, Turn::Kind::reward) << turn.failure;
  }
}

TEST_F(ProcessPoolTest, RequestsDoNotTimeOutWhileNobodyPolls) {
  ProcessPool pool(settings(answering(kReward), 1, 1.5), read_reward);
  std::vector<uint64_t> open;
  for (int i = 0; i < 5; ++i) open.push_back(pool.submit("\"n\": 1"));
  std::this_thread::sleep_for(std::chrono::milliseconds(1700));
  for (const uint64_t request : open) {
    const Turn turn = wait_for([&] { return pool.poll(request); });
    EXPECT_EQ(turn.kind, Turn::Kind::reward) << turn.failure;
  }
}

TEST_F(ProcessPoolTest, AProcessMayEndAfterAnyAnswer) {
  ProcessPool pool(settings(answering("n=$((n + 1)); " + kReward + "; [ $n = 3 ] && exit 0")),
                   read_reward);
  int answered = 0;
  for (int i = 0; i < 20; ++i) {
    const Turn turn = ask(pool);
    // A request may be on its way to a process that has just ended.
    if (turn.kind == Turn::Kind::reward) {
      ++answered;
    } else {
      expect_failure(turn, FailureKind::environment_error, {"exit status 0"});
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_GE(answered, 14);
}

TEST_F(ProcessPoolTest, AWithdrawnRequestCostsNoProcess) {
  ProcessPool pool(settings(answering("sleep 0.1; " + kReward)), read_reward);
  const Turn first = ask(pool);
  const uint64_t at_work = pool.submit("\"n\": 1"), waiting = pool.submit("\"n\": 1"),
                 wanted = pool.submit("\"n\": 5");
  pool.withdraw(at_work);
  pool.withdraw(waiting);
  const Turn turn = wait_for([&] { return pool.poll(wanted); });
  ASSERT_EQ(turn.kind, Turn::Kind::reward) << turn.failure;
  EXPECT_EQ(turn.rewards[0].value, 5.0);
  EXPECT_EQ(turn.failure, first.failure) << "another process";
}

TEST_F(ProcessPoolTest, AWithdrawnRequestThatHangsDoesNotHoldUpTheNext) {
  ProcessPool pool(
      settings(answering("case $line in *bad*) sleep " + kForever + ";; *) " + kReward + ";; esac"),
               1, 0.2),
      read_reward);
  const uint64_t hanging = pool.submit("\"n\": \"bad\"");
  wait_for([&] { return pool.poll(hanging); }, 0.05);
  pool.withdraw(hanging);
  // The one behind it may be late itself; those after it are not.
  ask(pool);
  EXPECT_EQ(ask(pool).kind, Turn::Kind::reward);
}

TEST_F(ProcessPoolTest, RequestsLargerThanAPipeArrive) {
  ProcessPool pool(settings(answering(answer(R"("reward": ${#line})"))), read_reward);
  const std::string members = "\"n\": \"" + std::string(200000, 'x') + "\"";
  // And the id, of 16 digits mostly.
  EXPECT_NEAR(ask(pool, members).rewards.at(0).value, static_cast<double>(members.size() + 40), 14);
}

TEST_F(ProcessPoolTest, WritingToAProcessThatDoesNotReadRaisesNoSignal) {
  struct sigaction action = {}, before = {};
  action.sa_handler = SIG_DFL;
  sigaction(SIGPIPE, &action, &before);
  const std::string large = "\"n\": \"" + std::string(200000, 'x') + "\"";
  {
    ProcessPool pool(
        settings("echo '{\"type\": \"hello\", \"protocol\": 1}'; exec <&-; sleep " + kForever, 1,
                 0.2),
        read_reward);
    expect_failure(ask(pool, large), FailureKind::timeout, {"environment.turn_timeout"});
  }
  {
    ProcessPool pool(
        settings("echo '{\"type\": \"hello\", \"protocol\": 1}'; sleep " + kForever, 1, 0.2),
        read_reward);
    expect_failure(ask(pool, large), FailureKind::timeout, {"environment.turn_timeout"});
  }
  sigaction(SIGPIPE, &before, nullptr);
}

TEST_F(ProcessPoolTest, NothingWaitsForAProcessButTheEnd) {
  double longest = 0.0;
  const auto begin = SteadyClock::now();
  {
    // Stubborn: ignores SIGTERM and the end of its input.
    ProcessPool pool(
        settings("trap '' TERM; " + answering(kReward + "; while :; do sleep 0.02; done")),
        read_reward);
    ASSERT_EQ(ask(pool).kind, Turn::Kind::reward);
    const uint64_t request = pool.submit("\"n\": 1");
    for (int i = 0; i < 50; ++i) {
      const auto before = SteadyClock::now();
      EXPECT_EQ(pool.poll(request).kind, Turn::Kind::pending);
      const std::chrono::duration<double> took = SteadyClock::now() - before;
      longest = std::max(longest, took.count());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  const std::chrono::duration<double> all = SteadyClock::now() - begin;
  // The process never ends by itself and has ten seconds for a turn.
  EXPECT_LT(longest, 5.0);
  EXPECT_GT(all.count(), 1.0);
  EXPECT_LT(all.count(), 60.0);
}

TEST_F(ProcessPoolTest, ProcessesEndByThemselvesWhenTheirInputDoes) {
  const TestFolder folder;
  const auto begin = SteadyClock::now();
  {
    ProcessPool pool(
        settings(answering(kReward) + "; echo bye >&2; echo bye > " + folder.at("end"), 3),
        read_reward);
    ask(pool);
  }
  EXPECT_EQ(text_of_file(folder.at("end")), "bye\n");
  EXPECT_LT(std::chrono::duration<double>(SteadyClock::now() - begin).count(), 0.9);
}

TEST_F(ProcessPoolTest, ThreadsMayShareItAndComeAndGo) {
  ProcessPool pool(settings(answering(kReward), 3), read_reward);
  std::mutex mutex;
  std::set<std::string> pids;
  const auto work = [&] {
    for (int i = 0; i < 25; ++i) {
      const Turn turn = ask(pool);
      const std::lock_guard lock(mutex);
      EXPECT_EQ(turn.kind, Turn::Kind::reward) << turn.failure;
      pids.insert(turn.failure);
    }
  };
  // A process must not end with the thread that happened to start it.
  for (int round = 0; round < 3; ++round) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back(work);
    for (std::thread& thread : threads) thread.join();
  }
  EXPECT_LE(pids.size(), 3u);
}

}  // namespace
}  // namespace leeway
