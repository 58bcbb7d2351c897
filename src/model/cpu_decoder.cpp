#include "model/cpu_decoder.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "leeway/error.h"
#include "model/layer.h"
#include "model/workspace.h"

namespace leeway {
namespace {

// RoPE frequencies of each rotated pair, in float32 as the models were trained.
std::vector<float> inverse_frequencies(const ModelConfig& config) {
  std::vector<float> frequencies;
  for (int64_t i = 0; i < config.head_dim; i += 2) {
    const float exponent = static_cast<float>(i) / static_cast<float>(config.head_dim);
    float frequency = 1.0f / std::pow(static_cast<float>(config.rope_theta), exponent);
    if (config.llama3_rope) {
      // Low frequencies are scaled down, high ones kept, those in between interpolated.
      const Llama3Rope& rope = *config.llama3_rope;
      const double wavelength = 2.0 * 3.14159265358979323846 / static_cast<double>(frequency);
      const auto original = static_cast<double>(rope.original_max_position_embeddings);
      const double low = original / rope.low_freq_factor, high = original / rope.high_freq_factor;
      if (wavelength > low) {
        frequency = static_cast<float>(static_cast<double>(frequency) / rope.factor);
      } else if (wavelength >= high) {
        const double smooth = (original / wavelength - rope.low_freq_factor) /
                              (rope.high_freq_factor - rope.low_freq_factor);
        const auto f = static_cast<double>(frequency);
        frequency = static_cast<float>((1.0 - smooth) * f / rope.factor + smooth * f);
      }
    }
    frequencies.push_back(frequency);
  }
  return frequencies;
}

// Uses huge pages if available: a step touches blocks all over the store.
float* large_memory(size_t floats) {
  constexpr size_t kPage = size_t{2} << 20;
  const size_t bytes = (floats * sizeof(float) + kPage - 1) / kPage * kPage;
  void* memory = std::aligned_alloc(kPage, bytes);
  if (memory == nullptr) throw std::bad_alloc();
  ::madvise(memory, bytes, MADV_HUGEPAGE);
  return static_cast<float*>(memory);
}

// Sizes the matrix, unless it has the size, and packs it.
const PackedMatrix* pack_one(ThreadPool& pool, PackedMatrix& matrix, const float* from,
                             int64_t outputs, int64_t inputs) {
  if (matrix.outputs() != outputs || matrix.inputs() != inputs) {
    matrix = PackedMatrix(Precision::float32, outputs, inputs);
  }
  const PackedMatrix::Part part{from, outputs};
  pool.run_team([&](Team& team) { matrix.pack(team, {&part, 1}); });
  return &matrix;
}

}  // namespace

RopeTable::RopeTable(const ModelConfig& config, int64_t count) {
  const std::vector<float> frequencies = inverse_frequencies(config);
  cosines.reserve(static_cast<size_t>(count) * frequencies.size());
  sines.reserve(cosines.capacity());
  for (int64_t position = 0; position < count; ++position) {
    for (float frequency : frequencies) {
      const auto angle = static_cast<double>(static_cast<float>(position) * frequency);
      cosines.push_back(static_cast<float>(std::cos(angle)));
      sines.push_back(static_cast<float>(std::sin(angle)));
    }
  }
}

KvStore::KvStore(const ModelConfig& config, int64_t blocks)
    : layers_(config.num_hidden_layers),
      block_floats_(2 * kBlockKeys * config.num_key_value_heads * config.head_dim),
      blocks_(blocks),
      data_(large_memory(static_cast<size_t>(layers_ * block_floats_ * blocks))) {}

size_t KvStore::block_bytes(const ModelConfig& config) {
  return static_cast<size_t>(2 * kBlockKeys * config.num_key_value_heads * config.head_dim *
                             config.num_hidden_layers) *
         sizeof(float);
}

KvBlocks KvStore::layer(int64_t layer) {
  return {data_.get() + layer * block_floats_, layers_ * block_floats_};
}

void KvStore::copy_block(int32_t from, int32_t to) {
  const int64_t stride = layers_ * block_floats_;
  std::memcpy(data_.get() + to * stride, data_.get() + from * stride,
              static_cast<size_t>(stride) * sizeof(float));
}

struct SamplingDecoder::Impl {
  struct Layer {
    PackedMatrix qkv, o, gate_up, down;
    // Norms and biases are in `small`; filled by `load`.
    LayerWeights weights{};
    std::vector<PackedMatrix> adapter;
  };

  Impl(const ModelConfig& model, Precision precision_, FrozenWeights frozen_)
      : config(model), precision(precision_), frozen(frozen_), pass(make_pass(model)) {
    layers.resize(static_cast<size_t>(config.num_hidden_layers));
  }

  const PackedMatrix& embedding_rows() const {
    return config.tie_word_embeddings ? head : embedding;
  }

  // Extends the RoPE table to `count` positions: as far as sequences reach, not as far as the model
  // could.
  void extend_rope(int64_t count) {
    if (count <= rope_positions) return;
    rope_positions = std::min(config.max_position_embeddings, std::max(count, 2 * rope_positions));
    rope = RopeTable(config, rope_positions);
  }

  void size_matrices();
  void pack(ThreadPool& pool, const NetworkPointers<const float>& network);
  void refer_to(const NetworkPointers<const float>& network);
  void pack_adapter(ThreadPool& pool, const NetworkPointers<const float>& network);
  void embed(int32_t token, float* to) const;
  void head_product(Team& team, const float* x, int64_t rows, float* logits) const;

  ModelConfig config;
  Precision precision;
  FrozenWeights frozen;
  Pass pass;
  std::vector<Layer> layers;
  PackedMatrix head, embedding;
  // In place: the base's own arrays instead of the two matrices above.
  const float *raw_head = nullptr, *raw_embedding = nullptr;
  std::shared_ptr<const Parameters> base;  // of the adapter that was loaded last
  std::vector<AlignedVector<float>> small;
  const float* final_norm = nullptr;
  int64_t rank = 0;
  int64_t rope_positions = 0;
  RopeTable rope{config, 0};

  // Workspace, sized for the largest pass so far.
  AlignedVector<float> floats;
  std::vector<int32_t> positions;
};

SamplingDecoder::SamplingDecoder(const ModelConfig& config, Precision precision,
                                 FrozenWeights frozen)
    : impl_(std::make_unique<Impl>(config, precision, frozen)) {
  if (frozen == FrozenWeights::packed) impl_->size_matrices();
}
SamplingDecoder::~SamplingDecoder() = default;

void SamplingDecoder::Impl::size_matrices() {
  if (head.outputs() > 0) return;
  head = PackedMatrix(precision, config.vocab_size, config.hidden_size);
  for (Layer& layer : layers) {
    layer.qkv = PackedMatrix(precision, pass.layout.width(), config.hidden_size);
    layer.o = PackedMatrix(precision, config.hidden_size, pass.layout.query_width());
    layer.gate_up = PackedMatrix(precision, 2 * config.intermediate_size, config.hidden_size);
    layer.down = PackedMatrix(precision, config.hidden_size, config.intermediate_size);
  }
  if (!config.tie_word_embeddings) {
    embedding = PackedMatrix(precision, config.vocab_size, config.hidden_size);
  }
}

void SamplingDecoder::load(ThreadPool& pool, const Parameters& parameters) {
  Impl& impl = *impl_;
  const auto network = network_of(parameters);
  const bool in_place = parameters.base() != nullptr && impl.precision == Precision::float32 &&
                        impl.frozen == FrozenWeights::in_place;
  if (parameters.base() == nullptr || parameters.base() != impl.base) {
    in_place ? impl.refer_to(network) : impl.pack(pool, network);
  }
  impl.base = parameters.base();
  impl.pack_adapter(pool, network);
}

// Nothing is copied: the caller keeps the base.
void SamplingDecoder::Impl::refer_to(const NetworkPointers<const float>& network) {
  for (size_t i = 0; i < layers.size(); ++i) layers[i].weights = raw_layer(config, network, i);
  final_norm = network.final_norm;
  raw_head = network.head, raw_embedding = network.embedding;
}

void SamplingDecoder::Impl::pack(ThreadPool& pool, const NetworkPointers<const float>& network) {
  size_matrices();
  raw_head = raw_embedding = nullptr;
  small.clear();
  const auto keep = [&](const float* from, int64_t size) -> const float* {
    if (from == nullptr) return nullptr;
    small.emplace_back(from, from + size);
    return small.back().data();
  };
  for (size_t i = 0; i < layers.size(); ++i) {
    Layer& layer = layers[i];
    LayerWeights raw = raw_layer(config, network, i);
    pool.run_team([&](Team& team) {
      const auto pack = [&](PackedMatrix& matrix, const Linear& linear) {
        matrix.pack(team, {linear.parts.data(), static_cast<size_t>(linear.part_count)});
      };
      pack(layer.qkv, raw.qkv);
      pack(layer.o, raw.o);
      pack(layer.gate_up, raw.gate_up);
      pack(layer.down, raw.down);
    });
    raw.input_norm = keep(raw.input_norm, config.hidden_size);
    raw.post_norm = keep(raw.post_norm, config.hidden_size);
    raw.q_norm = keep(raw.q_norm, config.head_dim);
    raw.k_norm = keep(raw.k_norm, config.head_dim);
    for (Linear* linear : {&raw.qkv, &raw.o}) {
      for (size_t part = 0; part < linear->parts.size(); ++part) {
        linear->biases[part] = keep(linear->biases[part], linear->parts[part].outputs);
      }
    }
    raw.qkv.packed = &layer.qkv, raw.o.packed = &layer.o;
    raw.gate_up.packed = &layer.gate_up, raw.down.packed = &layer.down;
    for (Linear* linear : {&raw.qkv, &raw.o, &raw.gate_up, &raw.down}) {
      for (PackedMatrix::Part& part : linear->parts) part.data = nullptr;
    }
    layer.weights = raw;
  }
  final_norm = keep(network.final_norm, config.hidden_size);
  pool.run_team([&](Team& team) {
    const PackedMatrix::Part of_head{network.head, config.vocab_size};
    head.pack(team, {&of_head, 1});
    const PackedMatrix::Part rows{network.embedding, config.vocab_size};
    if (!config.tie_word_embeddings) embedding.pack(team, {&rows, 1});
  });
}

// In float32, whatever the precision of the weights below it: it is small.
void SamplingDecoder::Impl::pack_adapter(ThreadPool& pool,
                                         const NetworkPointers<const float>& network) {
  rank = network.rank;
  for (size_t i = 0; i < layers.size(); ++i) {
    Layer& layer = layers[i];
    const LayerWeights raw = raw_layer(config, network, i);
    layer.adapter.resize(2 * kLoraTargets.size());
    PackedMatrix* next = layer.adapter.data();
    const auto take = [&](const Linear& from, Linear& to) {
      to.low_rank = {from.low_rank.rank, from.low_rank.scale, {}, {}};
      for (size_t part = 0; rank > 0 && part < from.low_rank.parts.size(); ++part) {
        if (!from.low_rank.has(part)) continue;
        const LoraPointers<const float>& matrices = from.low_rank.parts[part];
        to.low_rank.packed[part] = {
            pack_one(pool, *next++, matrices.a, rank, from.inputs),
            pack_one(pool, *next++, matrices.b, from.parts[part].outputs, rank)};
      }
    };
    take(raw.qkv, layer.weights.qkv);
    take(raw.o, layer.weights.o);
    take(raw.gate_up, layer.weights.gate_up);
    take(raw.down, layer.weights.down);
  }
}

void SamplingDecoder::Impl::embed(int32_t token, float* to) const {
  if (raw_embedding == nullptr) return embedding_rows().row(token, to);
  std::memcpy(to, raw_embedding + token * config.hidden_size,
              static_cast<size_t>(config.hidden_size) * sizeof(float));
}

void SamplingDecoder::Impl::head_product(Team& team, const float* x, int64_t rows,
                                         float* logits) const {
  const int64_t width = config.hidden_size, vocabulary = config.vocab_size;
  if (raw_head == nullptr) return product(team, x, rows, width, head, logits, vocabulary);
  gemm(team, rows, vocabulary, width, rows_of(x, width), columns_of(raw_head, width), logits,
       vocabulary);
}

size_t SamplingDecoder::weight_bytes() const {
  size_t bytes = impl_->head.bytes() + impl_->embedding.bytes();
  for (const auto& layer : impl_->layers) {
    bytes += layer.qkv.bytes() + layer.o.bytes() + layer.gate_up.bytes() + layer.down.bytes();
    for (const PackedMatrix& matrix : layer.adapter) bytes += matrix.bytes();
  }
  for (const auto& vector : impl_->small) bytes += vector.size() * sizeof(float);
  return bytes;
}

void SamplingDecoder::run(ThreadPool& pool, std::span<const int32_t> tokens,
                          std::span<const SequenceRows> sequences, KvStore& kv,
                          std::span<const int32_t> logit_rows, float* logits) {
  Impl& impl = *impl_;
  LEEWAY_CHECK(impl.final_norm != nullptr, "weights must be loaded before a pass");
  const auto rows = static_cast<int64_t>(tokens.size());
  const auto sampled = static_cast<int64_t>(logit_rows.size());
  if (rows == 0) return;

  impl.positions.resize(tokens.size());
  int64_t last_position = 0;
  for (const SequenceRows& sequence : sequences) {
    for (int64_t i = 0; i < sequence.rows; ++i) {
      impl.positions[static_cast<size_t>(sequence.first_row + i)] =
          static_cast<int32_t>(sequence.first_position + i);
    }
    last_position = std::max(last_position, sequence.first_position + sequence.rows);
  }
  impl.extend_rope(last_position);

  Pass pass = impl.pass;
  pass.rows = rows, pass.positions = impl.positions.data(), pass.sequences = sequences;
  pass.cosines = impl.rope.cosines.data(), pass.sines = impl.rope.sines.data();
  const int64_t h = pass.hidden;
  LayerBuffers buffers{};
  float *x = nullptr, *last = nullptr;
  Workspace workspace;
  workspace.want(x, h * rows);
  workspace.want(last, h * sampled);
  workspace.want(buffers.h, h * std::max(rows, sampled));
  workspace.want(buffers.qkv, pass.layout.width() * rows);
  workspace.want(buffers.q, pass.layout.query_width() * rows);
  workspace.want(buffers.k, pass.layout.kv_width() * rows);
  workspace.want(buffers.attention, pass.layout.query_width() * rows);
  workspace.want(buffers.gate_up, 2 * pass.intermediate * rows);
  workspace.want(buffers.s, pass.intermediate * rows);
  // One array for all four, each of which is used up before the next.
  float* low = nullptr;
  workspace.want(low, 3 * impl.rank * rows);
  workspace.lay_out(impl.floats);
  buffers.low_qkv = buffers.low_o = buffers.low_gate_up = buffers.low_down = low;
  buffers.middle = x;

  pool.run_team([&](Team& team) {
    team.for_each((rows + 7) / 8, [&](int64_t block) {
      for (int64_t row = block * 8; row < std::min(rows, block * 8 + 8); ++row) {
        impl.embed(tokens[static_cast<size_t>(row)], x + row * h);
      }
    });
    for (size_t i = 0; i < impl.layers.size(); ++i) {
      layer_forward(team, pass, impl.layers[i].weights, kv.layer(static_cast<int64_t>(i)), buffers,
                    x, x);
    }
    if (sampled == 0) return;
    team.for_each(sampled, [&](int64_t i) {
      std::memcpy(last + i * h, x + logit_rows[static_cast<size_t>(i)] * h,
                  static_cast<size_t>(h) * sizeof(float));
    });
    rms_norm(team, last, sampled, h, impl.final_norm, pass.eps, buffers.h);
    impl.head_product(team, buffers.h, sampled, logits);
  });
}

void check_tokens(const ModelConfig& config, const PackedTokens& batch) {
  const auto count = static_cast<int64_t>(batch.tokens.size());
  if (batch.cu_seqlens.empty() || batch.cu_seqlens.front() != 0 ||
      batch.cu_seqlens.back() != count) {
    throw Error(fmt::format("cu_seqlens must run from 0 to the number of tokens, {}", count));
  }
  for (size_t s = 0; s + 1 < batch.cu_seqlens.size(); ++s) {
    const int64_t first = batch.cu_seqlens[s], last = batch.cu_seqlens[s + 1];
    if (last <= first || last > count) {
      throw Error(
          fmt::format("sequence {}: cu_seqlens go from {} to {}; sequences have at least "
                      "one token",
                      s, first, last));
    }
    if (last - first > config.max_position_embeddings) {
      throw Error(
          fmt::format("sequence {} has {} tokens; the model takes at most {} "
                      "(max_position_embeddings)",
                      s, last - first, config.max_position_embeddings));
    }
    for (int64_t t = first; t < last; ++t) {
      const int32_t id = batch.tokens[static_cast<size_t>(t)];
      if (id < 0 || id >= config.vocab_size) {
        throw Error(
            fmt::format("sequence {}, position {}: token id {} is outside the vocabulary "
                        "of {} (ids 0 to {})",
                        s, t - first, id, config.vocab_size, config.vocab_size - 1));
      }
    }
  }
}

}  // namespace leeway
