// Weights that servers copy from the memory of the trainer's GPU: which of them do, and what
// happens where that does not work. The memory is pretended.
#include <gtest/gtest.h>

#include "orchestrator/steady_clock.h"
#include "pool/curl_http.h"
#include "pool/fake_server.h"
#include "pool/pool_sampler.h"

namespace leeway {
namespace {

using testing::FakeAnswer;
using testing::FakeModel;
using testing::FakeWeights;
using testing::HttpFakeServer;

struct MemoryPool {
  // Servers by the GPU whose memory they take weights from; empty: none.
  explicit MemoryPool(const std::vector<std::string>& devices, std::string own = "GPU-1") {
    std::vector<ServerAddress> addresses;
    for (const std::string& device : devices) {
      servers.push_back(std::make_unique<HttpFakeServer>());
      servers.back()->with([&](FakeModel& model) { model.device = device; });
      addresses.push_back({servers.back()->url(), servers.back()->url()});
    }
    PoolContext context;
    context.table.pool = InferencePool::static_;
    context.table.sync_interval = 0.05;
    context.table.connect_timeout = 0.5;
    context.table.stall_timeout = 0.5;
    context.table.update_timeout = 0.3;
    context.table.ready_timeout = 30.0;
    context.table.update_attempts = 3;
    context.model = {.vocab_size = 32, .max_length = 512};
    auto store = std::make_unique<FakeWeights>();
    weights = store.get();
    weights->device = std::move(own);
    pool = std::make_unique<PoolSampler>(std::move(context),
                                         std::make_unique<StaticServers>(addresses),
                                         std::make_unique<CurlHttp>(), std::move(store), clock);
  }
  void until(const std::function<bool()>& condition) {
    const double end = clock.now() + 60.0;
    while (!condition() && clock.now() < end) {
      pool->poll(0.0);
      clock.sleep(0.002);
    }
    EXPECT_TRUE(condition());
  }
  // Publishes a version and waits until every server samples with it.
  void update(PolicyVersion version) {
    pool->update_weights(nullptr, version);
    for (auto& server : servers) {
      until([&] {
        return server->with([&](FakeModel& model) {
          return model.version == version && !model.paused &&
                 model.checksum == FakeWeights::checksum_of(version);
        });
      });
    }
    pool->wait_for_server([] { return false; });
  }
  bool from_memory(size_t server) {
    return servers[server]->with([](FakeModel& model) { return model.from_memory; });
  }
  int64_t updates(size_t server) {
    return servers[server]->with([](FakeModel& model) { return model.calls["/update_weights"]; });
  }
  std::string events() {
    std::string text;
    for (const MemberEvent& event : pool->take_events()) text += event.text + "\n";
    return text;
  }

  std::vector<std::unique_ptr<HttpFakeServer>> servers;
  SteadyClock clock;
  FakeWeights* weights = nullptr;
  std::unique_ptr<PoolSampler> pool;
};

TEST(PoolMemory, ServersOfTheSameGpuTakeNoFolder) {
  MemoryPool pool({"GPU-1", "GPU-1"});
  for (PolicyVersion version : {1, 2, 3}) {
    pool.update(version);
    EXPECT_TRUE(pool.from_memory(0) && pool.from_memory(1));
  }
  EXPECT_EQ(pool.weights->written, 0);
  pool.until([&] { return pool.weights->there == std::set<PolicyVersion>{3}; });
  double taken = 0.0;
  pool.until([&] {
    taken += metric_of(pool.pool->take_metrics(), "pool/memory_updates");
    return taken == 6.0;
  });
}

TEST(PoolMemory, OtherServersGetTheFolderWhichIsWrittenOnce) {
  MemoryPool pool({"GPU-1", "GPU-2", ""});
  pool.update(1);
  EXPECT_TRUE(pool.from_memory(0));
  EXPECT_FALSE(pool.from_memory(1));
  EXPECT_FALSE(pool.from_memory(2));
  EXPECT_EQ(pool.weights->written, 1);
  pool.update(2);
  EXPECT_EQ(pool.weights->written, 2);
}

TEST(PoolMemory, IsOfferedToNobodyWithoutAGpu) {
  MemoryPool pool({"GPU-1"}, "");
  pool.update(1);
  EXPECT_FALSE(pool.from_memory(0));
}

TEST(PoolMemory, AServerThatRefusesItGetsTheFolderAtOnceAndFromThenOn) {
  MemoryPool pool({"GPU-1"});
  int refusals = 0;
  pool.servers[0]->with([&](FakeModel& model) {
    model.spoil = [&](const std::string& path, FakeAnswer& answer) {
      if (path != "/update_weights" || !model.from_memory) return;
      ++refusals;
      model.version = 0;
      answer = {400, R"({"error":{"message":"the memory cannot be opened"}})"};
    };
  });
  pool.update(1);
  pool.update(2);
  EXPECT_EQ(refusals, 1);
  EXPECT_EQ(pool.updates(0), 3);
  EXPECT_EQ(pool.weights->written, 2);
  EXPECT_NE(
      pool.events().find("takes weights from files, not from the GPU's memory: update: status "
                         "400: the memory cannot be opened"),
      std::string::npos);
}

TEST(PoolMemory, OtherBitsThanThePublishedOnesAreNotSampledWith) {
  MemoryPool pool({"GPU-1"});
  pool.servers[0]->with([&](FakeModel& model) {
    model.spoil = [&](const std::string& path, FakeAnswer& answer) {
      if (path != "/update_weights" || !model.from_memory) return;
      model.checksum = 5;
      answer.body = R"({"leeway":{"version":1,"checksum":"00000005"}})";
    };
  });
  pool.update(1);
  EXPECT_FALSE(pool.from_memory(0));
  EXPECT_NE(pool.events().find("the checksum of its weights is 00000005"), std::string::npos);
}

TEST(PoolMemory, AServerThatDoesNotAnswerIsAskedOnceMoreAndThenGetsTheFolder) {
  MemoryPool pool({"GPU-1"});
  pool.servers[0]->with([&](FakeModel& model) {
    model.spoil = [&](const std::string& path, FakeAnswer& answer) {
      if (path == "/update_weights" && model.from_memory) answer.silent = true;
    };
  });
  pool.update(1);
  pool.until([&] { return !pool.from_memory(0); });
  EXPECT_EQ(pool.updates(0), 3);
  EXPECT_EQ(pool.weights->written, 1);
  pool.until([&] { return metric_of(pool.pool->take_metrics(), "pool/ready_servers") == 1.0; });
}

TEST(PoolMemory, AServerThatComesBackIsTriedAgain) {
  MemoryPool pool({"GPU-1"});
  bool refuse = true;
  pool.servers[0]->with([&](FakeModel& model) {
    model.spoil = [&](const std::string& path, FakeAnswer& answer) {
      if (path == "/update_weights" && model.from_memory && refuse) answer = {400, "{}"};
    };
  });
  pool.update(1);
  EXPECT_FALSE(pool.from_memory(0));
  pool.servers[0]->with([&](FakeModel& model) {
    refuse = false;
    model.checksum = 9;  // it was started again, with other weights
    model.version = 0;
  });
  pool.until([&] { return pool.from_memory(0); });
}

}  // namespace
}  // namespace leeway
