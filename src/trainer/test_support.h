// Shared by the tests of the trainer: made-up samples, gradients read back, and a slow reference
// for a batch's loss and gradient: one sequence at a time, the loss in double.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/rng.h"
#include "core/cpu/policy_head.h"
#include "core/test_support.h"
#include "leeway/presets.h"
#include "model/test_files.h"
#include "trainer/state_files.h"
#include "trainer/trainer.h"

namespace leeway::testing {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline Parameters make_policy(uint64_t seed = 1, bool tied = false) {
  Parameters parameters = small_parameters(small_config(Family::llama, tied), seed);
  roughen(parameters, seed + 1);
  return parameters;
}

inline LossSpec spec_of(const NamedPreset& named) {
  return Catalog().make_spec(named.preset, named.settings);
}
inline LossSpec spec_of(const std::string& preset) { return spec_of(with(preset)); }

inline TrainerTable small_table() {
  TrainerTable table;
  table.threads = 1;
  table.max_tokens = 40;
  table.optimizer.learning_rate = 5e-3;
  table.optimizer.warmup_steps = 0;
  return table;
}

// Steps leave the weights unchanged, and the first moment is the gradient, bit for bit.
inline TrainerTable gradient_table(int64_t max_tokens = 40) {
  TrainerTable table = small_table();
  table.max_tokens = max_tokens;
  table.optimizer.learning_rate = 0.0;
  table.optimizer.beta1 = 0.0;
  table.optimizer.max_grad_norm = 0.0;
  return table;
}

// The gradient that a trainer of `gradient_table` has accumulated; zero afterwards.
inline Parameters take_gradient(Trainer& trainer) {
  const TestFolder folder;
  EXPECT_EQ(trainer.optim_step().failure, "");
  trainer.save(folder.path());
  Parameters policy(trainer.parameters().config());
  AdamW optimizer(policy.config());
  load_state(folder.path(), policy, optimizer);
  return optimizer.first_moment();
}

// Every micro-batch of the samples, as a pass gathers them one after another.
inline std::vector<MicroBatch> make_micro_batches(std::span<const Sample> samples,
                                                  const PolicyStreams& streams, int64_t max_tokens,
                                                  bool every_row,
                                                  std::span<const size_t> only = {}) {
  PackedBatch packed = pack_samples(samples, every_row);
  packed.prox = pack_values(packed, streams.prox);
  packed.ref = pack_values(packed, streams.ref);
  packed.teacher = pack_values(packed, streams.teacher);
  std::vector<MicroBatch> batches;
  for (const std::vector<size_t>& part : plan_micro_batches(packed, max_tokens, only)) {
    gather(packed, part, batches.emplace_back());
  }
  return batches;
}

// Samples of prompts and completions: gaps in the masks, tokens after the last trained one, several
// samples per rollout, temperatures, advantages per sample or per token. Values of tokens that are
// not trained are NaN and every sixth sample has no trained token, unless `clean`.
inline std::vector<Sample> make_samples(uint64_t seed, size_t count, bool clean = false,
                                        int64_t vocabulary = 50) {
  Rng rng(seed);
  std::vector<Sample> samples(count);
  for (size_t i = 0; i < count; ++i) {
    Sample& sample = samples[i];
    const size_t prompt = 1 + rng.below(5), length = prompt + 2 + rng.below(9);
    const bool empty = !clean && i % 6 == 5;
    for (size_t t = 0; t < length; ++t) {
      sample.ids.push_back(static_cast<int32_t>(rng.below(static_cast<uint64_t>(vocabulary))));
      sample.loss_mask.push_back(!empty && (t == prompt || (t > prompt && rng.uniform() < 0.8)));
      sample.versions.push_back(static_cast<int32_t>(rng.below(3)));
    }
    sample.advantages.resize(i % 3 == 0 ? 1 : length);
    for (size_t t = 0; t < sample.advantages.size(); ++t) {
      const float value = i % 4 == 3 ? 0.0f : static_cast<float>(rng.normal());
      sample.advantages[t] =
          clean || sample.advantages.size() == 1 || sample.loss_mask[t] != 0 ? value : kNan;
    }
    sample.temperature = i % 3 == 1 ? 0.7f : 1.0f;
    sample.rollout_id = i % 2 == 0 ? static_cast<int32_t>(i / 4) : -1;
  }
  return samples;
}

// Logprobs spread by `spread` around `center`; NaN where a token is not trained, unless `clean`.
inline TokenValues around(const TokenValues& center, std::span<const Sample> samples, uint64_t seed,
                          double spread, bool clean = false) {
  Rng rng(seed);
  TokenValues values = center;
  for (size_t i = 0; i < values.size(); ++i) {
    for (size_t t = 0; t < values[i].size(); ++t) {
      values[i][t] += static_cast<float>(spread * rng.normal());
      if (!clean && samples[i].loss_mask[t] == 0) values[i][t] = kNan;
    }
  }
  return values;
}

// Gives the samples logprobs near the policy's, as if an older policy had sampled them.
inline void add_rollouts(const Parameters& policy, std::vector<Sample>& samples, uint64_t seed,
                         double spread = 0.3, bool clean = false) {
  Trainer scorer(policy, spec_of("reinforce"), small_table());
  const TokenValues values = around(scorer.forward(samples), samples, seed, spread, clean);
  for (size_t i = 0; i < samples.size(); ++i) samples[i].rollout = values[i];
}

inline std::vector<Sample> rolled_out(const Parameters& policy, uint64_t seed, size_t count,
                                      double spread = 0.3) {
  std::vector<Sample> samples = make_samples(seed, count);
  add_rollouts(policy, samples, seed + 100, spread);
  return samples;
}

inline std::vector<Sample> some(std::span<const Sample> samples, std::span<const size_t> numbers) {
  std::vector<Sample> out;
  for (size_t number : numbers) out.push_back(samples[number]);
  return out;
}

inline PolicyStreams some(const PolicyStreams& streams, std::span<const size_t> numbers) {
  PolicyStreams out;
  out.prox_is_pi = streams.prox_is_pi;
  for (size_t number : numbers) {
    if (!streams.prox.empty()) out.prox.push_back(streams.prox[number]);
    if (!streams.ref.empty()) out.ref.push_back(streams.ref[number]);
    if (!streams.teacher.empty()) out.teacher.push_back(streams.teacher[number]);
  }
  return out;
}

struct SlowPass {
  double loss = 0.0, entropy = 0.0;
  MetricSums metrics;
  TokenValues logprobs;  // of every token but the first
  Parameters gradient;
};

inline SlowPass slow_pass(const Parameters& policy, const LossSpec& spec,
                          std::span<const Sample> samples, const PolicyStreams& streams,
                          double entropy_bonus = 0.0) {
  ThreadPool pool(1);
  const ModelConfig& config = policy.config();
  const size_t H = static_cast<size_t>(config.hidden_size);
  SlowPass out{.gradient = Parameters(config)};
  out.logprobs.resize(samples.size());
  std::vector<Activations> activations(samples.size());
  std::vector<std::vector<float>> hidden(samples.size()), entropy(samples.size());
  std::vector<std::vector<int64_t>> targets(samples.size());
  const auto tokens_of = [&](size_t i) {
    return std::span<const int32_t>(samples[i].ids).first(samples[i].ids.size() - 1);
  };
  const auto head_of = [&](size_t i) {
    HeadProblem problem;
    problem.tokens = static_cast<int64_t>(targets[i].size());
    problem.hidden_size = config.hidden_size, problem.vocabulary = config.vocab_size;
    problem.hidden = rows_of(hidden[i].data(), config.hidden_size);
    problem.weight = rows_of(network_of(policy).head, config.hidden_size);
    problem.targets = targets[i];
    problem.temperature = {&samples[i].temperature, 1};
    return problem;
  };
  // The loss sees a sample from its first trained token on.
  std::vector<size_t> starts;
  for (const Sample& sample : samples) {
    const auto at = std::find(sample.loss_mask.begin(), sample.loss_mask.end(), 1);
    starts.push_back(
        at == sample.loss_mask.end() ? 1 : static_cast<size_t>(at - sample.loss_mask.begin()));
  }
  Batch batch;
  double trained = 0.0;
  for (size_t i = 0; i < samples.size(); ++i) {
    const Sample& sample = samples[i];
    const size_t rows = sample.ids.size() - 1;
    targets[i].assign(sample.ids.begin() + 1, sample.ids.end());
    hidden[i].resize(rows * H);
    const std::vector<int64_t> cu_seqlens{0, static_cast<int64_t>(rows)};
    training_forward(pool, policy, {tokens_of(i), cu_seqlens}, {}, hidden[i], &activations[i]);
    std::vector<float> logprobs(rows);
    entropy[i].resize(rows);
    head_logprobs(pool, head_of(i), logprobs, entropy[i]);
    out.logprobs[i].assign(1, 0.0f);
    out.logprobs[i].insert(out.logprobs[i].end(), logprobs.begin(), logprobs.end());
    const auto add = [](std::vector<double>& to, const TokenValues& from, size_t s, size_t t) {
      if (!from.empty()) to.push_back(from[s][t]);
    };
    for (size_t t = starts[i]; t <= rows; ++t) {
      batch.pi.push_back(out.logprobs[i][t]);
      if (streams.prox_is_pi) batch.prox.push_back(out.logprobs[i][t]);
      add(batch.prox, streams.prox, i, t);
      add(batch.ref, streams.ref, i, t);
      add(batch.teacher, streams.teacher, i, t);
      if (!sample.rollout.empty()) batch.rollout.push_back(sample.rollout[t]);
      batch.advantages.push_back(sample.advantage(t));
      batch.mask.push_back(sample.loss_mask[t]);
      batch.versions.push_back(sample.versions[t]);
      trained += sample.loss_mask[t];
      if (sample.loss_mask[t] != 0) out.entropy += entropy[i][t - 1];
    }
    batch.offsets.push_back(static_cast<int64_t>(batch.pi.size()));
    batch.rollout_ids.push_back(sample.rollout_id >= 0 ? sample.rollout_id
                                                       : 1000 + static_cast<int32_t>(i));
  }
  const LossResult loss = evaluate_reference(spec, batch.view(), {}, &out.metrics);
  out.loss = loss.loss - entropy_bonus * out.entropy / trained;
  size_t first = 0;
  for (size_t i = 0; i < samples.size(); ++i) {
    const size_t rows = targets[i].size();
    std::vector<float> g(rows), g_entropy(rows), d_hidden(rows * H);
    for (size_t t = starts[i] - 1; t < rows; ++t, ++first) {
      g[t] = static_cast<float>(loss.grad[first]);
      if (batch.mask[first] != 0) g_entropy[t] = static_cast<float>(-entropy_bonus / trained);
    }
    head_backward(pool, head_of(i), g, g_entropy, d_hidden,
                  {network_of(out.gradient).head, static_cast<size_t>(config.vocab_size) * H});
    const std::vector<int64_t> cu_seqlens{0, static_cast<int64_t>(rows)};
    training_backward(pool, policy, {tokens_of(i), cu_seqlens}, d_hidden, activations[i],
                      out.gradient);
  }
  return out;
}

// Every number within `tolerance` times the largest one.
inline void expect_near(const Parameters& got, const Parameters& expected, double tolerance,
                        const std::string& where) {
  double largest = 1e-30;
  for (float value : expected.flat()) largest = std::max(largest, std::abs(double{value}));
  ASSERT_EQ(got.flat().size(), expected.flat().size());
  for (size_t i = 0; i < got.flat().size(); ++i) {
    ASSERT_NEAR(got.flat()[i], expected.flat()[i], tolerance * largest) << where << " number " << i;
  }
}

inline double dot(const Parameters& a, const Parameters& b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.flat().size(); ++i) sum += double{a.flat()[i]} * double{b.flat()[i]};
  return sum;
}

inline Parameters moved(const Parameters& from, const Parameters& direction, double by) {
  Parameters out = from;
  for (size_t i = 0; i < out.flat().size(); ++i) {
    out.flat()[i] = static_cast<float>(out.flat()[i] + by * direction.flat()[i]);
  }
  return out;
}

}  // namespace leeway::testing
