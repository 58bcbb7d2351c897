#include "trainer/slots.h"

#include <algorithm>

#include "leeway/error.h"
#include "ranks/ranks.h"
#include "trainer/backend.h"
#include "trainer/micro_batch.h"

namespace leeway {

std::vector<GradientSlot> plan_slots(const PackedBatch& batch, int64_t count, int64_t max_tokens,
                                     std::span<const size_t> only) {
  if (count == 1) return {plan_micro_batches(batch, max_tokens, only)};
  std::vector<uint8_t> taken(batch.samples(), only.empty() ? 1 : 0);
  for (size_t number : only) taken[number] = 1;
  std::vector<int64_t> rows(batch.rollouts.size());
  int64_t total = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    for (size_t number : batch.rollouts[r]) {
      if (taken[number] != 0) rows[r] += batch.rows_of(number);
    }
    total += rows[r];
  }
  // A rollout belongs where its middle lies.
  std::vector<std::vector<size_t>> samples(static_cast<size_t>(count));
  int64_t before = 0;
  for (size_t r = 0; r < rows.size(); ++r) {
    if (rows[r] == 0) continue;
    const int64_t slot = (2 * before + rows[r]) * count / (2 * total);
    for (size_t number : batch.rollouts[r]) {
      if (taken[number] != 0) samples[static_cast<size_t>(slot)].push_back(number);
    }
    before += rows[r];
  }
  std::vector<GradientSlot> slots;
  for (const std::vector<size_t>& each : samples) {
    slots.push_back(each.empty() ? GradientSlot() : plan_micro_batches(batch, max_tokens, each));
  }
  return slots;
}

int64_t micro_batches_of(std::span<const GradientSlot> slots) {
  int64_t count = 0;
  for (const GradientSlot& slot : slots) count += static_cast<int64_t>(slot.size());
  return count;
}

size_t rows_of(const PackedBatch& batch, const GradientSlot& slot) {
  size_t rows = 0;
  for (const std::vector<size_t>& samples : slot) {
    for (size_t number : samples) rows += static_cast<size_t>(batch.rows_of(number));
  }
  return rows;
}

SlotResult run_slot(TrainingBackend& backend, const PackedBatch& batch, const GradientSlot& slot,
                    const SlotPass& pass, std::span<const float> g) {
  SlotResult result;
  MicroBatch& part = backend.part_;
  RowValues& values = backend.values_;
  const auto add = [](const auto& from, auto& to) {
    to.insert(to.end(), from.begin(), from.end());
  };
  try {
    for (const std::vector<size_t>& samples : slot) {
      gather(batch, samples, part);
      const auto rows = static_cast<size_t>(part.size());
      switch (pass.kind) {
        case PassKind::score: backend.score(pass.policy, part, values); break;
        case PassKind::loss:
          result.loss += backend.loss_pass(part, pass.loss, result.metrics, values);
          add(values.kept, result.values.kept);
          break;
        case PassKind::gradient:
          backend.gradient_pass(part, g.first(rows), pass.loss.entropy_gradient, values);
          g = g.subspan(rows);
          break;
      }
      add(values.logprobs, result.values.logprobs);
      add(values.entropy, result.values.entropy);
    }
  } catch (const Lost&) {
    throw;
  } catch (const Error& error) {
    // The inputs were checked, so a number is not finite.
    result.failure = error.what();
  }
  return result;
}

std::vector<SlotResult> run_each_slot(TrainingBackend& backend, const PackedBatch& batch,
                                      std::span<const GradientSlot> slots, const SlotPass& pass,
                                      std::span<const float> g) {
  std::vector<SlotResult> results;
  for (const GradientSlot& slot : slots) {
    const size_t rows = g.empty() ? 0 : rows_of(batch, slot);
    results.push_back(run_slot(backend, batch, slot, pass, g.first(rows)));
    g = g.subspan(rows);
    if (!results.back().failure.empty()) break;
    if (pass.kind != PassKind::score && backend.slots() > 1) backend.end_slot(!slot.empty());
  }
  return results;
}

std::vector<SlotResult> TrainingBackend::run_slots(const PackedBatch& batch,
                                                   std::span<const GradientSlot> slots,
                                                   const SlotPass& pass, std::span<const float> g) {
  std::vector<SlotResult> results = run_each_slot(*this, batch, slots, pass, g);
  const bool failed = !results.empty() && !results.back().failure.empty();
  if (!failed && pass.kind != PassKind::score && this->slots() > 1) end_pass();
  return results;
}

void TrainingBackend::end_slot(bool) { LEEWAY_CHECK(false, "this backend has one slot"); }
void TrainingBackend::end_pass() { LEEWAY_CHECK(false, "this backend has one slot"); }

}  // namespace leeway
