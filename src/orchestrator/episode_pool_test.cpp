// Protocol 2 with real programs: what they may say, and what they must not.
#include "orchestrator/episode_pool.h"

#include <gtest/gtest.h>

#include "orchestrator/environment_factories.h"
#include "orchestrator/episode_test_support.h"
#include "orchestrator/steady_clock.h"

namespace leeway {
namespace {

using namespace leeway::testing;

// A driver over a program: the sampler is fake, the processes are real.
class EpisodePoolTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::system("python3 -c 1") != 0) GTEST_SKIP() << "there is no python3";
  }
  EnvironmentTable table(const std::string& program) const {
    EnvironmentTable t;
    t.name = "process";
    t.command = "exec python3 " + folder_.write(fmt::format("program{}.py", ++programs_), program);
    t.processes = 1;
    t.turn_timeout = 20.0;
    return t;
  }

  struct Played {
    std::vector<RolloutOutcome> outcomes;  // by rollout
    std::vector<Request> requests;
    int64_t unasked = 0;
    const RolloutOutcome& only() const { return outcomes.at(0); }
  };
  // Runs `count` rollouts of one group to their end; unscored ones are scored together.
  Played play(const EnvironmentTable& t, int64_t count = 1,
              const std::function<std::string(const Request&)>& policy = {}) const {
    const auto environment = make_process_environment(t);
    return play(*environment, count, policy);
  }
  Played play(const Environment& environment, int64_t count = 1,
              const std::function<std::string(const Request&)>& policy = {}) const {
    VirtualClock virtual_clock;
    SteadyClock clock;
    const FakeTalk talk(true);
    FakeSampler sampler(virtual_clock, [&](const Request& request, int64_t, int64_t) {
      FakeReply reply;
      reply.ids = talk.reply_of(policy ? policy(request) : "yes");
      return reply;
    });
    RolloutDriver driver(talk.conversation, sampler, clock, settings_);
    std::vector<int64_t> numbers(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) numbers[static_cast<size_t>(i)] = i;
    Played played;
    played.outcomes.resize(numbers.size());
    driver.start(environment, environment.example(Split::train, 0), numbers, 7,
                 {.group = 4, .members = count});
    std::vector<int64_t> unscored;
    int64_t ended = 0;
    while (ended < count) {
      for (RolloutOutcome& outcome : driver.poll(10.0)) {
        ++ended;
        played.outcomes.at(static_cast<size_t>(outcome.rollout)) = std::move(outcome);
      }
      for (int64_t rollout : driver.take_unscored()) unscored.push_back(rollout);
      if (!unscored.empty() && static_cast<int64_t>(unscored.size()) + ended == count) {
        std::sort(unscored.begin(), unscored.end());
        driver.score(std::exchange(unscored, {}));
      }
    }
    EXPECT_EQ(driver.running(), 0);
    EXPECT_EQ(sampler.in_flight(), 0);
    for (const FakeSampler::Sent& sent : sampler.sent()) played.requests.push_back(sent.request);
    played.unasked = environment.take_unasked_answers();
    return played;
  }
  static void expect_failure(const RolloutOutcome& outcome, FailureKind kind,
                             const std::string& words) {
    EXPECT_EQ(outcome.outcome, Outcome::failed);
    EXPECT_STREQ(name_of(outcome.kind), name_of(kind)) << outcome.message;
    EXPECT_NE(outcome.message.find(words), std::string::npos) << outcome.message;
  }

  RolloutSettings settings_ = {.max_new_tokens = 32, .max_turns = 6, .max_length = 600};
  TestFolder folder_;
  mutable int programs_ = 0;
};

// Asks once and gives a reward.
const std::string kOnce = R"(
def on(m):
    if m["type"] == "episode": ask(m["id"], "1", "2+2?")
    if m["type"] == "sampled": done(m["episode"], reward=0.5, metrics={"size": m["tokens"]})
)";

TEST_F(EpisodePoolTest, AnEpisodeAsksAndEnds) {
  const auto environment = make_process_environment(table(asking_program(kOnce)));
  EXPECT_EQ(environment->size(Split::train), 5u);
  EXPECT_EQ(environment->size(Split::held_out), 3u);
  environment->check();
  const Played played = play(*environment, 3);
  for (const RolloutOutcome& outcome : played.outcomes) {
    ASSERT_EQ(outcome.outcome, Outcome::completed) << outcome.message;
    EXPECT_EQ(outcome.result.reward, 0.5);
    ASSERT_EQ(outcome.result.steps.size(), 1u);
    EXPECT_TRUE(outcome.result.steps[0].loss_mask.empty());
    EXPECT_TRUE(outcome.result.credit.empty());
    EXPECT_EQ(outcome.result.metrics, (NamedNumbers{{"size", 4.0}}));
    EXPECT_FALSE(outcome.result.truncated);
  }
  EXPECT_NE(played.requests.at(0).seed, played.requests.at(1).seed);
}

TEST_F(EpisodePoolTest, TheProgramIsToldWhereItStands) {
  const std::string seen = folder_.at("seen");
  EnvironmentTable t = table(asking_program(R"(
def on(m):
    with open(")" + seen + R"(", "a") as f: f.write(json.dumps(m) + "\n")
    if m["type"] == "episode": ask(m["id"], 1, "q", tools=[{"name": "t"}])
    if m["type"] == "sampled": done(m["episode"], reward=1)
)"));
  t.data = folder_.write("data.jsonl", "{\"prompt\": \"a\", \"x\": [1]}\n{\"prompt\": \"b\"}\n");
  const Played played = play(t, 2);
  EXPECT_EQ(played.outcomes[0].outcome, Outcome::completed) << played.outcomes[0].message;
  std::map<std::string, JsonValue> episodes;
  std::istringstream lines(text_of_file(seen));
  int sampled = 0;
  for (std::string line; std::getline(lines, line);) {
    const JsonValue m = read_json("seen", line);
    if (m.find("type")->text == "episode") episodes[to_json(*m.find("member"))] = m;
    if (m.find("type")->text != "sampled") continue;
    ++sampled;
    EXPECT_EQ(to_json(*m.find("id")), "\"1\"");
    EXPECT_EQ(to_json(*m.find("message")), R"({"role": "assistant", "content": "yes"})");
    EXPECT_EQ(m.find("reply")->find("content")->text, "yes");
    EXPECT_EQ(to_json(*m.find("tokens")), "4");
  }
  EXPECT_EQ(sampled, 2);
  ASSERT_EQ(episodes.size(), 2u);
  const JsonValue& one = episodes.at("1");
  EXPECT_EQ(to_json(*one.find("split")), "\"train\"");
  EXPECT_EQ(to_json(*one.find("index")), "0");
  EXPECT_EQ(to_json(*one.find("group")), "4");
  EXPECT_EQ(to_json(*one.find("members")), "2");
  EXPECT_NE(one.find("example")->find("prompt"), nullptr);
  EXPECT_NE(to_json(*one.find("seed")), to_json(*episodes.at("0").find("seed")));
  EXPECT_NE(to_json(*one.find("id")), to_json(*episodes.at("0").find("id")));
}

TEST_F(EpisodePoolTest, RepeatedMessagesContinueTheSampledTokens) {
  const Played played = play(table(asking_program(R"(
context = [user("one")]
def on(m):
    if m["type"] == "episode": say(type="sample", episode=m["id"], id="1", messages=context)
    elif m["id"] == "1":
        context.extend([m["message"], user("two")])
        say(type="sample", episode=m["episode"], id="2", messages=context)
    elif m["id"] == "2":
        say(type="sample", episode=m["episode"], id="3", messages=[user("three")], **{"continue": "2"})
    elif m["id"] == "3": ask(m["episode"], "4", "a summary", train=False)
    elif m["id"] == "4": ask(m["episode"], "5", "a summary", temperature=0.25, max_new_tokens=2)
    else: done(m["episode"], reward=1, turn_rewards={"2": 0.5}, advantages={"1": 0.25, "3": [1, 2, 3, 4]})
)")));
  ASSERT_EQ(played.only().outcome, Outcome::completed) << played.only().message;
  const Rollout& rollout = played.only().result;
  ASSERT_EQ(rollout.steps.size(), 5u);
  const SplitTrajectory split = split_trajectory(rollout.steps);
  EXPECT_EQ(split.sample_of_step, (std::vector<size_t>{0, 0, 0, 1, 2}));
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(rollout.steps[i].loss_mask.empty());
  EXPECT_EQ(rollout.steps[3].loss_mask, (std::vector<uint8_t>(4, 0)));
  EXPECT_EQ(rollout.steps[4].loss_mask, (std::vector<uint8_t>(2, 0)));
  EXPECT_EQ(played.requests[4].sampling.temperature, 0.25f);
  EXPECT_TRUE(rollout.truncated);  // the last reply was cut off
  ASSERT_EQ(rollout.credit.size(), 5u);
  EXPECT_EQ(rollout.credit[0].advantages, (std::vector<double>(4, 0.25)));
  EXPECT_EQ(rollout.credit[1].reward, 0.5);
  EXPECT_EQ(rollout.credit[2].advantages, (std::vector<double>{1, 2, 3, 4}));
  EXPECT_FALSE(rollout.credit[3].reward);
}

TEST_F(EpisodePoolTest, SeveralCallsAreOpenAtATimeAndStepsAreInTheirOrder) {
  const EnvironmentTable t = table(asking_program(R"(
count = {}
def on(m):
    if m["type"] == "episode":
        for i in range(4): ask(m["id"], str(i), "question %d" % i)
    else:
        count[m["episode"]] = count.get(m["episode"], 0) + 1
        if count[m["episode"]] == 4: done(m["episode"], reward=1)
)"));
  const auto policy = [](const Request& request) { return std::string(1 + request.seed % 5, 'a'); };
  const Played first = play(t, 2, policy), again = play(t, 2, policy);
  for (size_t r = 0; r < 2; ++r) {
    ASSERT_EQ(first.outcomes[r].outcome, Outcome::completed) << first.outcomes[r].message;
    const Rollout &a = first.outcomes[r].result, &b = again.outcomes[r].result;
    ASSERT_EQ(a.steps.size(), 4u);
    for (size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(a.steps[i].prompt, b.steps[i].prompt);
      EXPECT_EQ(a.steps[i].completion, b.steps[i].completion);
    }
  }
}

TEST_F(EpisodePoolTest, CallsBeyondTheLimitsAreRefused) {
  settings_.max_turns = 2;
  const Played turns = play(table(asking_program(R"(
def on(m):
    if m["type"] == "episode": ask(m["id"], "1", "a")
    elif "error" in m: done(m["episode"], rewards={m["error"]: 1})
    else: ask(m["episode"], m["id"] + "1", "a")
)")));
  ASSERT_EQ(turns.only().outcome, Outcome::completed) << turns.only().message;
  EXPECT_EQ(turns.only().result.rewards.at(0).name, "max_turns");
  EXPECT_EQ(turns.only().result.steps.size(), 2u);
  EXPECT_TRUE(turns.only().result.truncated);
  const Played room = play(table(asking_program(R"(
def on(m):
    if m["type"] == "episode": ask(m["id"], "1", "a")
    elif "error" in m: done(m["episode"], rewards={m["error"]: 1}, truncated=False)
    else: ask(m["episode"], "2", "a" * 1000)
)")));
  ASSERT_EQ(room.only().outcome, Outcome::completed) << room.only().message;
  EXPECT_EQ(room.only().result.rewards.at(0).name, "context_length");
  EXPECT_FALSE(room.only().result.truncated);
}

TEST_F(EpisodePoolTest, GroupsAreScoredTogether) {
  const std::string scoring = R"(
def on(m):
    if m["type"] == "episode":
        member[m["id"]] = m["member"]
        ask(m["id"], "1", "a")
    if m["type"] == "sampled": done(m["episode"], info={"member": member[m["episode"]]})
    if m["type"] == "score_group":
        scored = [e["info"]["member"] for e in m["episodes"]]
        )";
  const auto scores = [&](const std::string& answer) {
    return play(table(asking_program("member = {}" + scoring + answer,
                                     "'train': 5, 'eval': 5, 'scores_groups': True")),
                3);
  };
  const Played good = scores(
      "say(type='scores', id=m['id'], rewards=[scored[0], {'rank': scored[1]}, scored[2]], "
      "metrics=[{'x': 1}, None, {'x': 3}])");
  for (size_t i = 0; i < 3; ++i) {
    ASSERT_EQ(good.outcomes[i].outcome, Outcome::completed) << good.outcomes[i].message;
    EXPECT_EQ(good.outcomes[i].result.reward, static_cast<double>(i));
  }
  EXPECT_EQ(good.outcomes[1].result.rewards.at(0).name, "rank");
  EXPECT_EQ(good.outcomes[2].result.metrics, (NamedNumbers{{"x", 3.0}}));
  const std::vector<std::tuple<std::string, FailureKind, std::string>> bad = {
      {"say(type='scores', id=m['id'], rewards=[1, 2])", FailureKind::bad_answer,
       "2 entries for 3 episodes"},
      {"say(type='scores', id=m['id'], error='no judge')", FailureKind::environment_error,
       "no judge"},
      {"say(type='scores', id=m['id'], rewards=[1, float('nan'), 2])", FailureKind::bad_answer,
       "finite"},
      {"say(type='scores', id=m['id'], rewards=[1, 1e39, 2])", FailureKind::bad_answer, "3.4e38"},
      {"sys.exit(3)", FailureKind::environment_error, "exit status 3"},
  };
  for (const auto& [answer, kind, words] : bad) {
    for (const RolloutOutcome& outcome : scores(answer).outcomes) {
      expect_failure(outcome, kind, words);
    }
  }
}

TEST_F(EpisodePoolTest, WhatMakesNoSenseFailsItsEpisodeAlone) {
  // The member 0 misbehaves; the others of the same process go on.
  const std::vector<std::tuple<std::string, FailureKind, std::string>> cases = {
      {"ask(e, '2')", FailureKind::bad_answer, "messages is empty"},
      {"say(type='sample', episode=e, id='2')", FailureKind::bad_answer, "messages are missing"},
      {"say(type='sample', episode=e, messages=[user('x')])", FailureKind::bad_answer, "id"},
      {"ask(e, '1', 'x')", FailureKind::bad_answer, "second call"},
      {"ask(e, '2', 'x', **{'continue': '9'})", FailureKind::bad_answer, "no call \"9\""},
      {"ask(e, '2', 'x', temperature=-1)", FailureKind::bad_answer, "temperature"},
      {"ask(e, '2', 'x', temperature=1e-9)", FailureKind::bad_answer, "0.0001"},
      {"ask(e, '2', 'x', max_new_tokens=0)", FailureKind::bad_answer, "max_new_tokens"},
      {"ask(e, '2', 'x', tools=[1])", FailureKind::bad_answer, "tools"},
      {"ask(e, '2', 'x', train=1)", FailureKind::bad_answer, "train"},
      {"say(type='sample', episode=e, id='2', messages=[{'role': 'assistant', 'content': 'x'}])",
       FailureKind::bad_answer, "assistant"},
      {"say(type='sample', episode=e, id='2', messages=[{'role': 'ghost', 'content': 'x'}])",
       FailureKind::bad_answer, "ghost"},
      {"say(type='reward', episode=e)", FailureKind::bad_answer, "no message of the type"},
      {"done(e)", FailureKind::bad_answer, "neither reward nor rewards"},
      {"done(e, reward=float('nan'))", FailureKind::bad_answer, "finite"},
      {"done(e, reward=1e39)", FailureKind::bad_answer, "3.4e38"},
      {"done(e, reward='1')", FailureKind::bad_answer, "reward must be a number"},
      {"done(e, reward=1, metrics={'x': float('inf')})", FailureKind::bad_answer, "metrics.x"},
      {"done(e, reward=1, metrics={'a/b': 1})", FailureKind::bad_answer, "a/b"},
      {"done(e, reward=1, turn_rewards={'7': 1})", FailureKind::bad_answer, "\"7\""},
      {"done(e, reward=1, advantages={'1': [1, 2]})", FailureKind::bad_answer, "4 tokens"},
      {"done(e, reward=1, advantages={'1': 'x'})", FailureKind::bad_answer, "advantages.1"},
      {"done(e, reward=1, info=3)", FailureKind::bad_answer, "info"},
      {"say(type='error', episode=e, error='no disk')", FailureKind::environment_error, "no disk"},
      {"[ask(e, 'x%d' % i, 'x') for i in range(40)]", FailureKind::bad_answer, "goes on asking"},
  };
  for (const auto& [action, kind, words] : cases) {
    const Played played = play(table(asking_program(R"(
member = {}
def on(m):
    if m["type"] == "episode":
        member[m["id"]] = m["member"]
        ask(m["id"], "1", "x")
    elif m["type"] == "sampled":
        e = m["episode"]
        if member[e] != 0: done(e, reward=1)
        elif m["id"] == "1": )" + action)),
                               2);
    SCOPED_TRACE(action);
    expect_failure(played.outcomes[0], kind, words);
    EXPECT_EQ(played.outcomes[1].outcome, Outcome::completed) << played.outcomes[1].message;
  }
}

TEST_F(EpisodePoolTest, AnEpisodeThatEndsBeforeASampleIsEmpty) {
  expect_failure(play(table(asking_program(R"(
def on(m):
    if m["type"] == "episode": done(m["id"], reward=1)
)")))
                     .only(),
                 FailureKind::empty, "before anything was sampled");
  // Why its call got nothing is part of the message.
  expect_failure(play(table(asking_program(R"(
def on(m):
    if m["type"] == "episode": ask(m["id"], "1", "a" * 1000)
    elif m["type"] == "sampled": done(m["episode"], reward=1)
)")))
                     .only(),
                 FailureKind::empty, "the model 600 positions");
}

TEST_F(EpisodePoolTest, ALongReportIsCut) {
  const Played played = play(table(asking_program(R"(
def on(m):
    if m["type"] == "episode": say(type="error", episode=m["id"], error="no disk" + "!" * 900000)
)")));
  expect_failure(played.only(), FailureKind::environment_error, "no disk!!");
  EXPECT_LT(played.only().message.size(), 1100u);
}

TEST_F(EpisodePoolTest, ABrokenProcessCostsAllOfItsEpisodes) {
  const std::vector<std::tuple<std::string, FailureKind, std::string>> cases = {
      {"write('no JSON')", FailureKind::bad_answer, "no JSON"},
      {"write('[1]')", FailureKind::bad_answer, "object with a type"},
      {"say(type='done', reward=1)", FailureKind::bad_answer, "names its episode"},
      {"write('x' * 3000000)", FailureKind::bad_answer, "max_output_bytes"},
      {"sys.stderr.write('no memory\\n'); os._exit(7)", FailureKind::environment_error,
       "no memory"},
      {"os.close(1); time.sleep(1000)", FailureKind::environment_error, "closed its output"},
  };
  for (const auto& [action, kind, words] : cases) {
    // It breaks when all 8 of its episodes have asked.
    const Played played = play(table(asking_program(R"(
n = 0
def on(m):
    global n
    if m["type"] == "episode":
        n += 1
        if n == 8: )" + action + R"(
)")),
                               8);
    SCOPED_TRACE(action);
    for (const RolloutOutcome& outcome : played.outcomes) expect_failure(outcome, kind, words);
  }
}

TEST_F(EpisodePoolTest, SilenceFailsTheEpisodeOrTheProcess) {
  EnvironmentTable t = table(asking_program(R"(
import threading
member = {}
def chatter():
    while True:
        say(type="log", text="still here")
        time.sleep(0.05)
def on(m):
    if m["type"] == "episode":
        member[m["id"]] = m["member"]
        if m["member"] == 0: threading.Thread(target=chatter, daemon=True).start()
        else: ask(m["id"], "1", "x")
    elif m["type"] == "sampled": done(m["episode"], reward=1)
)"));
  t.turn_timeout = 2.0;
  const Played chatty = play(t, 2);
  expect_failure(chatty.outcomes[0], FailureKind::timeout, "neither asked for a sample nor ended");
  EXPECT_EQ(chatty.outcomes[1].outcome, Outcome::completed);
  t = table(asking_program("def on(m): time.sleep(1000)"));
  t.turn_timeout = 1.0;
  expect_failure(play(t).only(), FailureKind::timeout, "said nothing for 1 s and was killed");
  // However much it writes, and however short the lines are.
  t = table(asking_program("def on(m):\n    while True: sys.stdout.write('\\n' * 65536)"));
  t.turn_timeout = 1.0;
  expect_failure(play(t).only(), FailureKind::timeout, "said nothing for 1 s and was killed");
  EXPECT_EQ(count_children(), 0);
}

TEST_F(EpisodePoolTest, WordsAboutOtherEpisodesChangeNothing) {
  const Played played = play(table(asking_program(R"(
def on(m):
    if m["type"] == "episode":
        done(12345, reward=1)
        ask("x", "1", "a")
        say(type="scores", id=99, rewards=[1])
        ask(m["id"], "1", "a")
    elif m["type"] == "sampled":
        done(m["episode"], reward=1)
        done(m["episode"], reward=2)
        ask(m["episode"], "2", "a")
)")));
  ASSERT_EQ(played.only().outcome, Outcome::completed) << played.only().message;
  EXPECT_EQ(played.only().result.reward, 1.0);
  EXPECT_EQ(played.unasked, 3);
}

TEST_F(EpisodePoolTest, WhatItLogsIsALineAsItIs) {
  const auto environment = make_process_environment(table(asking_program(R"(
def on(m):
    if m["type"] == "episode":
        say(type="log", text="caf\u00e9 \"one\"\ntwo" + "x" * 1000)
        ask(m["id"], "1", "a")
    elif m["type"] == "sampled": done(m["episode"], reward=1)
)")));
  ASSERT_EQ(play(*environment).only().outcome, Outcome::completed);
  const std::vector<std::string> log = environment->take_log();
  ASSERT_EQ(log.size(), 1u);
  EXPECT_NE(log[0].find(": caf\u00e9 \"one\" twoxxx"), std::string::npos) << log[0];
  EXPECT_LT(log[0].size(), 600u);
}

TEST_F(EpisodePoolTest, HellosThatCannotBeUsed) {
  const auto refused = [&](const std::string& hello, const std::vector<std::string>& words) {
    expect_refused(
        [&] { make_process_environment(table(asking_program("def on(m): pass", hello))); }, words);
  };
  refused("", {"data is missing", "command", "\"train\" and \"eval\""});
  refused("'train': 5", {"\"train\" and \"eval\""});
  refused("'train': 0, 'eval': 1", {"train = 0"});
  refused("'train': 5, 'eval': 'many'", {"eval = \"many\""});
  refused("'train': 10**12, 'eval': 1", {"train = 1000000000000", "100000000", "null"});
  EnvironmentTable t = table("");
  t.command = answering(answer(R"("reward": 1)"));
  expect_refused([&] { make_process_environment(t); }, {"data is missing", "speaks protocol 1"});
  t.command = "echo '{\"type\": \"hello\", \"protocol\": 3}'; sleep 1000";
  expect_refused([&] { make_process_environment(t); }, {"protocol \"3\"", "1 or 2"});
  t.command = "echo '{\"type\": \"hello\", \"protocol\": \"2\"}'; sleep 1000";
  expect_refused([&] { make_process_environment(t); }, {"first line", "N = 1 or 2"});
  t.command = "exit 4";
  expect_refused([&] { make_process_environment(t); }, {"command = \"exit 4\"", "exit status 4"});
  const auto endless = make_process_environment(
      table(asking_program("def on(m): pass", "'train': None, 'eval': 2")));
  EXPECT_EQ(endless->size(Split::train), std::nullopt);
  EXPECT_EQ(endless->size(Split::held_out), 2u);
}

TEST_F(EpisodePoolTest, CancelledEpisodesAreTold) {
  const std::string seen = folder_.at("seen");
  const auto environment = make_process_environment(table(asking_program(R"(
def on(m):
    if m["type"] == "cancel": open(")" + seen + R"(", "w").write("cancelled")
)")));
  {
    const auto episode = environment->start(environment->example(Split::train, 0));
    for (int i = 0; i < 50; ++i) EXPECT_EQ(episode->poll().kind, Turn::Kind::pending);
  }
  for (int i = 0; i < 30000 && text_of_file(seen).empty(); ++i) {
    environment->take_log();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(text_of_file(seen), "cancelled");
}

}  // namespace
}  // namespace leeway
