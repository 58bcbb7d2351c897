#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "orchestrator/environment.h"
#include "orchestrator/environment_test_support.h"

namespace leeway {
namespace {

using ::leeway::testing::expect_refused;

// Examples that are their numbers.
class Numbers : public Environment {
 public:
  explicit Numbers(std::optional<uint64_t> size) : size_(size) {}
  std::optional<uint64_t> size(Split) const override { return size_; }
  Example example(Split, uint64_t index) const override { return {.index = index}; }
  std::unique_ptr<Episode> start(const Example&, const EpisodePlace&) const override {
    return nullptr;
  }
  bool needs_renderer() const override { return false; }

 private:
  std::optional<uint64_t> size_;
};

struct Part {
  double weight = 1.0;
  std::optional<uint64_t> size;
};

EnvironmentMix mix(const std::vector<Part>& parts, uint64_t seed = 1) {
  std::vector<EnvironmentMix::Member> members;
  for (size_t i = 0; i < parts.size(); ++i) {
    members.push_back(
        {"part_" + std::to_string(i), parts[i].weight, std::make_unique<Numbers>(parts[i].size)});
  }
  return EnvironmentMix(std::move(members), seed);
}

std::string text_of(const EnvironmentMix::Draw& draw) {
  return fmt::format("{}:{}:{}", draw.member, draw.example, draw.epoch);
}

TEST(EnvironmentMix, DrawsByTheNumberAlone) {
  const std::vector<Part> parts{{1.0, 7}, {2.0, std::nullopt}, {0.5, 1}};
  EnvironmentMix forwards = mix(parts), jumping = mix(parts), other = mix(parts, 2);
  std::vector<std::string> draws;
  for (uint64_t n = 0; n < 300; ++n) draws.push_back(text_of(forwards.draw(n)));
  for (const uint64_t n : {250u, 3u, 3u, 4u, 299u, 0u, 1u, 120u, 119u}) {
    EXPECT_EQ(text_of(jumping.draw(n)), draws[n]) << n;
  }
  int same = 0;
  for (uint64_t n = 0; n < 300; ++n) same += text_of(other.draw(n)) == draws[n];
  EXPECT_LT(same, 100);
}

TEST(EnvironmentMix, KeepsToTheWeights) {
  EnvironmentMix three = mix({{1.0, {}}, {2.0, {}}, {5.0, {}}});
  std::vector<double> counts(3);
  constexpr int kDraws = 20'000;
  for (uint64_t n = 0; n < kDraws; ++n) ++counts[three.draw(n).member];
  const std::vector<double> shares{0.125, 0.25, 0.625};
  for (size_t i = 0; i < 3; ++i) {
    const double deviation = std::sqrt(kDraws * shares[i] * (1 - shares[i]));
    EXPECT_NEAR(counts[i], kDraws * shares[i], 5 * deviation);
  }
}

TEST(EnvironmentMix, VisitsEachExampleOncePerEpochInAnOrderOfItsOwn) {
  EnvironmentMix two = mix({{1.0, 20}, {1.0, 33}});
  std::vector<std::vector<std::vector<uint64_t>>> orders(2);
  for (uint64_t n = 0; n < 1000; ++n) {
    const auto draw = two.draw(n);
    auto& epochs = orders[draw.member];
    if (draw.epoch == epochs.size()) epochs.emplace_back();
    ASSERT_EQ(draw.epoch + 1, epochs.size());
    epochs.back().push_back(draw.example);
  }
  for (size_t member = 0; member < 2; ++member) {
    auto& epochs = orders[member];
    ASSERT_GT(epochs.size(), 10u);
    epochs.pop_back();
    std::set<std::vector<uint64_t>> different(epochs.begin(), epochs.end());
    EXPECT_EQ(different.size(), epochs.size());
    for (const auto& epoch : epochs) {
      const size_t size = member == 0 ? 20 : 33;
      EXPECT_EQ(epoch.size(), size);
      const std::set<uint64_t> seen(epoch.begin(), epoch.end());
      EXPECT_EQ(seen.size(), size);
      EXPECT_EQ(*seen.rbegin(), size - 1);
    }
  }
}

TEST(EnvironmentMix, GoesUpThroughWhatHasNoEnd) {
  EnvironmentMix one = mix({{3.0, std::nullopt}});
  for (uint64_t n = 0; n < 50; ++n) EXPECT_EQ(text_of(one.draw(n)), fmt::format("0:{}:0", n));
  EXPECT_EQ(one.members().front().id, "part_0");
}

TEST(EnvironmentMix, RefusesWhatCannotBeDrawnFrom) {
  expect_refused([] { mix({}); }, {"[[environment]]"});
  expect_refused([] { mix({{1.0, {}}, {0.0, {}}}); }, {"part_1", "weight = 0"});
  expect_refused([] { mix({{-2.0, {}}}); }, {"part_0", "weight = -2"});
  expect_refused([] { mix({{std::nan(""), {}}}); }, {"part_0", "weight = nan"});
  expect_refused([] { mix({{std::numeric_limits<double>::infinity(), {}}}); }, {"inf"});
  expect_refused([] { mix({{1e307, {}}, {1.0, {}}}); }, {"1e+307"});
  expect_refused([] { mix({{1.0, 0}}); }, {"part_0", "no examples"});
}

}  // namespace
}  // namespace leeway
