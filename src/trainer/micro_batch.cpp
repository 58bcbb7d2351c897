#include "trainer/micro_batch.h"

#include "trainer/packing.h"

namespace leeway {

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

std::vector<std::vector<size_t>> plan_micro_batches(const PackedBatch& batch, int64_t max_tokens,
                                                    std::span<const size_t> only) {
  std::vector<uint8_t> taken(batch.samples(), only.empty() ? 1 : 0);
  for (size_t number : only) taken[number] = 1;
  // A rollout's samples stay together, so that the denominators of micro-batches add up.
  std::vector<int64_t> sizes(batch.rollouts.size());
  for (size_t r = 0; r < sizes.size(); ++r) {
    for (size_t number : batch.rollouts[r]) {
      if (taken[number] != 0) sizes[r] += batch.rows_of(number);
    }
  }
  std::vector<std::vector<size_t>> plan;
  for (const std::vector<size_t>& bin : pack(sizes, max_tokens)) {
    std::vector<size_t>& samples = plan.emplace_back();
    for (size_t rollout : bin) {
      for (size_t number : batch.rollouts[rollout]) {
        if (taken[number] != 0 && batch.rows_of(number) > 0) samples.push_back(number);
      }
    }
  }
  return plan;
}

void gather(const PackedBatch& batch, std::span<const size_t> samples, MicroBatch& into) {
  into.samples.assign(samples.begin(), samples.end());
  into.cu_seqlens.assign(1, 0);
  into.rollout_ids.clear();
  into.temperature.clear();
  for (size_t number : samples) {
    const int64_t count = batch.rows_of(number);
    into.cu_seqlens.push_back(into.cu_seqlens.back() + count);
    into.rollout_ids.push_back(batch.rollout_ids[number]);
    into.temperature.insert(into.temperature.end(), static_cast<size_t>(count),
                            batch.temperature[number]);
  }
  const auto take = [&](const auto& from, auto& to) {
    to.clear();
    if (from.empty()) return;
    for (size_t number : samples) {
      to.insert(to.end(), from.begin() + batch.first_row[number],
                from.begin() + batch.first_row[number + 1]);
    }
  };
  take(batch.tokens, into.tokens);
  take(batch.targets, into.targets);
  take(batch.mask, into.mask);
  take(batch.advantages, into.advantages);
  take(batch.rollout, into.rollout);
  take(batch.versions, into.versions);
  take(batch.weights, into.weights);
  take(batch.prox, into.prox);
  take(batch.ref, into.ref);
  take(batch.teacher, into.teacher);
  into.rows.clear();
  for (size_t t = 0; t < into.mask.size(); ++t) {
    const bool computed = into.weights.empty() ? into.mask[t] != 0 : into.weights[t] != 0.0f;
    if (computed) into.rows.push_back(static_cast<int64_t>(t));
  }
}

}  // namespace leeway
