#include "trainer/training_messages.h"

#include <fmt/format.h>

#include <limits>

#include "leeway/error.h"
#include "model/model_config.h"

namespace leeway {
namespace {

enum class WeightsKind { none, base, adapter, whole };

WeightsKind kind_of(const std::shared_ptr<const Parameters>& weights, const Parameters& policy) {
  if (!weights) return WeightsKind::none;
  if (weights == policy.base()) return WeightsKind::base;
  return weights->lora() != nullptr ? WeightsKind::adapter : WeightsKind::whole;
}

// Where weights are in parts, ranks get theirs of rank 0 when they have made their backends.
void put_other(ByteWriter& to, const std::shared_ptr<const Parameters>& weights,
               const Parameters& policy, Sharding sharding) {
  const WeightsKind kind = kind_of(weights, policy);
  to.put(kind);
  if (kind == WeightsKind::whole) to.put(model_config_json(weights->config()));
  if (sharding == Sharding::weights) return;
  if (kind == WeightsKind::whole || kind == WeightsKind::adapter) to.put(weights->flat());
}

std::shared_ptr<const Parameters> get_other(ByteReader& from, const Parameters& policy,
                                            Sharding sharding) {
  switch (from.get_enum(WeightsKind::whole)) {
    case WeightsKind::none: return nullptr;
    case WeightsKind::base: return policy.base();
    case WeightsKind::adapter: {
      auto weights = std::make_shared<Parameters>(policy);
      from.get_list(weights->flat());
      return weights;
    }
    case WeightsKind::whole: {
      ModelConfig config = parse_model_config("the leader's model", from.get_view());
      if (sharding == Sharding::weights) {
        return std::make_shared<Parameters>(Parameters::shape_of(std::move(config)));
      }
      auto weights = std::make_shared<Parameters>(std::move(config));
      from.get_list(weights->flat());
      return weights;
    }
  }
  return nullptr;
}

uint32_t base_checksum(const Parameters& policy) {
  return policy.base() ? checksum(*policy.base()) : 0;
}

// A batch's rows of these samples, sample after sample.
template <class T>
void put_rows(ByteWriter& to, const PackedBatch& batch, std::span<const size_t> samples,
              const std::vector<T>& values) {
  std::vector<T> rows;
  for (size_t number : samples) {
    if (values.empty()) break;
    rows.insert(rows.end(), values.begin() + batch.first_row[number],
                values.begin() + batch.first_row[number + 1]);
  }
  to.put(rows);
}

}  // namespace

void put_weights(ByteWriter& to, const TrainingWeights& weights, const TrainerTable& table) {
  to.put(base_checksum(weights.policy));
  to.put(table.numerics);
  to.put(table.recompute_activations);
  to.put(table.gradient_slots);
  to.put(table.optimizer_state);
  to.put(table.sharding);
  if (table.sharding == Sharding::optimizer) {
    to.put(std::span<const float>(weights.policy.flat()));
  }
  put_other(to, weights.reference, weights.policy, table.sharding);
  put_other(to, weights.teacher, weights.policy, table.sharding);
}

TrainingWeights get_weights(ByteReader& from, const Parameters& like, TrainerTable& table) {
  if (from.get<uint32_t>() != base_checksum(like)) {
    throw Error(
        "the model below the adapter is not the one that rank 0 has: model.path must have "
        "the same weights on every host");
  }
  table.numerics = from.get_enum(Numerics::fast);
  table.recompute_activations = from.get_enum(Recompute::layer);
  table.gradient_slots = from.get<int64_t>();
  table.optimizer_state = from.get_enum(OptimizerState::int8);
  table.sharding = from.get_enum(Sharding::weights);
  TrainingWeights weights{like};
  if (table.sharding == Sharding::optimizer) from.get_list(weights.policy.flat());
  weights.reference = get_other(from, weights.policy, table.sharding);
  weights.teacher = get_other(from, weights.policy, table.sharding);
  return weights;
}

void put_pass(ByteWriter& to, const PackedBatch& batch, std::span<const GradientSlot> slots,
              const SlotPass& pass, uint8_t spec, int64_t most, std::span<const float> g) {
  to.put(pass.kind);
  to.put(pass.policy);
  to.put(spec);
  to.put(most);
  to.put(pass.ends_step);
  to.put(pass.loss.prox_is_pi);
  to.put(pass.loss.denominator.value_or(std::numeric_limits<double>::quiet_NaN()));
  to.put(pass.loss.entropy_gradient);
  std::vector<size_t> samples;
  to.put(uint64_t{slots.size()});
  for (const GradientSlot& slot : slots) {
    to.put(uint64_t{slot.size()});
    for (const std::vector<size_t>& part : slot) {
      to.put(uint64_t{part.size()});
      samples.insert(samples.end(), part.begin(), part.end());
    }
  }
  std::vector<int64_t> first_row = {0};
  std::vector<int32_t> rollout_ids;
  std::vector<float> temperature;
  for (size_t number : samples) {
    first_row.push_back(first_row.back() + batch.rows_of(number));
    rollout_ids.push_back(batch.rollout_ids[number]);
    temperature.push_back(batch.temperature[number]);
  }
  to.put(first_row);
  to.put(rollout_ids);
  to.put(temperature);
  const auto rows = [&](const auto& values) { put_rows(to, batch, samples, values); };
  rows(batch.tokens), rows(batch.targets), rows(batch.mask), rows(batch.advantages);
  rows(batch.rollout), rows(batch.versions), rows(batch.weights);
  rows(batch.prox), rows(batch.ref), rows(batch.teacher);
  to.put(g);
}

PassOrder get_pass(ByteReader& from) {
  PassOrder order;
  order.pass.kind = from.get_enum(PassKind::gradient);
  order.pass.policy = from.get_enum(PolicyKind::teacher);
  order.spec = from.get<uint8_t>();
  order.most = from.get<int64_t>();
  order.pass.ends_step = from.get_bool();
  order.pass.loss.prox_is_pi = from.get_bool();
  if (const auto denominator = from.get<double>(); denominator == denominator) {
    order.pass.loss.denominator = denominator;
  }
  order.pass.loss.entropy_gradient = from.get<double>();
  size_t samples = 0;
  order.slots.resize(from.get_count(sizeof(uint64_t)));
  for (GradientSlot& slot : order.slots) {
    slot.resize(from.get_count(sizeof(uint64_t)));
    for (std::vector<size_t>& part : slot) {
      part.resize(from.get_count(1));
      for (size_t& number : part) number = samples++;
    }
  }
  PackedBatch& batch = order.batch;
  batch.first_row = from.get_list<int64_t>();
  batch.rollout_ids = from.get_list<int32_t>();
  batch.temperature = from.get_list<float>();
  batch.tokens = from.get_list<int32_t>();
  batch.targets = from.get_list<int64_t>();
  batch.mask = from.get_list<uint8_t>();
  batch.advantages = from.get_list<float>();
  batch.rollout = from.get_list<float>();
  batch.versions = from.get_list<PolicyVersion>();
  batch.weights = from.get_list<float>();
  batch.prox = from.get_list<float>();
  batch.ref = from.get_list<float>();
  batch.teacher = from.get_list<float>();
  order.g = from.get_list<float>();
  const bool fits = batch.first_row.size() == samples + 1 && batch.rollout_ids.size() == samples &&
                    batch.temperature.size() == samples &&
                    batch.first_row.back() == static_cast<int64_t>(batch.tokens.size());
  if (!fits) throw Error("a message of slots does not have what its lists of samples say");
  return order;
}

std::string results_message(const std::vector<SlotResult>& results, double seconds) {
  ByteWriter to;
  to.put(seconds);
  to.put(uint64_t{results.size()});
  for (const SlotResult& each : results) {
    to.put(each.loss);
    to.put(each.metrics.flatten());
    to.put(each.values.logprobs);
    to.put(each.values.entropy);
    to.put(each.values.kept);
    to.put(each.failure);
  }
  return to.take();
}

std::vector<SlotResult> read_results(const std::string& message, double* seconds) {
  ByteReader from(message);
  *seconds = from.get<double>();
  std::vector<SlotResult> results(from.get_count(sizeof(double)));
  std::vector<double> metrics(static_cast<size_t>(MetricSums::kFlatSize));
  for (SlotResult& each : results) {
    each.loss = from.get<double>();
    from.get_list(std::span(metrics));
    each.metrics = MetricSums::from_flat(metrics);
    each.values.logprobs = from.get_list<float>();
    each.values.entropy = from.get_list<float>();
    each.values.kept = from.get_list<uint8_t>();
    each.failure = from.get_string();
  }
  from.end();
  return results;
}

}  // namespace leeway
