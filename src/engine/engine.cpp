#include "engine/engine.h"

#include <fmt/format.h>

#include <chrono>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "engine/checks.h"
#include "engine/cpu_backend.h"
#include "engine/scheduler.h"
#include "leeway/error.h"

namespace leeway {
namespace {

std::unique_ptr<SamplingBackend> make_backend(const ModelConfig& config,
                                              const EngineOptions& options) {
  check_options(options);
  const MakeSamplingBackend make = options.backend ? options.backend : make_cpu_backend;
  return make(config, options, most_blocks(config, options));
}

}  // namespace

struct Engine::Impl {
  struct Arrival {
    int64_t id;
    Request request;
  };

  const EngineOptions options;
  const ModelConfig config;

  // Used by the stepping thread only, like those below.
  const std::unique_ptr<SamplingBackend> backend;
  const RequestLimits limits;

  // Shared with other threads.
  mutable std::mutex mutex;
  int64_t next_id = 0;
  std::vector<Arrival> arrivals;
  std::vector<int64_t> cancels;
  std::shared_ptr<const PolicySnapshot> new_weights;
  std::unordered_map<int64_t, int64_t> open;  // request: unfinished samples
  std::vector<SampledSequence> finished;

  // Used by the stepping thread only.
  Scheduler scheduler;
  PolicyVersion version;
  double load_seconds = 0.0;  // not yet reported
  std::vector<Arrival> taken_arrivals;
  std::vector<int64_t> taken_cancels;
  std::vector<Drawn> drawn;
  std::vector<SampledSequence> ended;

  Impl(const PolicySnapshot& weights, const EngineOptions& given)
      : options(given),
        config(weights.config()),
        backend(make_backend(config, options)),
        limits(limits_of(config, options, *backend)),
        scheduler(limits.blocks, options.max_sequences, options.max_rows_per_step),
        version(weights.version()) {
    backend->check(weights);
    backend->load(weights);
  }

  void take_what_came_in();
  void publish();
  std::string failure(const StepRows& pass) const;
  StepReport step();
};

void Engine::Impl::take_what_came_in() {
  std::shared_ptr<const PolicySnapshot> weights;
  {
    const std::lock_guard lock(mutex);
    std::swap(arrivals, taken_arrivals);
    std::swap(cancels, taken_cancels);
    std::swap(new_weights, weights);
  }
  for (Arrival& arrival : taken_arrivals) scheduler.enqueue(arrival.id, std::move(arrival.request));
  for (const int64_t id : taken_cancels) scheduler.cancel(id, ended);
  taken_arrivals.clear();
  taken_cancels.clear();
  if (!weights) return;
  version = weights->version();
  const auto begin = std::chrono::steady_clock::now();
  backend->load(*weights);
  load_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  if (options.kv_after_swap == KvAfterSwap::recompute) scheduler.restart();
}

// Empty if every draw gave a token.
std::string Engine::Impl::failure(const StepRows& pass) const {
  std::string message;
  const ScheduledRequest* last = nullptr;
  int64_t failed = 0;
  for (size_t i = 0; i < drawn.size(); ++i) {
    if (drawn[i].failure.empty() || pass.draws[i].request == last) continue;
    last = pass.draws[i].request;
    if (failed++ > 0) continue;
    const SampledSequence& result = pass.draws[i].sample->result;
    message = fmt::format(
        "request {}, sample {}, token {}, weights of version {}: {}; the request is removed",
        result.request, result.sample, result.ids.size(), version, drawn[i].failure);
  }
  if (failed > 1) message += fmt::format(", and {} others that failed alike", failed - 1);
  return message;
}

void Engine::Impl::publish() {
  if (ended.empty()) return;
  const std::lock_guard lock(mutex);
  for (SampledSequence& result : ended) {
    const auto left = open.find(result.request);
    LEEWAY_CHECK(left != open.end(), "a sample ended that was never requested");
    if (--left->second == 0) open.erase(left);
    finished.push_back(std::move(result));
  }
  ended.clear();
}

StepReport Engine::Impl::step() {
  take_what_came_in();
  scheduler.admit();
  const StepRows& pass = scheduler.plan();
  std::string message;
  if (!pass.tokens.empty()) {
    backend->run(pass, drawn);
    message = failure(pass);
    backend->copy_blocks(scheduler.commit(drawn, version, ended));
  }
  publish();
  if (!message.empty()) throw Error(message);

  StepReport report;
  report.prompt_rows = pass.prompt_rows;
  report.decode_rows = pass.decode_rows;
  report.sampled = static_cast<int64_t>(pass.draws.size());
  report.running = scheduler.running();
  report.queued = scheduler.queued();
  report.free_blocks = scheduler.pool().free();
  report.version = version;
  report.load_seconds = std::exchange(load_seconds, 0.0);
  return report;
}

Engine::Engine(const PolicySnapshot& weights, const EngineOptions& options)
    : impl_(std::make_unique<Impl>(weights, options)) {}
Engine::Engine(const Parameters& weights, PolicyVersion version, const EngineOptions& options)
    : Engine(PolicySnapshot::view_of(weights, version), options) {}

Engine::~Engine() = default;

int64_t Engine::submit(Request request) {
  check_request(request, impl_->limits);
  const std::lock_guard lock(impl_->mutex);
  const int64_t id = impl_->next_id++;
  impl_->open.emplace(id, request.samples);
  impl_->arrivals.push_back({id, std::move(request)});
  return id;
}

void Engine::check(const Request& request) const { check_request(request, impl_->limits); }

bool Engine::cancel(int64_t request) {
  const std::lock_guard lock(impl_->mutex);
  if (!impl_->open.contains(request)) return false;
  impl_->cancels.push_back(request);
  return true;
}

void Engine::update_weights(std::shared_ptr<const PolicySnapshot> weights) {
  LEEWAY_CHECK(weights != nullptr, "weights must not be null");
  check_same_network(impl_->config, weights->config());
  impl_->backend->check(*weights);
  const std::lock_guard lock(impl_->mutex);
  impl_->new_weights = std::move(weights);
}

StepReport Engine::step() { return impl_->step(); }

void Engine::take_pending() {
  impl_->take_what_came_in();
  impl_->publish();
}

void Engine::recompute() { impl_->scheduler.restart(); }

std::span<const int32_t> Engine::sampled(int64_t request, int64_t sample) const {
  const SampledSequence* result = running(request, sample);
  return result == nullptr ? std::span<const int32_t>() : result->ids;
}

const SampledSequence* Engine::running(int64_t request, int64_t sample) const {
  const ScheduledSample* found = impl_->scheduler.find_running(request, sample);
  return found == nullptr ? nullptr : &found->result;
}

bool Engine::cancel_sample(int64_t request, int64_t sample) {
  const bool ran = impl_->scheduler.cancel_sample(request, sample, impl_->ended);
  impl_->publish();
  return ran;
}

std::vector<SampledSequence> Engine::take_finished() {
  const std::lock_guard lock(impl_->mutex);
  return std::exchange(impl_->finished, {});
}

bool Engine::idle() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->open.empty() && impl_->new_weights == nullptr;
}

int64_t Engine::blocks() const { return impl_->limits.blocks; }

}  // namespace leeway
