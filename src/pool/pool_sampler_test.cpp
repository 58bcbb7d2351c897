#include "pool/pool_sampler.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "orchestrator/steady_clock.h"
#include "pool/curl_http.h"
#include "pool/fake_server.h"
#include "pool/name_source.h"

namespace leeway {
namespace {

using testing::FakeAnswer;
using testing::FakeModel;
using testing::FakeWeights;
using testing::HttpFakeServer;

const std::string kGenerate = "/inference/v1/generate";

PoolContext quick_context() {
  PoolContext context;
  context.table.pool = InferencePool::static_;
  context.table.sync_interval = 0.05;
  context.table.connect_timeout = 0.5;
  context.table.request_timeout = 2.0;
  context.table.stall_timeout = 0.5;
  context.table.update_timeout = 1.0;
  context.table.ready_timeout = 2.0;
  context.table.request_attempts = 1;  // a failure is seen at once
  context.model = {.vocab_size = 32, .max_length = 512};
  return context;
}

struct Fixture {
  explicit Fixture(size_t servers, PoolContext context = quick_context()) {
    std::vector<ServerAddress> addresses;
    for (size_t i = 0; i < servers; ++i) {
      fakes.push_back(std::make_unique<HttpFakeServer>());
      addresses.push_back({fakes.back()->url(), fakes.back()->url()});
    }
    make(std::move(context), std::make_unique<StaticServers>(addresses));
  }
  void make(PoolContext context, std::unique_ptr<ServerSource> source) {
    auto owned = std::make_unique<FakeWeights>();
    weights = owned.get();
    pool = std::make_unique<PoolSampler>(std::move(context), std::move(source),
                                         std::make_unique<CurlHttp>(), std::move(owned), clock);
  }
  void start(PolicyVersion version = 0) {
    pool->update_weights(nullptr, version);
    pool->wait_for_server([] { return false; });
  }
  static Request request(uint64_t seed, int64_t samples = 2) {
    return {.prompt = {3, static_cast<int32_t>(seed % 20)},
            .samples = samples,
            .max_new_tokens = 8,
            .stop_ids = {31},
            .seed = seed};
  }
  // All results until `count` are there; a minute is more than every bound above.
  std::vector<SampledSequence> results(size_t count) {
    std::vector<SampledSequence> all;
    const double end = clock.now() + 60.0;
    while (all.size() < count && clock.now() < end) {
      for (SampledSequence& each : pool->poll(0.05)) all.push_back(std::move(each));
    }
    EXPECT_EQ(all.size(), count);
    return all;
  }
  // Polls until it holds.
  void until(const std::function<bool()>& condition) {
    const double end = clock.now() + 60.0;
    while (!condition() && clock.now() < end) {
      pool->poll(0.0);
      clock.sleep(0.002);
    }
    EXPECT_TRUE(condition());
  }
  double metric(const std::string& name) { return metric_of(pool->take_metrics(), name); }

  std::vector<std::unique_ptr<HttpFakeServer>> fakes;
  SteadyClock clock;
  FakeWeights* weights = nullptr;
  std::unique_ptr<PoolSampler> pool;
};

void spoil_once(HttpFakeServer& server, const std::string& path,
                const std::function<void(FakeAnswer&)>& change) {
  server.with([&](FakeModel& model) {
    auto done = std::make_shared<bool>(false);
    model.spoil = [=](const std::string& at, FakeAnswer& answer) {
      if (at != path || std::exchange(*done, true)) return;
      change(answer);
    };
  });
}

void replace(std::string& text, const std::string& what, const std::string& with) {
  const size_t at = text.find(what);
  ASSERT_NE(at, std::string::npos) << text;
  text.replace(at, what.size(), with);
}

std::vector<SampledSequence> sorted(std::vector<SampledSequence> results) {
  std::sort(results.begin(), results.end(), [](const auto& a, const auto& b) {
    return std::pair(a.request, a.sample) < std::pair(b.request, b.sample);
  });
  return results;
}

TEST(PoolSampler, SamplesComeAsTheServerMadeThemWhicheverServerItWas) {
  std::vector<std::vector<SampledSequence>> runs;
  for (size_t servers : {1, 3}) {
    Fixture fixture(servers);
    fixture.start();
    for (uint64_t k = 0; k < 20; ++k) fixture.pool->submit(Fixture::request(k));
    runs.push_back(sorted(fixture.results(40)));
  }
  for (size_t i = 0; i < 40; ++i) {
    EXPECT_EQ(runs[0][i].ids, runs[1][i].ids);
    EXPECT_EQ(runs[0][i].finish, Finish::stop);
    EXPECT_EQ(runs[0][i].versions, std::vector<PolicyVersion>(runs[0][i].ids.size(), 0));
  }
}

TEST(PoolSampler, LoadIsSpreadAndAPromptStaysWhereItWas) {
  Fixture fixture(2);
  fixture.start();
  fixture.until([&] { return fixture.metric("pool/ready_servers") == 2.0; });
  for (uint64_t k = 0; k < 8; ++k) fixture.pool->submit(Fixture::request(k));
  fixture.results(16);
  for (auto& fake : fixture.fakes) {
    EXPECT_EQ(fake->with([](FakeModel& model) { return model.calls[kGenerate]; }), 4);
  }
  for (int k = 0; k < 6; ++k) {
    fixture.pool->submit(Fixture::request(5));
    fixture.results(2);
  }
  const int64_t first =
      fixture.fakes[0]->with([](FakeModel& model) { return model.calls[kGenerate]; });
  EXPECT_TRUE(first == 4 || first == 10) << first;
}

TEST(PoolSampler, NewWeightsReachEveryServerBeforeItsNextRequest) {
  Fixture fixture(3);
  fixture.start();
  for (PolicyVersion version = 1; version <= 4; ++version) {
    fixture.pool->update_weights(nullptr, version);
    for (uint64_t k = 0; k < 9; ++k) {
      fixture.pool->submit(Fixture::request(k + 100u * static_cast<uint64_t>(version)));
    }
    for (const SampledSequence& result : fixture.results(18)) {
      ASSERT_EQ(result.finish, Finish::stop) << result.failure;
      for (PolicyVersion each : result.versions) EXPECT_EQ(each, version);
    }
  }
  fixture.until([&] { return fixture.weights->there == std::set<PolicyVersion>{4}; });
  for (auto& fake : fixture.fakes) {
    fixture.until([&] { return fake->with([](FakeModel& model) { return !model.paused; }); });
  }
}

// What each kind of answer that must not be trained on becomes.
struct Spoiled {
  std::string name;
  std::function<void(FakeAnswer&)> change;
  std::string words;
};
class BadAnswers : public ::testing::TestWithParam<Spoiled> {};

TEST_P(BadAnswers, AreFailuresThatNameTheServerAndTheNextTryGoesElsewhere) {
  Fixture fixture(2);
  fixture.start();
  fixture.until([&] { return fixture.metric("pool/ready_servers") == 2.0; });
  for (auto& fake : fixture.fakes) spoil_once(*fake, kGenerate, GetParam().change);
  fixture.pool->submit(Fixture::request(1));
  std::string first;
  for (const SampledSequence& result : fixture.results(2)) {
    EXPECT_EQ(result.finish, Finish::failed);
    EXPECT_TRUE(result.ids.empty());
    EXPECT_NE(result.failure.find(GetParam().words), std::string::npos) << result.failure;
    first = result.failure.substr(0, result.failure.find(' '));
    EXPECT_TRUE(first.starts_with("http://127.0.0.1:")) << result.failure;
  }
  fixture.until([&] { return fixture.metric("pool/ready_servers") == 2.0; });
  fixture.pool->submit(Fixture::request(1));
  for (const SampledSequence& result : fixture.results(2)) {
    EXPECT_EQ(result.finish, Finish::failed);
    EXPECT_NE(result.failure.substr(0, result.failure.find(' ')), first) << "the same server again";
  }
  fixture.until([&] { return fixture.metric("pool/ready_servers") == 2.0; });
  fixture.pool->submit(Fixture::request(1));
  for (const SampledSequence& result : fixture.results(2)) {
    EXPECT_EQ(result.finish, Finish::stop) << result.failure;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, BadAnswers,
    ::testing::Values(
        Spoiled{"error",
                [](FakeAnswer& a) {
                  a = {500, R"({"error":{"message":"out of luck"}})"};
                },
                "status 500: out of luck"},
        Spoiled{"truncated", [](FakeAnswer& a) { a.truncated = true; }, ""},
        Spoiled{"half", [](FakeAnswer& a) { a.body.resize(a.body.size() / 2); }, "bad answer"},
        Spoiled{"silent", [](FakeAnswer& a) { a.silent = true; }, ""},
        Spoiled{"nothing", [](FakeAnswer& a) { a.body = ""; }, "bad answer"},
        Spoiled{"number", [](FakeAnswer& a) { a.body = "7"; }, "bad answer"},
        Spoiled{"foreign_id",
                [](FakeAnswer& a) {
                  replace(a.body, "\"token_ids\":[", "\"token_ids\":[32,");
                  replace(a.body, "\"content\":[", R"("content":[{"token_id":32,"logprob":-1},)");
                  replace(a.body, "\"versions\":[", "\"versions\":[0,");
                  replace(a.body, "\"processed_logprobs\":[", "\"processed_logprobs\":[-1,");
                },
                "the vocabulary has 32"},
        Spoiled{"negative_id",
                [](FakeAnswer& a) {
                  replace(a.body, "\"token_ids\":[", "\"token_ids\":[-1,");
                  replace(a.body, "\"content\":[", R"("content":[{"token_id":-1,"logprob":-1},)");
                  replace(a.body, "\"versions\":[", "\"versions\":[0,");
                  replace(a.body, "\"processed_logprobs\":[", "\"processed_logprobs\":[-1,");
                },
                "the token -1"},
        Spoiled{"nan",
                [](FakeAnswer& a) { replace(a.body, "\"logprob\":-0.25", "\"logprob\":NaN"); },
                "log-probability nan"},
        Spoiled{"processed_infinity",
                [](FakeAnswer& a) {
                  replace(a.body, "\"processed_logprobs\":[-0.25",
                          "\"processed_logprobs\":[-Infinity");
                },
                "processed log-probability -inf"},
        Spoiled{"positive",
                [](FakeAnswer& a) { replace(a.body, "\"logprob\":-0.25", "\"logprob\":0.5"); },
                "log-probability 0.5"},
        Spoiled{"short_list",
                [](FakeAnswer& a) { replace(a.body, "\"versions\":[0", "\"versions\":[0,0"); },
                "versions"},
        Spoiled{"future_version",
                [](FakeAnswer& a) { replace(a.body, "\"versions\":[0", "\"versions\":[9"); },
                "of version 9"},
        Spoiled{
            "one_choice_less",
            [](FakeAnswer& a) { a.body = a.body.substr(0, a.body.find(",{\"index\":1")) + "]}"; },
            "has 1 choices, 2 were asked for"},
        Spoiled{"abort",
                [](FakeAnswer& a) {
                  replace(a.body, "\"finish_reason\":\"stop\"", "\"finish_reason\":\"abort\"");
                  replace(a.body, "\"finish_reason\":\"stop\"", "\"finish_reason\":\"abort\"");
                },
                "the server ended it"},
        Spoiled{"no_stop",
                [](FakeAnswer& a) {
                  replace(a.body, "\"finish_reason\":\"stop\"", "\"finish_reason\":\"length\"");
                },
                "ended by its length"}),
    [](const auto& each) { return each.param.name; });

// Whatever goes wrong with a call, the request is made again as it was: the samples are those of a
// pool without a fault.
TEST_P(BadAnswers, AreHealedByAnotherCallWithTheSameSeed) {
  PoolContext context = quick_context();
  context.table.request_attempts = 5;
  Fixture fixture(2, context), healthy(1);
  healthy.start();
  fixture.start();
  fixture.until([&] { return fixture.metric("pool/ready_servers") == 2.0; });
  for (auto& fake : fixture.fakes) spoil_once(*fake, kGenerate, GetParam().change);
  for (Fixture* each : {&fixture, &healthy}) {
    for (uint64_t k = 0; k < 4; ++k) each->pool->submit(Fixture::request(k));
  }
  const auto healed = sorted(fixture.results(8)), expected = sorted(healthy.results(8));
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(healed[i].finish, Finish::stop) << healed[i].failure;
    EXPECT_EQ(healed[i].ids, expected[i].ids);
  }
  const Metrics metrics = fixture.pool->take_metrics();
  EXPECT_GE(metric_of(metrics, "pool/retried_requests"), 1.0);
  EXPECT_EQ(metric_of(metrics, "pool/failed_requests"),
            metric_of(metrics, "pool/retried_requests"));
}

TEST(PoolSampler, ARequestFailsAfterRequestAttemptsCalls) {
  PoolContext context = quick_context();
  context.table.request_attempts = 3;
  Fixture fixture(4, context);
  fixture.start();
  for (auto& fake : fixture.fakes) {
    fake->with([](FakeModel& model) {
      model.spoil = [](const std::string& path, FakeAnswer& answer) {
        if (path == kGenerate) answer = {500, R"({"error":{"message":"out of luck"}})"};
      };
    });
  }
  fixture.pool->submit(Fixture::request(1));
  for (const SampledSequence& result : fixture.results(2)) {
    EXPECT_EQ(result.finish, Finish::failed);
    EXPECT_NE(result.failure.find("out of luck"), std::string::npos) << result.failure;
  }
  EXPECT_EQ(fixture.metric("pool/requests"), 3.0);
}

std::string outage_of(Fixture& fixture) {
  const double end = fixture.clock.now() + 60.0;
  for (uint64_t k = 0; fixture.clock.now() < end; ++k) {
    fixture.pool->submit(Fixture::request(k));
    try {
      fixture.results(2);
    } catch (const Error& error) {
      return error.what();
    }
  }
  return "";
}

TEST(PoolSampler, AnOutageEndsAfterOutageTimeoutWithTheRealReason) {
  PoolContext context = quick_context();
  context.table.ready_timeout = 0.1;
  context.table.outage_timeout = 0.5;
  Fixture fixture(2, context);
  fixture.start();
  for (auto& fake : fixture.fakes) {
    fake->with([](FakeModel& model) {
      model.spoil = [](const std::string&, FakeAnswer& answer) {
        answer = {503, R"({"error":{"message":"it drains"}})"};
      };
    });
  }
  const std::string reason = outage_of(fixture);
  EXPECT_NE(reason.find("inference.outage_timeout = 0.5"), std::string::npos) << reason;
  EXPECT_NE(reason.find("it drains"), std::string::npos) << reason;
}

// Servers that are well but for their answers: they leave and come back all the time.
TEST(PoolSampler, BadAnswersAloneAreAnOutageToo) {
  PoolContext context = quick_context();
  context.table.outage_timeout = 0.5;
  Fixture fixture(1, context);
  fixture.start();
  fixture.fakes[0]->with([](FakeModel& model) {
    model.spoil = [](const std::string& path, FakeAnswer& answer) {
      if (path == kGenerate) replace(answer.body, "\"logprob\":-0.25", "\"logprob\":NaN");
    };
  });
  const std::string reason = outage_of(fixture);
  EXPECT_NE(reason.find("inference.outage_timeout = 0.5"), std::string::npos) << reason;
  EXPECT_NE(reason.find("log-probability nan"), std::string::npos) << reason;
}

// A connection that was used before and ends without an answer is opened once more, by curl.
TEST(PoolSampler, AServerThatEndsEveryConnectionGivesFailures) {
  Fixture fixture(1);
  fixture.start();
  fixture.fakes[0]->with([](FakeModel& model) {
    model.spoil = [](const std::string& path, FakeAnswer& answer) {
      answer.reset = path == kGenerate;
    };
  });
  fixture.pool->submit(Fixture::request(1));
  for (const SampledSequence& result : fixture.results(2)) {
    EXPECT_EQ(result.finish, Finish::failed);
    EXPECT_TRUE(result.failure.starts_with(fixture.fakes[0]->url())) << result.failure;
  }
}

TEST(PoolSampler, AServerThatSaysItHasWeightsItHasNotLeavesThePool) {
  Fixture fixture(2);
  fixture.start();
  HttpFakeServer& liar = *fixture.fakes[0];
  liar.with([](FakeModel& model) {
    model.spoil = [](const std::string& path, FakeAnswer& answer) {
      if (path != "/update_weights") return;
      answer.body = R"({"success":true,"leeway":{"version":1,"checksum":"0000002a"}})";
    };
  });
  fixture.pool->update_weights(nullptr, 1);
  for (uint64_t k = 0; k < 10; ++k) fixture.pool->submit(Fixture::request(k));
  for (const SampledSequence& result : fixture.results(20)) {
    EXPECT_EQ(result.finish, Finish::stop) << result.failure;
    EXPECT_EQ(result.versions.front(), 1);
  }
  EXPECT_EQ(liar.with([](FakeModel& model) { return model.calls[kGenerate]; }), 0);
  std::string told;
  fixture.until([&] {
    for (const MemberEvent& event : fixture.pool->take_events()) {
      if (event.state == MemberState::unhealthy) told = event.server + ": " + event.text;
    }
    return !told.empty();
  });
  EXPECT_NE(told.find(liar.url()), std::string::npos);
  EXPECT_NE(told.find("checksum"), std::string::npos) << told;
}

TEST(PoolSampler, AServerThatCannotUpdateComesBackWhenItCan) {
  Fixture fixture(2);
  fixture.start();
  fixture.until([&] { return fixture.metric("pool/ready_servers") == 2.0; });
  HttpFakeServer& weak = *fixture.fakes[1];
  weak.with([](FakeModel& model) {
    model.spoil = [](const std::string& path, FakeAnswer& answer) {
      if (path == "/update_weights") answer = {500, "{}"};
    };
  });
  fixture.pool->update_weights(nullptr, 1);
  fixture.until([&] { return fixture.metric("pool/ready_servers") == 1.0; });
  EXPECT_FALSE(weak.with([](FakeModel& model) { return model.paused; })) << "left paused";
  weak.with([](FakeModel& model) { model.spoil = nullptr; });
  fixture.until([&] { return fixture.metric("pool/ready_servers") == 2.0; });
  EXPECT_EQ(weak.with([](FakeModel& model) { return model.version; }), 1);
  EXPECT_FALSE(weak.with([](FakeModel& model) { return model.paused; }));
}

TEST(PoolSampler, AServerThatStartedAgainWithOtherWeightsIsNotTrainedOn) {
  Fixture fixture(1);
  fixture.start();
  fixture.pool->update_weights(nullptr, 3);
  fixture.pool->submit(Fixture::request(1));
  fixture.results(2);
  fixture.fakes[0]->with([](FakeModel& model) {
    model.version = 0;
    model.checksum = 7;
  });
  fixture.pool->submit(Fixture::request(2));
  for (const SampledSequence& result : fixture.results(2)) {
    EXPECT_EQ(result.finish, Finish::failed);
    EXPECT_NE(result.failure.find("of version 0"), std::string::npos) << result.failure;
  }
  fixture.pool->submit(Fixture::request(2));
  for (const SampledSequence& result : fixture.results(2)) {
    EXPECT_EQ(result.finish, Finish::stop) << result.failure;
    EXPECT_EQ(result.versions.front(), 3);
  }
}

TEST(PoolSampler, WeightsOfAnotherRunAreNoticedBetweenRequests) {
  Fixture fixture(1);
  fixture.start();
  fixture.fakes[0]->with([](FakeModel& model) { model.checksum = 42; });  // of the same version
  std::string told;
  fixture.until([&] {
    for (const MemberEvent& event : fixture.pool->take_events()) {
      if (event.state == MemberState::discovering) told = event.text;
    }
    return told.find("another run") != std::string::npos;
  });
  fixture.until([&] {
    return fixture.fakes[0]->with([](FakeModel& model) { return model.checksum; }) ==
           FakeWeights::checksum_of(0);
  });
}

TEST(PoolSampler, WithoutAServerRequestsFailInTimeWithTheServersReasons) {
  PoolContext context = quick_context();
  context.table.ready_timeout = 0.3;
  Fixture fixture(1, context);
  fixture.start();
  fixture.fakes[0]->with([](FakeModel& model) {
    model.spoil = [](const std::string&, FakeAnswer& answer) {
      answer = {503, R"({"error":{"message":"it drains"}})"};
    };
  });
  fixture.until([&] { return fixture.metric("pool/ready_servers") == 0.0; });
  fixture.pool->submit(Fixture::request(1));
  for (const SampledSequence& result : fixture.results(2)) {
    EXPECT_EQ(result.finish, Finish::failed);
    EXPECT_NE(result.failure.find("no server is ready"), std::string::npos) << result.failure;
    EXPECT_NE(result.failure.find("it drains"), std::string::npos) << result.failure;
  }
}

TEST(PoolSampler, AServerOfAnotherModelIsRefusedWithTheReason) {
  PoolContext context = quick_context();
  context.table.ready_timeout = 0.2;
  context.model.vocab_size = 33;
  Fixture fixture(1, context);
  try {
    fixture.start();
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("a vocabulary of 32, the policy of 33"),
              std::string::npos)
        << error.what();
  }
}

TEST(PoolSampler, TheKeyIsSentAndInNoMessage) {
  PoolContext context = quick_context();
  context.headers = {"Authorization: Bearer s3cret-key"};
  Fixture fixture(1, context);
  fixture.start();
  EXPECT_EQ(fixture.fakes[0]->with([&](FakeModel&) { return fixture.fakes[0]->headers; }).front(),
            "Bearer s3cret-key");
  spoil_once(*fixture.fakes[0], kGenerate, [](FakeAnswer& a) { a.truncated = true; });
  fixture.pool->submit(Fixture::request(1));
  for (const SampledSequence& result : fixture.results(2)) {
    EXPECT_EQ(result.finish, Finish::failed);
    EXPECT_EQ(result.failure.find("s3cret"), std::string::npos) << result.failure;
  }
}

TEST(PoolSampler, ServersBehindANameComeAndGo) {
  HttpFakeServer fake;
  auto addresses = std::make_shared<std::vector<std::string>>();
  auto mutex = std::make_shared<std::mutex>();
  const auto answer = [=](std::vector<std::string> now) {
    const std::lock_guard lock(*mutex);
    *addresses = std::move(now);
  };
  answer({"127.0.0.1"});
  PoolContext context = quick_context();
  context.table.pool = InferencePool::elastic;
  Fixture fixture(0, context);
  fixture.make(context, std::make_unique<NameServers>("pool.test", fake.port(), 0.01,
                                                      [=](const std::string& name) {
                                                        EXPECT_EQ(name, "pool.test");
                                                        const std::lock_guard lock(*mutex);
                                                        if (addresses->empty()) {
                                                          throw Error("no such name");
                                                        }
                                                        return *addresses;
                                                      }));
  fixture.start();
  EXPECT_EQ(fixture.metric("elastic/num_ready_servers"), 1.0);
  answer({"127.0.0.1", "127.0.0.9"});  // nobody listens there
  fixture.until([&] { return fixture.metric("elastic/num_servers") == 2.0; });
  EXPECT_EQ(fixture.metric("elastic/num_ready_servers"), 1.0);
  answer({});  // the name server is gone: what is known stays
  for (uint64_t k = 0; k < 5; ++k) fixture.pool->submit(Fixture::request(k));
  for (const SampledSequence& result : fixture.results(10)) {
    EXPECT_EQ(result.finish, Finish::stop) << result.failure;
  }
  EXPECT_EQ(fixture.metric("elastic/num_servers"), 2.0);
  answer({"127.0.0.9"});
  fixture.until([&] { return fixture.metric("elastic/num_servers") == 1.0; });
  answer({"127.0.0.1"});
  fixture.until([&] { return fixture.metric("elastic/num_ready_servers") == 1.0; });
}

TEST(PoolSampler, ACancelledRequestGivesNothingAndFreesItsPlace) {
  Fixture fixture(1);
  fixture.start();
  const int64_t queued = fixture.pool->submit(Fixture::request(1));
  fixture.pool->cancel(queued);
  spoil_once(*fixture.fakes[0], kGenerate, [](FakeAnswer& a) { a.silent = true; });
  const int64_t flying = fixture.pool->submit(Fixture::request(2));
  fixture.pool->poll(0.05);
  fixture.pool->cancel(flying);
  fixture.pool->submit(Fixture::request(3));
  for (const SampledSequence& result : fixture.results(2)) EXPECT_EQ(result.request, 2);
  EXPECT_TRUE(fixture.pool->poll(0.0).empty());
}

}  // namespace
}  // namespace leeway
