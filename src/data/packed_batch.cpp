#include "data/packed_batch.h"

#include <algorithm>

namespace leeway {
namespace {

size_t row_count(const Sample& sample, bool every_row) {
  const auto last = std::find(sample.loss_mask.rbegin(), sample.loss_mask.rend(), uint8_t{1});
  if (last == sample.loss_mask.rend()) return 0;
  if (every_row) return sample.ids.size() - 1;
  return static_cast<size_t>(sample.loss_mask.rend() - last) - 1;
}

void append(PackedBatch& batch, const Sample& sample, bool every_row) {
  const size_t count = row_count(sample, every_row);
  const int32_t number = static_cast<int32_t>(batch.samples());
  const auto add = [count](const auto& from, size_t first, auto& to) {
    if (from.empty()) return;
    const auto begin = from.begin() + static_cast<std::ptrdiff_t>(first);
    to.insert(to.end(), begin, begin + static_cast<std::ptrdiff_t>(count));
  };
  add(sample.ids, 0, batch.tokens);
  add(sample.ids, 1, batch.targets);
  add(sample.loss_mask, 1, batch.mask);
  add(sample.rollout, 1, batch.rollout);
  add(sample.versions, 1, batch.versions);
  bool begun = false;  // the first trained token was met
  for (size_t t = 1; t <= count; ++t) {
    begun = begun || sample.loss_mask[t] != 0;
    batch.advantages.push_back(sample.advantage(t));
    if (every_row) batch.weights.push_back(begun ? 1.0f : 0.0f);
  }
  batch.temperature.push_back(sample.temperature);
  batch.first_row.push_back(static_cast<int64_t>(batch.tokens.size()));
  // Samples without a rollout id get a unique one, below all that users give.
  batch.rollout_ids.push_back(sample.rollout_id >= 0 ? sample.rollout_id : -2 - number);
}

}  // namespace

int64_t PackedBatch::trained_of(size_t sample) const {
  return std::count(mask.begin() + first_row[sample], mask.begin() + first_row[sample + 1],
                    uint8_t{1});
}

PackedBatch pack_samples(std::span<const Sample> samples, bool every_row) {
  PackedBatch batch;
  batch.rollouts = samples_by_rollout(samples);
  batch.first_row.push_back(0);
  for (const Sample& sample : samples) append(batch, sample, every_row);
  return batch;
}

std::vector<float> pack_values(const PackedBatch& batch, const TokenValues& values) {
  std::vector<float> out;
  if (values.empty()) return out;
  out.reserve(batch.tokens.size());
  for (size_t s = 0; s < values.size(); ++s) {
    if (batch.rows_of(s) == 0) continue;
    out.insert(out.end(), values[s].begin() + 1, values[s].begin() + 1 + batch.rows_of(s));
  }
  return out;
}

TokenValues unpack_values(const PackedBatch& batch, std::span<const Sample> samples,
                          std::span<const float> values) {
  TokenValues out(samples.size());
  for (size_t s = 0; s < samples.size(); ++s) {
    out[s].resize(samples[s].ids.size());
    const auto rows = values.subspan(static_cast<size_t>(batch.first_row[s]),
                                     static_cast<size_t>(batch.rows_of(s)));
    if (!rows.empty()) std::copy(rows.begin(), rows.end(), out[s].begin() + 1);
  }
  return out;
}

}  // namespace leeway
