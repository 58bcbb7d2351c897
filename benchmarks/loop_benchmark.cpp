// What the loop costs besides sampling and training: the scheduler with a thousand rollouts in
// flight, and training passes with more and more tokens that carry no loss.
// See benchmarks/README.md for the method.
//   loop_benchmark

#include <chrono>
#include <cstdio>
#include <deque>

#include "leeway/presets.h"
#include "orchestrator/batch.h"
#include "orchestrator/scheduler.h"
#include "orchestrator/steady_clock.h"
#include "trainer/trainer.h"

namespace leeway {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Answers immediately with made-up tokens, so that only the orchestrator's own time is measured.
class InstantSampler : public Sampler {
 public:
  int64_t submit(Request request) override {
    for (int64_t sample = 0; sample < request.samples; ++sample) {
      SampledSequence& result = waiting_.emplace_back();
      result.request = next_;
      result.sample = sample;
      result.ids.assign(static_cast<size_t>(request.max_new_tokens), 'a');
      result.processed_logprobs.assign(result.ids.size(), -0.5f);
      result.versions.assign(result.ids.size(), version_);
    }
    return next_++;
  }
  void cancel(int64_t) override {}
  // Returns a few at a time, so that the rest stays in flight.
  std::vector<SampledSequence> poll(double) override {
    std::vector<SampledSequence> results;
    while (!waiting_.empty() && results.size() < 16) {
      results.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
    return results;
  }
  void update_weights(std::shared_ptr<const PolicySnapshot>, PolicyVersion version) override {
    version_ = version;
  }

 private:
  std::deque<SampledSequence> waiting_;
  int64_t next_ = 0;
  PolicyVersion version_ = 0;
};

void scheduler_overhead() {
  OrchestratorTable table;
  table.prompts_per_batch = 125;
  table.group_size = 8;
  table.max_off_policy_steps = 4;
  table.max_inflight = 1000;
  table.schedule = RolloutSchedule::free;
  EnvironmentTable sort;
  sort.name = sort.id = "sort";
  EnvironmentMix mix = make_environments({sort}, 1);
  const auto tokenizer = make_byte_tokenizer();
  const Conversation conversation(*tokenizer, nullptr, "\n", {});
  InstantSampler sampler;
  RolloutSettings settings;
  settings.max_new_tokens = 128;
  settings.max_length = 1024;
  SteadyClock clock;
  RolloutDriver driver(conversation, sampler, clock, settings);
  constexpr int64_t kBatches = 40;
  RolloutScheduler scheduler(table, 1, kBatches, mix, driver, sampler, clock);
  const double begin = now();
  PolicyVersion batches = 0;
  int64_t most = 0;
  while (batches < kBatches) {
    scheduler.pump(0.0);
    most = std::max(most, scheduler.running());
    while (auto groups = scheduler.take_batch()) {
      prepare_batch(++batches, std::move(*groups), {"sort"}, {});
      scheduler.offer_weights(nullptr, batches);
    }
  }
  const auto rollouts = static_cast<double>(scheduler.totals().completed);
  const double each = (now() - begin) / rollouts;
  std::printf("scheduler: %.0f rollouts of 128 tokens, up to %lld in flight: %.1f us each\n",
              rollouts, static_cast<long long>(most), 1e6 * each);
  std::printf("  = %.2f %% of the time of sampling them at 100,000 tokens/s\n",
              100.0 * each / (128 / 100000.0));
}

void masked_tokens() {
  ModelConfig config;
  config.family = Family::llama;
  config.vocab_size = 32768;  // the output head dominates, as in real models
  config.hidden_size = 128;
  config.intermediate_size = 256;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 32;
  config.max_position_embeddings = 1024;
  Parameters weights(config);
  initialise(weights, 1);
  TrainerTable table;
  Trainer trainer(std::move(weights), Catalog().make_spec("icepop", {}), table);
  std::printf("training: 16 sequences of 256 tokens, vocabulary 32768\n");
  double all = 0.0;
  for (const int trained : {255, 192, 128, 64, 16}) {
    std::vector<Sample> samples(16);
    for (Sample& sample : samples) {
      sample.ids.assign(256, 7);
      sample.loss_mask.assign(256, 0);
      std::fill(sample.loss_mask.end() - trained, sample.loss_mask.end(), uint8_t{1});
      sample.rollout.assign(256, -1.0f);
      sample.advantages = {0.5f};
    }
    double best = 1e9;
    for (int repeat = 0; repeat < 3; ++repeat) {
      const double begin = now();
      trainer.forward_backward(samples, {});
      best = std::min(best, now() - begin);
    }
    if (all == 0.0) all = best;
    std::printf("  %3d of 255 tokens trained: %6.1f ms, %.2f of all\n", trained, 1e3 * best,
                best / all);
  }
}

}  // namespace
}  // namespace leeway

int main() {
  leeway::scheduler_overhead();
  leeway::masked_tokens();
}
