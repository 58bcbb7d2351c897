// What samples for a run with several ranks: evaluations have the numbers of one engine.
#include "run/run_sampler.h"

#include <gtest/gtest.h>

#include <thread>

#include "orchestrator/steady_clock.h"
#include "ranks/local_ranks.h"
#include "run/folder_hold.h"
#include "run/run_ranks.h"
#include "run/test_support.h"

namespace leeway {
namespace {

class RanksEvaluation : public ::testing::Test {
 protected:
  RunSetup setup(const std::string& precision) {
    return RunSetup(tiny_config(catalog_, folder_ / "run",
                                {"eval.prompts=16", "eval.samples=4", "eval.greedy=true",
                                 "rollout.precision=" + precision}));
  }
  std::shared_ptr<const PolicySnapshot> weights(const RunSetup& of, uint64_t seed,
                                                PolicyVersion version) {
    Parameters made = of.weights;
    initialise(made, seed);
    return std::make_shared<const PolicySnapshot>(std::move(made), version);
  }
  // Rank 0 does `work` with a sampler of weights(run, 1, 0) while the others serve it.
  template <class Work>
  void with_sampler(RunSetup& run, int size, const Work& work) {
    auto ranks = make_local_ranks(size);
    std::vector<std::thread> others;
    for (int r = 1; r < size; ++r) {
      others.emplace_back([&, r] { serve_run(*ranks[static_cast<size_t>(r)], size, catalog_); });
    }
    {
      RunRanks group(*ranks[0], size);
      group.begin(run, catalog_);
      run.ranks = &group;
      RunFiles files(claim_folder(folder_ / ("run" + std::to_string(size))));
      RunSampler sampler(
          run, weights(run, 1, 0), 1, files, progress_, [] { return false; }, clock_);
      work(sampler);
      run.ranks = nullptr;
    }
    for (std::thread& other : others) other.join();
  }
  // Without the time that it took.
  Metrics numbers(const EvaluationResult& result) {
    Metrics metrics = result.metrics;
    EXPECT_EQ(metrics.back().first, "time/eval");
    metrics.pop_back();
    return metrics;
  }

  const Catalog catalog_;
  const TestFolder folder_;
  SteadyClock clock_;
  RecordingProgress progress_;
};

TEST_F(RanksEvaluation, HasTheNumbersOfOneEngine) {
  RunSetup run = setup("auto");
  const EvalTable& table = run.config.run.eval;
  PolicyEvaluator alone(run);
  const auto first = weights(run, 1, 0), second = weights(run, 2, 4);
  const EvaluationResult before = alone.evaluate(first, table);
  const EvaluationResult after = alone.evaluate(second, table);
  EXPECT_NE(before.tokens, after.tokens);
  for (const int size : {1, 2, 4}) {
    with_sampler(run, size, [&](RunSampler& sampler) {
      PolicyEvaluator evaluator(run);
      ASSERT_NE(sampler.servers(), nullptr);
      evaluator.sample_with(sampler.servers());
      // What training has in flight goes on meanwhile and is not the evaluation's.
      Sampler& training = sampler.sampler();
      const int64_t request = training.submit({.prompt = {65}, .samples = 3, .max_new_tokens = 8});
      EXPECT_EQ(numbers(evaluator.evaluate(first, table)), numbers(before));
      EXPECT_EQ(numbers(evaluator.evaluate(second, table)), numbers(after));
      EXPECT_EQ(sampler.servers()->version(), 4);
      for (size_t left = 3; left > 0;) {
        for (const SampledSequence& result : training.poll(0.1)) {
          EXPECT_EQ(result.request, request);
          --left;
        }
      }
      const Metrics metrics = sampler.take_metrics();
      for (int rank = 0; rank < size; ++rank) {
        EXPECT_GT(metric_of(metrics, "ranks/sampled_tokens/" + std::to_string(rank)), 0.0);
      }
    });
  }
}

TEST_F(RanksEvaluation, HasAnEngineOfItsOwnWhereRolloutsAreOfAnotherPrecision) {
  RunSetup run = setup("int8");
  with_sampler(run, 2, [&](RunSampler& sampler) {
    EXPECT_EQ(sampler.servers(), nullptr);
    sampler.sampler().submit({.prompt = {65}, .max_new_tokens = 2});
    size_t results = 0;
    while (results == 0) results = sampler.sampler().poll(0.1).size();
  });
}

}  // namespace
}  // namespace leeway
