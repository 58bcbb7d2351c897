#include "trainer/micro_batch.h"

#include <algorithm>

#include "leeway/error.h"
#include "trainer/packing.h"

namespace leeway {
namespace {

// Rows of a sample: up to its last trained token, or all.
int64_t row_count(const Sample& sample, bool every_row) {
  const auto last = std::find(sample.loss_mask.rbegin(), sample.loss_mask.rend(), uint8_t{1});
  if (last == sample.loss_mask.rend()) return 0;
  if (every_row) return static_cast<int64_t>(sample.ids.size()) - 1;
  return static_cast<int64_t>(sample.loss_mask.rend() - last) - 1;
}

void append(MicroBatch& batch, size_t number, const Sample& sample, const PolicyStreams& streams,
            bool every_row) {
  const size_t count = static_cast<size_t>(row_count(sample, every_row));
  const int64_t first = batch.size();
  auto add_stream = [&](const TokenValues& from, std::vector<float>& to) {
    if (from.empty()) return;
    to.insert(to.end(), from[number].begin() + 1, from[number].begin() + 1 + count);
  };
  batch.samples.push_back(number);
  batch.tokens.insert(batch.tokens.end(), sample.ids.begin(), sample.ids.begin() + count);
  bool begun = false;  // the first trained token was met
  for (size_t t = 1; t <= count; ++t) {
    begun = begun || sample.loss_mask[t] != 0;
    batch.targets.push_back(sample.ids[t]);
    batch.mask.push_back(sample.loss_mask[t]);
    batch.advantages.push_back(sample.advantage(t));
    if (!sample.versions.empty()) batch.versions.push_back(sample.versions[t]);
    if (!sample.rollout.empty()) batch.rollout.push_back(sample.rollout[t]);
    if (every_row) batch.weights.push_back(begun ? 1.0f : 0.0f);
    if (every_row ? begun : sample.loss_mask[t] != 0) {
      batch.rows.push_back(first + static_cast<int64_t>(t) - 1);
    }
  }
  batch.temperature.insert(batch.temperature.end(), count, sample.temperature);
  add_stream(streams.prox, batch.prox);
  add_stream(streams.ref, batch.ref);
  add_stream(streams.teacher, batch.teacher);
  batch.cu_seqlens.push_back(batch.size());
  // Samples without a rollout's number have one of their own, below all that users give.
  batch.rollout_ids.push_back(sample.rollout_id >= 0 ? sample.rollout_id
                                                     : -2 - static_cast<int32_t>(number));
}

}  // namespace

BatchView<float> MicroBatch::view(std::span<const float> pi, bool prox_is_pi) const {
  BatchView<float> out;
  out.offsets = cu_seqlens;
  out.pi = pi;
  out.prox = prox_is_pi ? pi : std::span<const float>(prox);
  out.rollout = rollout;
  out.ref = ref;
  out.teacher = teacher;
  out.advantages = advantages;
  out.weights = weights;
  out.mask = mask;
  out.versions = versions;
  out.rollout_ids = rollout_ids;
  return out;
}

std::vector<float> MicroBatch::entropy_gradients(double value) const {
  std::vector<float> out(value == 0.0 ? 0 : mask.size());
  for (size_t t = 0; t < out.size(); ++t) {
    if (mask[t] != 0) out[t] = static_cast<float>(value);
  }
  return out;
}

std::vector<MicroBatch> make_micro_batches(std::span<const Sample> samples,
                                           const PolicyStreams& streams, int64_t max_tokens,
                                           bool every_row, std::span<const size_t> only) {
  std::vector<uint8_t> taken(samples.size(), only.empty() ? 1 : 0);
  for (size_t number : only) taken[number] = 1;
  // A rollout's samples stay together, so that denominators of micro-batches add up.
  const std::vector<std::vector<size_t>> rollouts = samples_by_rollout(samples);
  std::vector<int64_t> sizes(rollouts.size());
  for (size_t r = 0; r < rollouts.size(); ++r) {
    for (size_t number : rollouts[r]) {
      if (taken[number] != 0) sizes[r] += row_count(samples[number], every_row);
    }
  }
  std::vector<MicroBatch> batches;
  for (const std::vector<size_t>& bin : pack(sizes, max_tokens)) {
    MicroBatch& batch = batches.emplace_back();
    batch.cu_seqlens.push_back(0);
    for (size_t rollout : bin) {
      for (size_t number : rollouts[rollout]) {
        if (taken[number] == 0 || row_count(samples[number], every_row) == 0) continue;
        append(batch, number, samples[number], streams, every_row);
      }
    }
  }
  return batches;
}

void scatter(const MicroBatch& batch, std::span<const float> values, TokenValues& into) {
  for (size_t s = 0; s < batch.samples.size(); ++s) {
    const auto first = values.begin() + batch.cu_seqlens[s];
    std::copy(first, values.begin() + batch.cu_seqlens[s + 1], into[batch.samples[s]].begin() + 1);
  }
}

}  // namespace leeway
