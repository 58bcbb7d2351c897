#include "engine/host_draws.h"

#include <functional>

#include "leeway/error.h"

namespace leeway {
namespace {

// Fewer logits than this are sampled faster by one thread than it takes to wake others.
constexpr int64_t kLogitsWorthATeam = 4096;

}  // namespace

HostDraws::HostDraws(ThreadPool& pool)
    : pool_(pool), samplers_(static_cast<size_t>(pool.threads())) {}

template <class DrawOne>
void HostDraws::for_each(std::span<const Draw> draws, int64_t vocabulary, const DrawOne& draw_one) {
  const int64_t count = static_cast<int64_t>(draws.size());
  if (count <= 1 || count * vocabulary < kLogitsWorthATeam) {
    for (int64_t i = 0; i < count; ++i) draw_one(i, samplers_[0]);
    return;
  }
  const auto share = [&](Team& team) {
    team.for_each(count, [&](int64_t i, int thread) { draw_one(i, samplers_[thread]); });
  };
  pool_.run_team(std::cref(share));
}

void HostDraws::draw(std::span<const Draw> draws, const float* logits, int64_t vocabulary,
                     std::span<Drawn> drawn) {
  LEEWAY_CHECK(drawn.size() == draws.size(), "each draw must have its place");
  for_each(draws, vocabulary, [&](int64_t i, TokenSampler& sampler) {
    const Draw& draw = draws[i];
    const std::span<const float> row(logits + draw.logits * vocabulary,
                                     static_cast<size_t>(vocabulary));
    const Request& request = draw.request->request;
    drawn[i].failure.clear();
    try {
      drawn[i].token = sampler.sample(row, request.sampling, draw.sample->rng);
      if (request.top_logprobs > 0) most_likely(row, request.top_logprobs, drawn[i].top);
    } catch (const Error& error) {
      drawn[i].failure = error.what();
    }
  });
}

void HostDraws::find_most_likely(std::span<const Draw> draws, const float* logits,
                                 int64_t vocabulary, std::span<Drawn> drawn) {
  LEEWAY_CHECK(drawn.size() == draws.size(), "each draw must have its place");
  for_each(draws, vocabulary, [&](int64_t i, TokenSampler&) {
    const std::span<const float> row(logits + draws[i].logits * vocabulary,
                                     static_cast<size_t>(vocabulary));
    most_likely(row, draws[i].request->request.top_logprobs, drawn[i].top);
  });
}

}  // namespace leeway
