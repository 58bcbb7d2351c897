// What it costs to sample with several ranks instead of the threads of one: the same requests, with
// as many threads in all. The ranks are threads of this process, so that this is the cost of
// messages and of uneven work, without a network.
// See benchmarks/README.md for the method.
//   ranks_sampling_benchmark [THREADS]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "base/rng.h"
#include "run/engine_sampler.h"
#include "run/sampling_group.h"

namespace leeway {
namespace {

constexpr int kRepeats = 7;

PolicySnapshot random_policy(int64_t hidden, int64_t layers, int64_t vocabulary) {
  ModelConfig config;
  config.vocab_size = vocabulary;
  config.hidden_size = hidden;
  config.intermediate_size = 3 * hidden;
  config.num_hidden_layers = layers;
  config.num_attention_heads = hidden / 32;
  config.num_key_value_heads = hidden / 64;
  config.head_dim = 32;
  config.max_position_embeddings = 512;
  Parameters weights(config);
  initialise(weights, 1);
  return PolicySnapshot(std::move(weights), 0);
}

// One sample each, of uneven lengths.
std::vector<Request> requests_of(int64_t vocabulary) {
  Rng rng(1);
  std::vector<Request> requests(128);
  for (Request& request : requests) {
    for (int i = 0; i < 32; ++i) {
      request.prompt.push_back(static_cast<int32_t>(rng.below(static_cast<uint64_t>(vocabulary))));
    }
    request.max_new_tokens = 16 + static_cast<int64_t>(rng.below(112));
    request.seed = rng.next();
  }
  return requests;
}

struct Figures {
  double tokens_per_second, processor_microseconds;  // the latter per token, of all threads
};

Figures sample(Sampler& sampler, const std::vector<Request>& requests) {
  const auto begin = std::chrono::steady_clock::now();
  const std::clock_t processor_begin = std::clock();
  for (const Request& request : requests) sampler.submit(request);
  size_t ended = 0, tokens = 0;
  while (ended < requests.size()) {
    for (const SampledSequence& result : sampler.poll(0.005)) {
      ++ended;
      tokens += result.ids.size();
    }
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  const double processor = static_cast<double>(std::clock() - processor_begin) / CLOCKS_PER_SEC;
  const auto count = static_cast<double>(tokens);
  return {count / seconds.count(), 1e6 * processor / count};
}

// An engine, or as many ranks as there are threads with one thread each.
class Contender {
 public:
  Contender(std::string name, const PolicySnapshot& policy, int ranks, int threads)
      : name_(std::move(name)) {
    EngineOptions options;
    options.threads = threads;
    options.kv_bytes = int64_t{1} << 28;
    if (ranks == 0) {
      sampler_ = std::make_unique<EngineSampler>(policy, options);
      return;
    }
    group_ = std::make_unique<testing::SamplingGroup>(ranks, policy.host(),
                                                      SamplingWorkerOptions{options, {}});
    sampler_ =
        std::make_unique<RanksSampler>(group_->at(0), policy, RanksSamplerOptions{options, {}});
  }
  void measure(const std::vector<Request>& requests) {
    const Figures figures = sample(*sampler_, requests);
    rates_.push_back(figures.tokens_per_second);
    costs_.push_back(figures.processor_microseconds);
  }
  double rate() { return median(rates_); }
  double cost() { return median(costs_); }
  double best_rate() const { return *std::max_element(rates_.begin(), rates_.end()); }
  const std::string& name() const { return name_; }

 private:
  static double median(std::vector<double>& values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
  }

  std::string name_;
  std::unique_ptr<testing::SamplingGroup> group_;
  std::unique_ptr<Sampler> sampler_;
  std::vector<double> rates_, costs_;
};

void compare(const char* title, const PolicySnapshot& policy, int threads) {
  const std::vector<Request> requests = requests_of(policy.config().vocab_size);
  const auto count = [](int number, const char* what) {
    return std::to_string(number) + " " + what + (number == 1 ? "" : "s");
  };
  std::vector<std::unique_ptr<Contender>> contenders;
  const auto add = [&](std::string name, int ranks, int each) {
    contenders.push_back(std::make_unique<Contender>(std::move(name), policy, ranks, each));
  };
  add("one engine, " + count(threads, "thread"), 0, threads);
  if (threads > 1) add("one engine, 1 thread", 0, 1);
  add("1 rank of " + count(threads, "thread"), 1, threads);
  add(count(threads, "rank") + " of 1 thread", threads, 1);
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    for (const auto& each : contenders) each->measure(requests);
  }
  std::printf("%s: %zu requests, sampled tokens/s\n", title, requests.size());
  for (const auto& each : contenders) {
    std::printf("  %-24s median %8.0f, best %8.0f; %7.1f us of a core per token\n",
                each->name().c_str(), each->rate(), each->best_rate(), each->cost());
  }
}

}  // namespace
}  // namespace leeway

int main(int count, char** arguments) {
  const int threads = count > 1 ? std::max(1, std::atoi(arguments[1])) : 2;
  leeway::compare("1 million parameters", leeway::random_policy(128, 4, 512), threads);
  leeway::compare("10 million parameters", leeway::random_policy(256, 8, 8192), threads);
}
