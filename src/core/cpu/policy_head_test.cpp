// The policy head against every logit in memory, in double: presets, shapes, rows, chunks, threads.
//
// Tolerances are of the largest value: logits of a few dozen float32 products are good to about
// 1e-6, and so is what is made of them; 2e-5 leaves room for ratios above one.

#include "core/cpu/policy_head.h"

#include "core/cpu/policy_head_test_support.h"
#include "leeway/error.h"
#include "leeway/evaluator.h"

namespace leeway {
namespace {

using testing::batch_for;
using testing::Head;
using testing::HeadReference;
using testing::HeadRun;
using testing::NamedPreset;
using testing::reference_head;
using testing::run_head;

const Catalog& catalog() {
  static const Catalog the_catalog;
  return the_catalog;
}
LossSpec spec_of(const NamedPreset& preset) {
  return catalog().make_spec(preset.preset, preset.settings);
}
LossSpec spec_of(const std::string& preset) { return catalog().make_spec(preset, {}); }

const std::vector<int> kLengths = {9, 1, 17, 4, 1, 12};
constexpr int64_t kTokens = 44;

// ---------------------------------------------------------------------------------------------
// Against the reference

TEST(PolicyHead, AgreesWithTheReferenceForEveryNativePresetWhateverRowsAndChunks) {
  ThreadPool pool(2);
  uint64_t seed = 0;
  for (const NamedPreset& preset : testing::native_list(catalog())) {
    ++seed;
    Head head(seed, kTokens, 5 + static_cast<int64_t>(seed % 4),
              11 + static_cast<int64_t>(seed % 16));
    if (seed % 3 == 1) head.temperature_per_token(seed);
    if (seed % 3 == 2) head.temperature = {0.8f};
    const Batch batch = batch_for(head, seed, kLengths);
    const LossSpec spec = spec_of(preset);
    for (const bool listed : {false, true}) {
      if (listed) head.list_rows(batch.mask);
      const HeadReference expected = reference_head(head, spec, batch);
      for (int64_t rows : {1, 7, 100}) {
        head.rows_in_a_chunk(rows);
        expect_agrees(run_head(pool, head, spec, batch), expected,
                      preset.label() + (listed ? " listed, " : " all, ") + std::to_string(rows));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(PolicyHead, AgreesWithTheReferenceForEveryForeignPreset) {
  ThreadPool pool(2);
  uint64_t seed = 100;
  int once = 0;
  for (const NamedPreset& preset : testing::foreign_list(catalog())) {
    Head head(++seed, kTokens, 6, 19);
    const Batch batch = batch_for(head, seed, kLengths, true);
    const LossSpec spec = spec_of(preset);
    const HeadReference expected = reference_head(head, spec, batch);
    once += one_pass(spec);
    for (int64_t rows : {5, 100}) {
      head.rows_in_a_chunk(rows);
      expect_agrees(run_head(pool, head, spec, batch), expected,
                    preset.label() + " " + std::to_string(rows));
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GT(once, 10);
}

TEST(PolicyHead, AgreesAtVocabulariesOfEveryRemainder) {
  ThreadPool pool(2);
  for (int64_t vocabulary = 1; vocabulary <= 70; ++vocabulary) {
    Head head(static_cast<uint64_t>(vocabulary), kTokens, 1 + vocabulary % 7, vocabulary);
    head.temperature_per_token(3);
    const Batch batch = batch_for(head, 5, kLengths);
    head.list_rows(batch.mask);
    for (const char* preset : {"icepop", "dppo_kl", "gspo"}) {
      const LossSpec spec = spec_of(preset);
      const HeadReference expected = reference_head(head, spec, batch);
      for (int64_t rows : {4, 100}) {
        head.rows_in_a_chunk(rows);
        const HeadRun run = run_head(pool, head, spec, batch);
        const std::string where = std::string(preset) + " V=" + std::to_string(vocabulary);
        if (vocabulary > 1) {
          expect_agrees(run, expected, where);
        } else {  // one token is certain: nothing moves it
          for (float value : run.logprobs) EXPECT_NEAR(value, 0.0f, 1e-6f);
          for (float value : run.d_hidden) EXPECT_NEAR(value, 0.0f, 1e-6f);
        }
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(PolicyHead, AgreesAtSizesBeyondEveryBlockOfTheProducts) {
  ThreadPool pool(2);
  Head head(3, kTokens, 300, 2500);
  const Batch batch = batch_for(head, 5, kLengths);
  const LossSpec spec = spec_of("icepop");
  const HeadReference expected = reference_head(head, spec, batch);
  for (int64_t rows : {13, 100}) {
    head.rows_in_a_chunk(rows);
    expect_agrees(run_head(pool, head, spec, batch), expected, std::to_string(rows));
  }
}

TEST(PolicyHead, AgreesOnBf16InputsWithTheReferenceOnTheRoundedValues) {
  ThreadPool pool(2);
  for (const char* preset : {"icepop", "ppo+tis", "gspo"}) {
    Head head(8, kTokens, 21, 50);
    head.round_to_bf16();
    const Batch batch = batch_for(head, 5, kLengths);
    const LossSpec spec = spec_of(preset);
    const HeadReference expected = reference_head(head, spec, batch);
    head.rows_in_a_chunk(10);
    expect_agrees(run_head(pool, head, spec, batch), expected, preset);
  }
}

TEST(PolicyHead, TakesOperandsWithAnyStrides) {
  ThreadPool pool(2);
  const Head head(8, kTokens, 7, 20);
  const Batch batch = batch_for(head, 5, kLengths);
  const LossSpec spec = spec_of("icepop");
  const HeadRun expected = run_head(pool, head, spec, batch);
  const size_t n = kTokens, H = 7, V = 20;
  std::vector<float> hidden(H * n), weight(2 * V * H);
  for (size_t i = 0; i < n; ++i) {
    for (size_t j = 0; j < H; ++j) hidden[j * n + i] = head.hidden[i * H + j];
  }
  for (size_t v = 0; v < V * H; ++v) weight[2 * v] = head.weight[v];
  HeadProblem problem = head.problem();
  problem.hidden = columns_of(hidden.data(), static_cast<int64_t>(n));
  problem.weight = {weight.data(), 2 * static_cast<int64_t>(H), 2, false};
  HeadRun run = expected;
  std::fill(run.d_weight.begin(), run.d_weight.end(), 0.0f);
  const FloatBatch floats(batch);
  policy_head(pool, problem, spec, floats.view(), {}, run.logprobs, run.entropy, run.d_hidden,
              run.d_weight);
  EXPECT_EQ(run.logprobs, expected.logprobs);
  EXPECT_EQ(run.d_hidden, expected.d_hidden);
  EXPECT_EQ(run.d_weight, expected.d_weight);
}

TEST(PolicyHead, ZeroNegativeAndMixedAdvantagesAgree) {
  ThreadPool pool(2);
  Head head(4, kTokens, 6, 30);
  head.rows_in_a_chunk(8);
  for (const char* preset : {"icepop", "ppo", "sapo", "cispo_mask", "dppo_kl"}) {
    for (const double advantage : {0.0, -1.5, 2.0}) {
      Batch batch = batch_for(head, 9, kLengths);
      for (size_t i = 0; i < batch.advantages.size(); ++i) {
        if (batch.mask[i]) batch.advantages[i] = advantage;
      }
      const LossSpec spec = spec_of(preset);
      expect_agrees(run_head(pool, head, spec, batch), reference_head(head, spec, batch),
                    std::string(preset) + " " + std::to_string(advantage));
    }
  }
}

TEST(PolicyHead, BatchWeightsAndAGivenDenominatorCount) {
  ThreadPool pool(2);
  Head head(4, kTokens, 6, 30);
  Batch batch = batch_for(head, 9, kLengths);
  Rng rng(2);
  for (size_t i = 0; i < batch.pi.size(); ++i) {
    batch.weights.push_back(!batch.mask[i] ? std::nan("")
                            : i % 6 == 0   ? 0.0
                                           : static_cast<float>(rng.normal()));
  }
  for (const char* reduction : {"token_mean", "seq_mean_token_mean", "sum"}) {
    for (const char* preset : {"icepop", "dppo_kl", "grpo+tis", "gspo"}) {
      const LossSpec spec = spec_of(testing::with(preset, {{"reduction", std::string(reduction)}}));
      for (const std::optional<double> denominator : {std::optional<double>(), {123.0}, {0.0}}) {
        const HeadReference expected = reference_head(head, spec, batch, denominator);
        for (int64_t rows : {6, 100}) {
          head.rows_in_a_chunk(rows);
          expect_agrees(run_head(pool, head, spec, batch, denominator), expected, preset);
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------
// What does not depend on what

TEST(PolicyHead, HasTheSameBitsForEveryChunkSizeAndNumberOfThreads) {
  Head head(6, kTokens, 33, 131);
  head.temperature_per_token(4);
  const Batch batch = batch_for(head, 9, kLengths);
  for (const char* preset : {"icepop", "gspo"}) {
    const LossSpec spec = spec_of(preset);
    ThreadPool single(1);
    head.rows_in_a_chunk(kTokens);
    const HeadRun expected = run_head(single, head, spec, batch);
    for (const int threads : {1, 2, 5}) {
      ThreadPool pool(threads);
      for (const int64_t rows : {1, 2, 3, 8, 43, 44}) {
        head.rows_in_a_chunk(rows);
        const HeadRun run = run_head(pool, head, spec, batch);
        EXPECT_EQ(run.logprobs, expected.logprobs) << preset << " " << threads << " " << rows;
        EXPECT_EQ(run.entropy, expected.entropy) << preset << " " << threads << " " << rows;
        EXPECT_EQ(run.result.loss, expected.result.loss) << preset;
        EXPECT_EQ(run.result.metrics.flatten(), expected.result.metrics.flatten()) << preset;
      }
      // The gradient's rounding may depend on the way, never on the threads.
      head.rows_in_a_chunk(8);
      const HeadRun run = run_head(pool, head, spec, batch);
      const HeadRun alone = run_head(single, head, spec, batch);
      EXPECT_EQ(run.d_hidden, alone.d_hidden) << preset << " " << threads;
      EXPECT_EQ(run.d_weight, alone.d_weight) << preset << " " << threads;
    }
  }
}

TEST(PolicyHead, ARowHasTheSameBitsAloneAndAmongOthers) {
  const Head head(6, kTokens, 33, 131);
  ThreadPool pool(2);
  std::vector<float> logprobs(kTokens), entropy(kTokens);
  head_logprobs(pool, head.problem(), logprobs, entropy);
  for (int64_t row = 0; row < kTokens; row += 5) {
    Head alone = head;
    alone.all_rows = false;
    alone.rows = {row};
    std::vector<float> one(kTokens, -77.0f), one_entropy(kTokens, -77.0f);
    head_logprobs(pool, alone.problem(), one, one_entropy);
    for (int64_t i = 0; i < kTokens; ++i) {
      const size_t k = static_cast<size_t>(i);
      EXPECT_EQ(one[k], i == row ? logprobs[k] : 0.0f);
      EXPECT_EQ(one_entropy[k], i == row ? entropy[k] : 0.0f);
    }
  }
}

TEST(PolicyHead, LossAndMetricsAreExactlyThoseOfTheEvaluator) {
  Head head(6, kTokens, 9, 40);
  head.rows_in_a_chunk(6);
  const Batch batch = batch_for(head, 9, kLengths);
  ThreadPool pool(2);
  for (const NamedPreset& preset : testing::native_list(catalog())) {
    const LossSpec spec = spec_of(preset);
    const HeadRun run = run_head(pool, head, spec, batch, 31.0);
    FloatBatch floats(batch);
    floats.pi = run.logprobs;
    std::vector<float> g(kTokens);
    MetricSums metrics;
    Evaluator evaluator(2);
    EXPECT_EQ(run.result.loss, evaluator.evaluate(spec, floats.view(), g, 31.0, &metrics));
    EXPECT_EQ(run.result.metrics.flatten(), metrics.flatten()) << preset.label();
  }
}

TEST(PolicyHead, MicroBatchesWithTheGlobalDenominatorAddUpToTheBatch) {
  ThreadPool pool(2);
  for (const NamedPreset& preset : testing::native_list(catalog())) {
    const LossSpec spec = spec_of(preset);
    if (spec.m2_threshold) continue;  // it is the batch that decides
    Head head(6, kTokens, 9, 40);
    head.rows_in_a_chunk(6);
    const Batch batch = batch_for(head, 9, kLengths);
    const double denominator = denominator_of(spec, batch.view());
    const HeadReference whole = reference_head(head, spec, batch);
    std::vector<float> d_hidden, d_weight(head.weight.size(), 0.0f);
    double loss = 0.0;
    MetricSums metrics;
    for (const auto& [first, last] : {std::pair{0, 2}, {2, 3}, {3, 6}}) {
      const int64_t begin = batch.offsets[static_cast<size_t>(first)];
      const int64_t end = batch.offsets[static_cast<size_t>(last)];
      Head part(0, 0, 9, 40);
      part.tokens = end - begin;
      part.hidden.assign(head.hidden.begin() + begin * 9, head.hidden.begin() + end * 9);
      part.weight = head.weight;
      part.targets.assign(head.targets.begin() + begin, head.targets.begin() + end);
      part.chunk_bytes = head.chunk_bytes;
      const HeadRun run = run_head(pool, part, spec, slice(batch, first, last), denominator);
      loss += run.result.loss;
      metrics.merge(run.result.metrics);
      d_hidden.insert(d_hidden.end(), run.d_hidden.begin(), run.d_hidden.end());
      for (size_t i = 0; i < d_weight.size(); ++i) d_weight[i] += run.d_weight[i];
    }
    EXPECT_NEAR(loss, whole.loss.loss, 2e-5 * (1 + std::abs(whole.loss.loss))) << preset.label();
    testing::expect_near(d_hidden, whole.gradients.hidden, 2e-5, preset.label());
    testing::expect_near(d_weight, whole.gradients.weight, 2e-5, preset.label());
    EXPECT_EQ(metrics[Slot::kept], whole.metrics[Slot::kept]) << preset.label();
  }
}

// ---------------------------------------------------------------------------------------------
// What is inert, and what is left out

TEST(PolicyHead, WhatRowsThatAreNotListedHoldIsInert) {
  ThreadPool pool(2);
  for (const char* preset : {"icepop", "gspo", "m2po"}) {
    for (const int64_t rows : {3, 100}) {
      Head head(6, kTokens, 9, 40);
      head.temperature_per_token(1);
      const Batch batch = batch_for(head, 9, kLengths);
      head.list_rows(batch.mask);
      head.rows_in_a_chunk(rows);
      const LossSpec spec = spec_of(preset);
      const HeadRun expected = run_head(pool, head, spec, batch);
      for (int64_t i = 0; i < kTokens; ++i) {
        if (std::find(head.rows.begin(), head.rows.end(), i) != head.rows.end()) continue;
        const size_t k = static_cast<size_t>(i);
        std::fill_n(head.hidden.begin() + i * 9, 9, i % 2 ? std::nanf("") : INFINITY);
        head.targets[k] = i % 2 ? -5 : 1 << 30;
        head.temperature[k] = i % 2 ? 0.0f : std::nanf("");
      }
      const HeadRun run = run_head(pool, head, spec, batch);
      EXPECT_EQ(run.logprobs, expected.logprobs);
      EXPECT_EQ(run.entropy, expected.entropy);
      EXPECT_EQ(run.d_hidden, expected.d_hidden);
      EXPECT_EQ(run.d_weight, expected.d_weight);
      EXPECT_EQ(run.result.loss, expected.result.loss);
    }
  }
}

TEST(PolicyHead, NanInAMaskedRowReachesNoGradient) {
  ThreadPool pool(2);
  for (const char* preset : {"icepop", "gspo", "m2po"}) {
    for (const int64_t rows : {5, 100}) {
      Head head(6, kTokens, 9, 40);
      head.rows_in_a_chunk(rows);
      const Batch batch = batch_for(head, 9, kLengths);
      const LossSpec spec = spec_of(preset);
      const HeadRun expected = run_head(pool, head, spec, batch);
      for (int64_t i = 0; i < kTokens; ++i) {
        if (batch.mask[static_cast<size_t>(i)]) continue;
        head.hidden[static_cast<size_t>(i * 9 + i % 9)] = i % 2 ? std::nanf("") : INFINITY;
      }
      const HeadRun run = run_head(pool, head, spec, batch);
      EXPECT_EQ(run.d_hidden, expected.d_hidden);
      EXPECT_EQ(run.d_weight, expected.d_weight);
      EXPECT_EQ(run.result.loss, expected.result.loss);
    }
  }
}

// A dropped token is worth as much as a masked one, bit for bit, but for the denominator.
TEST(PolicyHead, RowsWithoutGradientGiveExactlyZero) {
  ThreadPool pool(2);
  Head head(6, kTokens, 9, 40);
  Batch batch = batch_for(head, 9, kLengths);
  const LossSpec spec =
      spec_of(testing::with("icepop", {{"icepop_ratio_low", 0.8}, {"icepop_ratio_high", 1.25}}));
  const HeadReference reference = reference_head(head, spec, batch);
  Batch masked = batch;
  int64_t dropped = 0;
  for (size_t i = 0; i < masked.mask.size(); ++i) {
    dropped += masked.mask[i] && reference.loss.grad[i] == 0.0;
    masked.mask[i] = reference.loss.grad[i] != 0.0;
  }
  ASSERT_GT(dropped, 5);
  for (const int64_t rows : {4, 100}) {
    head.rows_in_a_chunk(rows);
    const HeadRun run = run_head(pool, head, spec, batch, 31.0);
    const HeadRun without = run_head(pool, head, spec, masked, 31.0);
    EXPECT_EQ(run.d_hidden, without.d_hidden);
    EXPECT_EQ(run.d_weight, without.d_weight);
    for (size_t i = 0; i < masked.mask.size(); ++i) {
      for (size_t j = 0; j < 9 && !masked.mask[i]; ++j) EXPECT_EQ(run.d_hidden[i * 9 + j], 0.0f);
    }
  }
}

TEST(PolicyHead, ABatchWithoutATrainedTokenHasNeitherLossNorGradient) {
  ThreadPool pool(2);
  Head head(6, kTokens, 9, 40);
  Batch batch = batch_for(head, 9, kLengths);
  batch.mask.assign(kTokens, 0);
  for (const bool no_rows : {false, true}) {
    if (no_rows) head.all_rows = false, head.rows.clear();
    for (const char* preset : {"icepop", "gspo"}) {
      for (const int64_t rows : {4, 100}) {
        head.rows_in_a_chunk(rows);
        const HeadRun run = run_head(pool, head, spec_of(preset), batch);
        EXPECT_EQ(run.result.loss, 0.0);
        EXPECT_EQ(run.d_hidden, std::vector<float>(head.hidden.size(), 0.0f));
        EXPECT_EQ(run.d_weight, std::vector<float>(head.weight.size(), 0.0f));
        EXPECT_EQ(run.logprobs[0] == 0.0f, no_rows);
      }
    }
  }
}

TEST(PolicyHead, GivesWhatIsWantedAlone) {
  ThreadPool pool(2);
  Head head(6, kTokens, 9, 40);
  const Batch batch = batch_for(head, 9, kLengths);
  const FloatBatch floats(batch);
  for (const char* preset : {"icepop", "gspo"}) {
    const LossSpec spec = spec_of(preset);
    for (const int64_t rows : {4, 100}) {
      head.rows_in_a_chunk(rows);
      const HeadRun both = run_head(pool, head, spec, batch);
      for (const bool hidden : {false, true}) {
        for (const bool weight : {false, true}) {
          HeadRun run;
          run.logprobs.resize(kTokens);
          run.d_hidden.assign(hidden ? head.hidden.size() : 0, 5.0f);
          run.d_weight.assign(weight ? head.weight.size() : 0, 0.0f);
          run.result = policy_head(pool, head.problem(), spec, floats.view(), {}, run.logprobs, {},
                                   run.d_hidden, run.d_weight);
          EXPECT_EQ(run.result.loss, both.result.loss);
          EXPECT_EQ(run.logprobs, both.logprobs);
          if (hidden) {
            EXPECT_EQ(run.d_hidden, both.d_hidden);
          }
          if (weight) {
            EXPECT_EQ(run.d_weight, both.d_weight);
          }
        }
      }
    }
  }
}

TEST(PolicyHead, AddsToTheWeightsGradient) {
  ThreadPool pool(2);
  Head head(6, kTokens, 9, 40);
  head.rows_in_a_chunk(7);
  const Batch batch = batch_for(head, 9, kLengths);
  const FloatBatch floats(batch);
  const LossSpec spec = spec_of("icepop");
  const HeadReference expected = reference_head(head, spec, batch);
  HeadRun run = run_head(pool, head, spec, batch);
  policy_head(pool, head.problem(), spec, floats.view(), {}, run.logprobs, run.entropy,
              run.d_hidden, run.d_weight);
  std::vector<double> twice = expected.gradients.weight;
  for (double& value : twice) value *= 2.0;
  testing::expect_near(run.d_weight, twice, 2e-5, "d_weight");
  testing::expect_near(run.d_hidden, expected.gradients.hidden, 2e-5, "d_hidden");
}

// ---------------------------------------------------------------------------------------------
// Which specs go once

TEST(OnePass, IsForSpecsWhoseTokensHaveNothingToDoWithEachOther) {
  for (const char* preset :
       {"icepop", "ipo_kl", "dppo_tv", "dppo_kl", "reinforce", "is", "ppo", "grpo", "dapo", "cispo",
        "cispo_mask", "dro", "sapo", "kpop", "ppo+tis", "grpo+tis+off_policy_is",
        "icepop+icepop_tis", "off_policy_is"}) {
    EXPECT_TRUE(one_pass(spec_of(preset))) << preset;
  }
  for (const char* reduction : {"seq_mean_token_mean", "seq_mean_token_sum", "sum"}) {
    EXPECT_TRUE(
        one_pass(spec_of(testing::with("icepop", {{"reduction", std::string(reduction)}}))));
  }
  EXPECT_TRUE(one_pass(spec_of(testing::with("icepop", {{"teacher_tau", 0.5}}))));
}

TEST(OnePass, IsNotForSequencesBatchesHooksAndForeignHabits) {
  for (const char* preset : {"gspo", "geo_mask", "seq_mis", "m2po", "cookbook/gspo", "tinker/dro",
                             "verl/kl_cov", "liger/luspo", "verl/geo_mean", "slime/ppo+mis"}) {
    EXPECT_FALSE(one_pass(spec_of(preset))) << preset;
  }
  EXPECT_FALSE(one_pass(spec_of(testing::with("icepop", {{"icepop_rollout_min_ratio", 0.1}}))));
  EXPECT_FALSE(
      one_pass(spec_of(testing::with("ppo+tis", {{"tis_level", std::string("sequence")}}))));
  EXPECT_FALSE(one_pass(spec_of(testing::with("icepop", {{"denominator", std::string("kept")}}))));
  EXPECT_FALSE(
      one_pass(spec_of(testing::with("ppo+icepop_tis", {{"denominator", std::string("kept")}}))));
  EXPECT_FALSE(one_pass(spec_of(testing::with("verl/vanilla+IS", {{"batch_norm", true}}))));

  LossSpec hooked = spec_of("icepop");
  hooked.corrections.push_back(make_correction("half", "0.5", {}, [](const auto&, auto effect) {
    for (auto& weight : effect.weights) weight *= 0.5f;
  }));
  EXPECT_FALSE(one_pass(hooked));

  LossSpec everywhere = spec_of("icepop");
  everywhere.positions = Positions::all;
  EXPECT_FALSE(one_pass(everywhere));
  LossSpec statistic = spec_of("icepop");
  statistic.shaping.sequence_mean = true;
  EXPECT_FALSE(one_pass(statistic));
}

TEST(PolicyHead, ACorrectionThatIsAFunctionSeesWholeSequences) {
  ThreadPool pool(2);
  Head head(6, kTokens, 9, 40);
  head.rows_in_a_chunk(5);
  const Batch batch = batch_for(head, 9, kLengths);
  LossSpec spec = spec_of("icepop");
  spec.corrections.push_back(
      make_correction("by_length", "1 / length", {}, [](const auto& sequence, auto effect) {
        using T = std::remove_cvref_t<decltype(effect.weights[0])>;
        for (auto& weight : effect.weights) weight = T(1) / static_cast<T>(sequence.pi.size());
      }));
  expect_agrees(run_head(pool, head, spec, batch), reference_head(head, spec, batch), "hook");
}

}  // namespace
}  // namespace leeway
