#include "run/engine_sampler.h"

#include <chrono>

#include "leeway/error.h"

namespace leeway {

EngineSampler::EngineSampler(const PolicySnapshot& weights, const EngineOptions& options)
    : engine_(weights, options) {}

int64_t EngineSampler::submit(const SampleRequest& request) {
  return engine_.submit({.prompt = request.prompt,
                         .samples = request.samples,
                         .max_new_tokens = request.max_new_tokens,
                         .sampling = {.temperature = request.temperature,
                                      .top_k = request.top_k,
                                      .top_p = request.top_p,
                                      .min_p = request.min_p},
                         .stop_ids = request.stop_ids,
                         .seed = request.seed});
}

// What the engine still returns of a cancelled request is for nobody: the driver has forgotten it.
void EngineSampler::cancel(int64_t request) { engine_.cancel(request); }

std::vector<SampleResult> EngineSampler::poll(double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::vector<SampleResult> results;
  while (!engine_.idle()) {
    std::string failure;
    try {
      engine_.step();
    } catch (const Error& error) {
      failure = error.what();
    }
    take(results, failure);
    if (std::chrono::steady_clock::now() >= end) break;
  }
  take(results, "cancelled");
  return results;
}

void EngineSampler::take(std::vector<SampleResult>& results, const std::string& failure) {
  for (FinishedSample& sample : engine_.take_finished()) {
    SampleResult& result = results.emplace_back();
    result.request = sample.request;
    result.sample = sample.sample;
    result.ids = std::move(sample.ids);
    result.logprobs = std::move(sample.processed_logprobs);
    result.versions.assign(sample.versions.begin(), sample.versions.end());
    result.finish = sample.finish == Finish::stop     ? SampleResult::Finish::stop
                    : sample.finish == Finish::length ? SampleResult::Finish::length
                                                      : SampleResult::Finish::failed;
    if (result.finish == SampleResult::Finish::failed) result.failure = failure;
  }
}

void EngineSampler::update_weights(std::shared_ptr<const PolicySnapshot> weights, int64_t version) {
  LEEWAY_CHECK(weights != nullptr && weights->version() == version, "weights of this version");
  engine_.update_weights(std::move(weights));
}

}  // namespace leeway
