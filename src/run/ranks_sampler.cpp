#include "run/ranks_sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "leeway/error.h"
#include "run/sampling_messages.h"

namespace leeway {
namespace {

std::string weights_message(SamplingOrder order, const PolicySnapshot& weights,
                            const RanksSamplerOptions& options) {
  const bool known = options.known && options.known(weights.version());
  ByteWriter message;
  message.put(order);
  put_weights(message, weights.version(), known ? nullptr : &weights.host());
  return message.take();
}

}  // namespace

RanksSampler::RanksSampler(Ranks& ranks, const PolicySnapshot& weights, RanksSamplerOptions options)
    : options_(std::move(options)),
      link_(ranks, ranks.size() == 1 ? std::string()
                                     : weights_message(SamplingOrder::begin, weights, options_)),
      engine_(weights, options_.engine),
      ranks_(static_cast<size_t>(ranks.size())) {
  LEEWAY_CHECK(ranks.rank() == 0, "rank 0 leads");
}

int64_t RanksSampler::submit(Request request) {
  link_.check();
  engine_.check(request);
  const auto least = std::min_element(ranks_.begin(), ranks_.end(),
                                      [](const Rank& a, const Rank& b) { return a.load < b.load; });
  const int rank = static_cast<int>(least - ranks_.begin());
  const int64_t number = next_++;
  open_.emplace(number, Open{rank, request.samples});
  least->load += request.samples;
  ++least->requests;
  if (rank == 0) {
    engine_.submit(number, std::move(request));
  } else {
    ByteWriter& orders = link_.orders(rank);
    orders.put(SamplingOrder::request);
    put_request(orders, number, request);
  }
  return number;
}

void RanksSampler::cancel(int64_t request) {
  const auto found = open_.find(request);
  if (found == open_.end()) return;
  const Open open = found->second;
  open_.erase(found);
  ranks_[static_cast<size_t>(open.rank)].load -= open.samples;
  if (open.rank == 0) return engine_.cancel(request);
  ByteWriter& orders = link_.orders(open.rank);
  orders.put(SamplingOrder::cancel);
  orders.put(request);
}

// Drops those of cancelled requests.
void RanksSampler::keep(int rank, std::vector<SampledSequence> results,
                        std::vector<SampledSequence>& kept) {
  Rank& from = ranks_[static_cast<size_t>(rank)];
  for (SampledSequence& result : results) {
    const auto found = open_.find(result.request);
    if (found == open_.end()) continue;
    --from.load;
    from.sampled_tokens += static_cast<int64_t>(result.ids.size());
    if (--found->second.samples == 0) open_.erase(found);
    kept.push_back(std::move(result));
  }
}

std::vector<SampledSequence> RanksSampler::poll(double seconds) {
  using Time = std::chrono::steady_clock;
  const auto end = Time::now() + std::chrono::duration_cast<Time::duration>(
                                     std::chrono::duration<double>(seconds));
  link_.flush();
  std::vector<SampledSequence> results;
  while (true) {
    const bool working = !engine_.idle();
    if (working) keep(0, engine_.step(), results);
    const size_t own = results.size();
    const bool waits = !working && own == 0 && !open_.empty();
    for (SamplingLink::Results& report : link_.take(waits ? end : Time::time_point())) {
      keep(report.rank, std::move(report.sequences), results);
    }
    const bool ended = engine_.idle() && (open_.empty() || !results.empty());
    if (ended || results.size() > own || Time::now() >= end) return results;
  }
}

void RanksSampler::update_weights(std::shared_ptr<const PolicySnapshot> weights,
                                  PolicyVersion version) {
  LEEWAY_CHECK(weights != nullptr && weights->version() == version, "weights of this version");
  link_.check();
  engine_.update_weights(weights);
  if (ranks_.size() > 1) {
    link_.send_all(weights_message(SamplingOrder::weights, *weights, options_));
  }
}

Metrics RanksSampler::take_metrics() {
  Metrics metrics = engine_.take_metrics();
  int64_t all = 0, most = 0;
  for (const Rank& rank : ranks_) {
    all += rank.sampled_tokens;
    most = std::max(most, rank.sampled_tokens);
  }
  for (size_t r = 0; r < ranks_.size(); ++r) {
    const auto add = [&](const char* name, int64_t& count) {
      metrics.emplace_back(fmt::format("ranks/{}/{}", name, r),
                           static_cast<double>(std::exchange(count, 0)));
    };
    add("requests", ranks_[r].requests);
    add("sampled_tokens", ranks_[r].sampled_tokens);
  }
  const double mean = static_cast<double>(all) / static_cast<double>(ranks_.size());
  metrics.emplace_back("ranks/sampling_imbalance",
                       all == 0 ? 1.0 : static_cast<double>(most) / mean);
  return metrics;
}

void end_sampling(Ranks& ranks) {
  for (int rank = 1; rank < ranks.size(); ++rank) {
    ranks.send(rank, Channel::sampling, message_of(SamplingOrder::leave));
  }
}

}  // namespace leeway
