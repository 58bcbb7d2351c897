#include <fmt/format.h>

#include <cmath>
#include <numeric>

#include "base/rng.h"
#include "leeway/error.h"
#include "orchestrator/environment.h"
#include "orchestrator/split.h"

namespace leeway {
namespace {

// Separates the random streams of member choice and epoch order.
enum Purpose : uint64_t { choice_of_member = 1, order_of_epoch = 2 };

constexpr double kMostWeights = 1e15;  // together

size_t member_of(const std::vector<EnvironmentMix::Member>& members, uint64_t seed, uint64_t n) {
  double total = 0.0;
  for (const auto& member : members) total += member.weight;
  double left = total * Rng(mixed_seed({seed, choice_of_member, n})).uniform();
  for (size_t i = 0; i + 1 < members.size(); ++i) {
    left -= members[i].weight;
    if (left < 0.0) return i;
  }
  return members.size() - 1;
}

std::vector<uint64_t> shuffled(uint64_t size, uint64_t seed) {
  std::vector<uint64_t> order(size);
  std::iota(order.begin(), order.end(), uint64_t{0});
  Rng rng(seed);
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[rng.below(i)]);
  return order;
}

}  // namespace

EnvironmentMix::EnvironmentMix(std::vector<Member> members, uint64_t seed)
    : members_(std::move(members)), seed_(seed) {
  if (members_.empty()) throw Error("there is no environment: add a table [[environment]]");
  double total = 0.0;
  for (const Member& member : members_) {
    if (!(member.weight > 0.0)) {
      throw Error(fmt::format("environment {}: weight = {}: it must be positive", member.id,
                              member.weight));
    }
    if (member.environment->size(Split::train) == uint64_t{0}) {
      throw Error(fmt::format("environment {} has no examples to train on", member.id));
    }
    total += member.weight;
  }
  // Shares are products of the weights with counts.
  if (!(total <= kMostWeights)) {
    throw Error(fmt::format(
        "the weights of the environments add up to {}: give smaller ones, such as 1 and 2", total));
  }
  taken_.resize(members_.size());
  orders_.resize(members_.size());
}

EnvironmentMix::Draw EnvironmentMix::draw(uint64_t n) {
  if (n < next_) {
    next_ = 0;
    taken_.assign(members_.size(), 0);
  }
  for (; next_ < n; ++next_) ++taken_[member_of(members_, seed_, next_)];

  Draw draw;
  draw.member = member_of(members_, seed_, n);
  const uint64_t before = taken_[draw.member]++;
  ++next_;
  const auto size = members_[draw.member].environment->size(Split::train);
  if (!size) {
    draw.example = before;
    return draw;
  }
  draw.epoch = before / *size;
  auto& [epoch, order] = orders_[draw.member];
  if (order.empty() || epoch != draw.epoch) {
    epoch = draw.epoch;
    order = shuffled(*size, mixed_seed({seed_, order_of_epoch, draw.member, epoch}));
  }
  draw.example = order[before % *size];
  return draw;
}

}  // namespace leeway
