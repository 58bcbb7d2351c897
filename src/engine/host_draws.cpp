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

void HostDraws::draw(std::span<const Draw> draws, const float* logits, int64_t vocabulary,
                     std::span<Drawn> drawn) {
  LEEWAY_CHECK(drawn.size() == draws.size(), "each draw must have its place");
  const int64_t count = static_cast<int64_t>(draws.size());
  const auto draw_one = [&](int64_t i, TokenSampler& sampler) {
    const Draw& draw = draws[i];
    const std::span<const float> row(logits + draw.logits * vocabulary,
                                     static_cast<size_t>(vocabulary));
    drawn[i].failure.clear();
    try {
      drawn[i].token = sampler.sample(row, draw.request->request.sampling, draw.sample->rng);
    } catch (const Error& error) {
      drawn[i].failure = error.what();
    }
  };
  if (count <= 1 || count * vocabulary < kLogitsWorthATeam) {
    for (int64_t i = 0; i < count; ++i) draw_one(i, samplers_[0]);
    return;
  }
  const auto share = [&](Team& team) {
    team.for_each(count, [&](int64_t i, int thread) { draw_one(i, samplers_[thread]); });
  };
  pool_.run_team(std::cref(share));
}

}  // namespace leeway
