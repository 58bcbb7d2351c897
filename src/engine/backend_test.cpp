// The engine with a backend other than the CPU's: what it asks of it, and when.

#include "engine/backend.h"

#include <gtest/gtest.h>

#include "engine/cpu_backend.h"
#include "engine/test_support.h"

namespace leeway {
namespace {

using namespace testing;

struct Calls {
  int64_t made = 0, loads = 0, passes = 0, copies = 0, most_blocks = 0;
};

// The CPU backend with everything counted, and at most `blocks` blocks.
class CountingBackend final : public SamplingBackend {
 public:
  CountingBackend(std::unique_ptr<SamplingBackend> inner, int64_t blocks, Calls& calls)
      : inner_(std::move(inner)), blocks_(blocks), calls_(calls) {}

  int64_t blocks() const override { return std::min(blocks_, inner_->blocks()); }
  int64_t block_bytes() const override { return 3 * inner_->block_bytes(); }
  void load(const PolicySnapshot& weights) override {
    ++calls_.loads;
    inner_->load(weights);
  }
  void run(const StepRows& pass, std::vector<Drawn>& drawn) override {
    ++calls_.passes;
    inner_->run(pass, drawn);
  }
  void copy_blocks(std::span<const BlockCopy> copies) override {
    calls_.copies += static_cast<int64_t>(copies.size());
    inner_->copy_blocks(copies);
  }

 private:
  std::unique_ptr<SamplingBackend> inner_;
  int64_t blocks_;
  Calls& calls_;
};

EngineOptions counting(int64_t blocks, Calls& calls) {
  EngineOptions options = options_of(64);
  options.backend = [blocks, &calls](const ModelConfig& config, const EngineOptions& given,
                                     int64_t most_blocks) {
    ++calls.made;
    calls.most_blocks = most_blocks;
    return std::make_unique<CountingBackend>(make_cpu_backend(config, given, most_blocks), blocks,
                                             calls);
  };
  return options;
}

TEST(Backend, RunsEveryPassAndCopiesWhatSamplesShare) {
  const Parameters weights = tiny_weights(Family::qwen3, 2);
  Calls calls;
  const EngineOptions options = counting(100, calls);
  const std::vector<Request> requests{make_request(17, 5, 3, 1), make_request(16, 5, 3, 2)};
  const Results results = run_all(weights, options, requests);
  for (const auto& [key, result] : run_all(weights, options_of(64), requests)) {
    expect_same(results.at(key), result);
  }
  EXPECT_EQ(calls.made, 1);
  EXPECT_EQ(calls.loads, 1);
  EXPECT_EQ(calls.passes, 5);
  EXPECT_EQ(calls.copies, 2) << "of the prompt that ends within a block";
  EXPECT_EQ(calls.most_blocks, options.max_sequences * kPositions / kBlockKeys);
}

TEST(Backend, DecidesHowManyBlocksThereAre) {
  const Parameters weights = tiny_weights(Family::qwen3, 2);
  Calls calls;
  Engine engine(weights, 0, counting(4, calls));
  EXPECT_EQ(engine.blocks(), 4);
  EXPECT_NE(refusal([&] { engine.submit(make_request(70, 5, 1, 1)); }), "accepted");
  engine.submit(make_request(40, 5, 1, 1));
  EXPECT_EQ(run_to_the_end(engine).size(), 1u);
}

TEST(Backend, LoadsNewWeightsBetweenPasses) {
  const Parameters weights = tiny_weights(Family::qwen3, 2);
  Calls calls;
  Engine engine(weights, 0, counting(100, calls));
  engine.submit(make_request(4, 6, 1, 1));
  engine.step();
  engine.update_weights(std::make_shared<const PolicySnapshot>(weights, 1));
  EXPECT_EQ(calls.loads, 1);
  engine.step();
  EXPECT_EQ(calls.loads, 2);
  EXPECT_EQ(run_to_the_end(engine).at({0, 0}).versions,
            (std::vector<PolicyVersion>{0, 1, 1, 1, 1, 1}));
}

}  // namespace
}  // namespace leeway
