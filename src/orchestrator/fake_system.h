// A sampler and a learner for tests, with the environments of fake_environment.h, on a virtual
// clock that advances only when someone waits. Their behaviour follows from seeds and scripts;
// requests to them are recorded.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "leeway/error.h"
#include "orchestrator/conversation.h"
#include "orchestrator/fake_environment.h"
#include "orchestrator/interfaces.h"
#include "orchestrator/rollouts.h"
#include "orchestrator/scheduler.h"
#include "orchestrator/split.h"

namespace leeway::testing {

class VirtualClock : public Clock {
 public:
  double now() const override { return now_; }
  void sleep(double seconds) override { now_ += seconds; }
  // Never goes back.
  void advance_to(double time) { now_ = std::max(now_, time); }

 private:
  double now_ = 0.0;
};

// What one sample of a request does.
struct FakeReply {
  std::vector<int32_t> ids;  // cut off at max_new_tokens; without a stop token at the end: `length`
  double wait = 0.0;         // seconds before the first token's
  double per_token = 0.01;   // seconds
  std::string failure = "";  // not empty: fails after `wait`
};
using FakePolicy = std::function<FakeReply(const Request& request, int64_t number, int64_t sample)>;

class FakeSampler : public Sampler {
 public:
  struct Sent {
    Request request;
    PolicyVersion version = 0;  // when it was submitted
    int64_t open = 0;           // samples in flight
    bool cancelled = false;
  };

  FakeSampler(VirtualClock& clock, FakePolicy policy)
      : clock_(clock), policy_(std::move(policy)), swaps_{{-1.0, 0}} {}

  std::function<void(const Request&)> on_submit = [](const Request&) {};        // may throw
  std::function<void(PolicyVersion version)> on_update = [](PolicyVersion) {};  // before the swap

  int64_t submit(Request request) override {
    on_submit(request);
    const auto number = static_cast<int64_t>(sent_.size());
    sent_.push_back({request, swaps_.back().second, request.samples});
    for (int64_t sample = 0; sample < request.samples; ++sample) {
      Pending pending{number, sample, clock_.now(), policy_(request, number, sample)};
      std::vector<int32_t>& ids = pending.reply.ids;
      const auto most = static_cast<size_t>(request.max_new_tokens);
      if (ids.size() > most) ids.resize(most);
      const bool failed = !pending.reply.failure.empty();
      const double tokens = failed ? 0.0 : static_cast<double>(ids.size());
      const double end = clock_.now() + pending.reply.wait + tokens * pending.reply.per_token;
      pending_.emplace(end, std::move(pending));
    }
    return number;
  }
  void cancel(int64_t request) override {
    Sent& sent = sent_.at(static_cast<size_t>(request));
    sent.cancelled = true;
    sent.open = 0;
    std::erase_if(pending_, [&](const auto& entry) { return entry.second.request == request; });
  }
  std::vector<SampledSequence> poll(double seconds) override {
    std::vector<SampledSequence> results;
    if (pending_.empty()) return results;
    clock_.advance_to(std::min(clock_.now() + seconds, pending_.begin()->first));
    while (!pending_.empty() && pending_.begin()->first <= clock_.now()) {
      results.push_back(result_of(pending_.begin()->second));
      --sent_[static_cast<size_t>(results.back().request)].open;
      pending_.erase(pending_.begin());
    }
    return results;
  }
  void update_weights(std::shared_ptr<const PolicySnapshot>, PolicyVersion version) override {
    on_update(version);
    swaps_.emplace_back(clock_.now(), version);
  }

  // Instead of version 0, before anything is submitted.
  void begin_at(PolicyVersion version) { swaps_.assign(1, {-1.0, version}); }
  const std::vector<Sent>& sent() const { return sent_; }
  int64_t in_flight() const { return static_cast<int64_t>(pending_.size()); }  // samples
  const std::vector<std::pair<double, PolicyVersion>>& swaps() const { return swaps_; }

 private:
  struct Pending {
    int64_t request, sample;
    double start;
    FakeReply reply;
  };

  SampledSequence result_of(Pending& pending) const {
    SampledSequence result;
    result.request = pending.request;
    result.sample = pending.sample;
    result.failure = pending.reply.failure;
    if (!result.failure.empty()) {
      result.finish = Finish::failed;
      return result;
    }
    result.ids = std::move(pending.reply.ids);
    result.processed_logprobs.assign(result.ids.size(), -0.25f);
    for (size_t t = 0; t < result.ids.size(); ++t) {
      result.versions.push_back(version_at(pending.start + pending.reply.wait +
                                           static_cast<double>(t + 1) * pending.reply.per_token));
    }
    const auto& stops = sent_[static_cast<size_t>(pending.request)].request.stop_ids;
    const bool stopped = result.ids.empty() ||
                         std::find(stops.begin(), stops.end(), result.ids.back()) != stops.end();
    result.finish = stopped ? Finish::stop : Finish::length;
    return result;
  }
  // A token sampled exactly at the time of a swap counts as before it.
  PolicyVersion version_at(double time) const {
    PolicyVersion version = 0;
    for (const auto& [begin, swapped] : swaps_) {
      if (begin < time) version = swapped;
    }
    return version;
  }

  VirtualClock& clock_;
  FakePolicy policy_;
  std::vector<std::pair<double, PolicyVersion>> swaps_;  // time and version
  std::vector<Sent> sent_;
  std::multimap<double, Pending> pending_;  // by the time they end
};

class FakeLearner : public Learner {
 public:
  explicit FakeLearner(VirtualClock& clock) : clock_(clock) {}

  std::function<double(int64_t step)> seconds_of = [](int64_t) { return 0.1; };
  std::function<std::string(int64_t step)> failure_of = [](int64_t) { return std::string(); };

  void start(TrainingBatch batch) override {
    LEEWAY_CHECK(!busy_, "one update at a time");
    busy_ = true;
    due_ = clock_.now() + seconds_of(batch.step);
    began_ = clock_.now();
    batches_.push_back(std::move(batch));
  }
  std::optional<LearnerResult> poll(double seconds) override {
    if (!busy_) return std::nullopt;
    clock_.advance_to(std::min(clock_.now() + seconds, due_));
    if (clock_.now() < due_) return std::nullopt;
    busy_ = false;
    LearnerResult result;
    result.batch = batches_.back();
    result.failure = failure_of(result.batch.step);
    if (!result.failure.empty()) return result;
    result.version = ++version_;
    result.busy_seconds = due_ - began_;
    result.metrics = {{"loss", 0.5}};
    return result;
  }

  // Instead of version 0, before the first update.
  void begin_at(PolicyVersion version) { version_ = version; }
  bool busy() const { return busy_; }
  const std::vector<TrainingBatch>& batches() const { return batches_; }

 private:
  VirtualClock& clock_;
  bool busy_ = false;
  double due_ = 0.0, began_ = 0.0;
  PolicyVersion version_ = 0;
  std::vector<TrainingBatch> batches_;
};

// Tokens of bytes, with or without the chat format of qwen3.
struct FakeTalk {
  explicit FakeTalk(bool rendered)
      : tokenizer(make_byte_tokenizer(control_tokens_of("qwen3"))),
        renderer(rendered ? make_renderer("qwen3", tokenizer.get()) : nullptr),
        conversation(*tokenizer, renderer.get(), rendered ? "" : "\n", {}) {}

  std::vector<int32_t> ids_of(const std::string& text) const {
    return tokenizer->encode(text, SpecialTokens::recognise);
  }
  // The words and the token that ends them.
  std::vector<int32_t> reply_of(const std::string& words) const {
    std::vector<int32_t> ids = ids_of(words);
    ids.push_back(conversation.stop_ids().front());
    return ids;
  }
  std::string text_of(const std::vector<int32_t>& ids) const { return tokenizer->decode(ids); }

  std::unique_ptr<Tokenizer> tokenizer;
  std::unique_ptr<Renderer> renderer;
  Conversation conversation;
};

// Words of a, b and c that depend only on the request's seed, after delays that depend on `delays`
// and the request's number. `trouble` is the fraction of each kind of failure.
struct RandomPolicy {
  const FakeTalk& talk;
  uint64_t delays = 0;
  double trouble = 0.0, more = 0.0;
  double slowest = 0.3;  // seconds a sample waits at most

  FakeReply operator()(const Request& request, int64_t number, int64_t sample) const {
    Rng words(mixed_seed({request.seed, static_cast<uint64_t>(sample)}));
    Rng times(mixed_seed({delays, static_cast<uint64_t>(number), static_cast<uint64_t>(sample)}));
    FakeReply reply;
    reply.wait = slowest * times.uniform() * times.uniform();
    reply.per_token = 0.02 * times.uniform();
    double kind = words.uniform() - trouble;
    std::string text;
    for (const char letter : {'F', 'X', 'N'}) {
      if (kind < 0.0 && kind >= -trouble) text = letter;
      kind -= trouble;
    }
    if (words.uniform() < trouble) reply.failure = "the server is gone";
    if (words.uniform() < trouble) return reply;  // without a token
    if (words.uniform() < more) text = "T";
    const uint64_t length = 1 + words.below(6);
    for (uint64_t i = 0; i < length; ++i) text += static_cast<char>('a' + words.below(3));
    reply.ids = talk.reply_of(text);
    return reply;
  }
};

inline EnvironmentMix::Member fake_member(const std::string& id, double weight,
                                          FakeEnvironment::Respond respond = respond_by_letter) {
  return {id, weight, std::make_unique<FakeEnvironment>(id, std::move(respond))};
}

struct FakeOptions {
  OrchestratorTable table;
  int64_t max_batches = 4;
  uint64_t seed = 1;
  bool rendered = false;
  std::vector<EnvironmentMix::Member> members;  // empty: one, `letters`
  RolloutSettings rollouts = {.max_new_tokens = 64, .max_length = 512};
};

// Everything from the clock to the scheduler.
struct FakeSystem {
  using MakePolicy = std::function<FakePolicy(const FakeTalk&)>;

  FakeSystem(FakeOptions options, const MakePolicy& policy)
      : talk(options.rendered),
        sampler(clock, policy(talk)),
        learner(clock),
        mix(members_of(std::move(options.members)), options.seed),
        driver(talk.conversation, sampler, clock, options.rollouts),
        scheduler(options.table, options.seed, options.max_batches, mix, driver, sampler, clock) {}

  std::vector<std::string> ids() const {
    std::vector<std::string> ids;
    for (const auto& member : mix.members()) ids.push_back(member.id);
    return ids;
  }

  VirtualClock clock;
  FakeTalk talk;
  FakeSampler sampler;
  FakeLearner learner;
  EnvironmentMix mix;
  RolloutDriver driver;
  RolloutScheduler scheduler;

 private:
  static std::vector<EnvironmentMix::Member> members_of(
      std::vector<EnvironmentMix::Member> members) {
    if (members.empty()) members.push_back(fake_member("letters", 1.0));
    return members;
  }
};

}  // namespace leeway::testing
