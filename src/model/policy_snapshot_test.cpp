// Snapshots of weights on the host and of weights on a device, which a test stands in for.

#include "model/policy_snapshot.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "leeway/error.h"
#include "model/test_files.h"

namespace leeway {
namespace {

using testing::same_bits;
using testing::small_config;
using testing::small_parameters;

// Host memory that passes for a device's, with the copies counted.
class CountedWeights final : public DeviceWeights {
 public:
  CountedWeights(Parameters weights, std::atomic<int>& copies)
      : weights_(std::move(weights)), copies_(copies) {}
  void copy_to(Parameters& host) const override {
    if (copies_++ < failures) throw Error("the device does not answer");
    std::copy(weights_.flat().begin(), weights_.flat().end(), host.flat().begin());
  }
  std::string not_finite_text() const override { return "asked on the device"; }
  uint32_t checksum() const override { return leeway::checksum(weights_); }
  int failures = 0;  // of the first copies

 private:
  Parameters weights_;
  std::atomic<int>& copies_;
};

TEST(PolicySnapshot, OfTheHostIsACopyThatStays) {
  Parameters weights = small_parameters(small_config(Family::qwen3));
  const Parameters before = weights;
  const PolicySnapshot snapshot(weights, 7);
  weights.of(0)[0] += 1.0f;
  EXPECT_EQ(snapshot.version(), 7);
  EXPECT_EQ(snapshot.device(), nullptr);
  EXPECT_TRUE(snapshot.has_host());
  EXPECT_TRUE(same_bits(snapshot.host(), before));
  EXPECT_EQ(snapshot.config().hidden_size, before.config().hidden_size);
  EXPECT_EQ(snapshot.checksum(), checksum(before));
  EXPECT_NE(snapshot.checksum(), checksum(weights));
  EXPECT_EQ(snapshot.not_finite_text(), "");
  weights.of(1)[2] = -INFINITY;
  EXPECT_EQ(PolicySnapshot(weights, 8).not_finite_text(), not_finite_text(weights));
}

TEST(PolicySnapshot, AViewCopiesNothing) {
  const Parameters weights = small_parameters(small_config(Family::llama));
  const PolicySnapshot view = PolicySnapshot::view_of(weights, 1);
  EXPECT_EQ(&view.host(), &weights);
  const auto shared = std::make_shared<const Parameters>(weights);
  EXPECT_EQ(&PolicySnapshot(shared, 1).host(), shared.get());
}

TEST(PolicySnapshot, OfADeviceComesToTheHostOnceAndWhenAsked) {
  const Parameters weights = small_parameters(small_config(Family::qwen3));
  std::atomic<int> copies = 0;
  const PolicySnapshot snapshot(weights.config(), std::make_unique<CountedWeights>(weights, copies),
                                3);
  EXPECT_NE(snapshot.device(), nullptr);
  EXPECT_EQ(snapshot.not_finite_text(), "asked on the device");
  EXPECT_EQ(snapshot.checksum(), checksum(weights));
  EXPECT_FALSE(snapshot.has_host());
  EXPECT_EQ(copies, 0);
  std::vector<std::thread> threads;
  std::vector<const Parameters*> seen(8);
  std::vector<uint32_t> sums(8);
  for (size_t i = 0; i < seen.size(); ++i) {
    threads.emplace_back([&, i] {
      sums[i] = snapshot.checksum();
      seen[i] = &snapshot.host();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(copies, 1);
  for (size_t i = 0; i < seen.size(); ++i) {
    EXPECT_EQ(seen[i], seen[0]);
    EXPECT_EQ(sums[i], checksum(weights));
  }
  EXPECT_TRUE(snapshot.has_host());
  EXPECT_TRUE(same_bits(*seen[0], weights));
}

TEST(PolicySnapshot, ACopyThatFailsIsTriedAgain) {
  const Parameters weights = small_parameters(small_config(Family::qwen2));
  std::atomic<int> copies = 0;
  auto device = std::make_unique<CountedWeights>(weights, copies);
  device->failures = 1;
  const PolicySnapshot snapshot(weights.config(), std::move(device), 3);
  EXPECT_THROW(snapshot.host(), Error);
  EXPECT_FALSE(snapshot.has_host());
  EXPECT_TRUE(same_bits(snapshot.host(), weights));
}

TEST(Checksum, IsOfValuesAndTheirOrder) {
  Parameters weights = small_parameters(small_config(Family::qwen3));
  const uint32_t before = checksum(weights);
  EXPECT_EQ(checksum(weights), before);
  std::swap(weights.of(0)[0], weights.of(0)[1]);
  EXPECT_NE(checksum(weights), before);
}

}  // namespace
}  // namespace leeway
