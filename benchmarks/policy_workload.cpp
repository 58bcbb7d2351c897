#include "policy_workload.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace leeway {

double Model::body_flops(double keys) const {
  const ModelConfig& c = parameters.config();
  const auto width = static_cast<double>(c.num_hidden_layers * c.num_attention_heads * c.head_dim);
  return 2.0 * body + 4.0 * keys * width;
}

double Model::weight_bytes(double bytes_per_weight) const {
  return (body + head) * bytes_per_weight + 4.0 * norms;
}

namespace {

Model make_model(const std::string& name, ModelConfig config) {
  config.family = Family::qwen3;
  config.qk_norm = true;
  config.head_dim = 32;
  config.max_position_embeddings = 1024;
  config.rope_theta = 1e6;
  Model model{name, Parameters(config)};
  initialise(model.parameters, 1);
  for (const ParameterInfo& info : model.parameters.table()) {
    const auto size = static_cast<double>(info.size());
    if (info.role == ParameterInfo::Role::matrix) model.body += size;
    if (info.role == ParameterInfo::Role::head) model.head += size;
    if (info.role == ParameterInfo::Role::norm) model.norms += size;
  }
  return model;
}

PaddedBatch pad(const PackedWorkload& batch, std::span<const int64_t> sequences) {
  PaddedBatch padded;
  padded.rows = static_cast<int64_t>(sequences.size());
  for (int64_t s : sequences) padded.columns = std::max(padded.columns, batch.length(s));
  const auto size = static_cast<size_t>(padded.rows * padded.columns);
  padded.tokens.resize(size);
  padded.targets.resize(size);
  padded.rollout.resize(size);
  padded.advantages.resize(size);
  padded.mask.resize(size);
  for (size_t row = 0; row < sequences.size(); ++row) {
    const auto first = static_cast<size_t>(batch.cu_seqlens[static_cast<size_t>(sequences[row])]);
    for (size_t t = 0; t < static_cast<size_t>(batch.length(sequences[row])); ++t) {
      const size_t to = row * static_cast<size_t>(padded.columns) + t;
      padded.tokens[to] = batch.tokens[first + t];
      padded.targets[to] = batch.targets[first + t];
      padded.rollout[to] = batch.rollout[first + t];
      padded.advantages[to] = batch.advantages[first + t];
      padded.mask[to] = batch.mask[first + t];
    }
  }
  return padded;
}

}  // namespace

std::vector<Model> benchmark_models() {
  return {make_model("1M", {.vocab_size = 1024,
                            .hidden_size = 128,
                            .intermediate_size = 384,
                            .num_hidden_layers = 4,
                            .num_attention_heads = 4,
                            .num_key_value_heads = 2}),
          make_model("10M", {.vocab_size = 4096,
                             .hidden_size = 320,
                             .intermediate_size = 960,
                             .num_hidden_layers = 6,
                             .num_attention_heads = 10,
                             .num_key_value_heads = 5})};
}

std::vector<int32_t> random_ids(const Model& model, int64_t count, Rng& rng) {
  std::vector<int32_t> ids;
  const auto vocabulary = static_cast<uint64_t>(model.parameters.config().vocab_size);
  for (int64_t t = 0; t < count; ++t) ids.push_back(static_cast<int32_t>(rng.below(vocabulary)));
  return ids;
}

double PackedWorkload::mean_keys() const {
  double sum = 0.0;
  for (int64_t s = 0; s < sequences(); ++s) {
    sum += 0.5 * static_cast<double>(length(s) * (length(s) + 1));
  }
  return sum / static_cast<double>(count());
}

PackedWorkload pack(const std::vector<std::vector<int32_t>>& sequences) {
  PackedWorkload batch;
  for (const std::vector<int32_t>& sequence : sequences) {
    for (size_t t = 0; t < sequence.size(); ++t) {
      batch.tokens.push_back(sequence[t]);
      batch.targets.push_back(t + 1 < sequence.size() ? sequence[t + 1] : 0);
    }
    batch.cu_seqlens.push_back(static_cast<int64_t>(batch.tokens.size()));
  }
  return batch;
}

PackedWorkload training_batch(ThreadPool& pool, const Model& model,
                              const std::vector<int64_t>& lengths) {
  Rng rng(7);
  std::vector<std::vector<int32_t>> sequences;
  for (int64_t length : lengths) sequences.push_back(random_ids(model, length, rng));
  PackedWorkload batch = pack(sequences);
  batch.rollout = logprobs_of(pool, model, batch);
  for (float& value : batch.rollout) value += static_cast<float>(0.1 * rng.normal());
  for (int64_t length : lengths) {
    const auto advantage = static_cast<float>(rng.normal());
    for (int64_t t = 0; t < length; ++t) {
      const bool trained = 2 * t >= length - 1 && t + 1 < length;
      if (trained) batch.rows.push_back(static_cast<int64_t>(batch.mask.size()));
      batch.mask.push_back(trained);
      batch.advantages.push_back(advantage);
    }
  }
  return batch;
}

std::vector<int64_t> mixed_lengths(int64_t sequences) {
  Rng rng(3);
  std::vector<int64_t> lengths;
  for (int64_t s = 0; s < sequences; ++s) {
    const double length = std::exp(4.8 + 0.9 * rng.normal());
    lengths.push_back(static_cast<int64_t>(std::clamp(length, 16.0, 512.0)));
  }
  return lengths;
}

std::vector<PaddedBatch> padded_batches(const PackedWorkload& batch, bool sorted, int64_t at_once) {
  std::vector<int64_t> order(static_cast<size_t>(batch.sequences()));
  std::iota(order.begin(), order.end(), 0);
  if (sorted) {
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return batch.length(a) < batch.length(b); });
  }
  std::vector<PaddedBatch> parts;
  for (size_t first = 0; first < order.size(); first += static_cast<size_t>(at_once)) {
    const size_t size = std::min(static_cast<size_t>(at_once), order.size() - first);
    parts.push_back(pad(batch, std::span(order).subspan(first, size)));
  }
  return parts;
}

HeadProblem head_problem(const Model& model, const PackedWorkload& batch, const float* hidden) {
  const ModelConfig& config = model.parameters.config();
  HeadProblem problem;
  problem.tokens = batch.count();
  problem.hidden_size = config.hidden_size;
  problem.vocabulary = config.vocab_size;
  problem.hidden = rows_of(hidden, config.hidden_size);
  problem.weight = rows_of(model.parameters.find("lm_head.weight"), config.hidden_size);
  problem.targets = batch.targets;
  return problem;
}

std::vector<float> logprobs_of(ThreadPool& pool, const Model& model, const PackedWorkload& batch) {
  const int64_t width = model.parameters.config().hidden_size;
  AlignedVector<float> hidden(static_cast<size_t>(batch.count() * width));
  training_forward(pool, model.parameters, batch.packed(), {}, hidden, nullptr);
  std::vector<float> logprobs(static_cast<size_t>(batch.count()));
  head_logprobs(pool, head_problem(model, batch, hidden.data()), logprobs, {});
  return logprobs;
}

}  // namespace leeway
