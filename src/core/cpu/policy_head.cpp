// Rows are processed in chunks. A chunk's logits are computed, reduced to logprobs, turned into
// their own gradient in place and multiplied twice, and the next chunk reuses their memory.
//
// Rows whose gradient is exactly zero are removed before the second and third product: that saves
// their time, and whatever their hidden states contain cannot reach a gradient.

#include "core/cpu/policy_head.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/aligned.h"
#include "core/participation.h"
#include "kernels/rows.h"
#include "leeway/error.h"
#include "leeway/evaluator.h"

namespace leeway {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kColumnBlock = 4096;  // logits of a row that one thread moves at a time

// Workspace beside the chunk: what gemm packs, and the partial sums of an Evaluator.
constexpr int64_t kEvaluatorBytes = int64_t{320} << 10;
// Bytes per token: the row list, gradients, coefficients and an Evaluator's buffers.
constexpr int64_t kTokenBytes = 96;

int64_t row_count(const HeadProblem& problem) {
  return problem.all_rows ? problem.tokens : static_cast<int64_t>(problem.rows.size());
}

std::vector<int64_t> row_list(const HeadProblem& problem) {
  if (!problem.all_rows) return {problem.rows.begin(), problem.rows.end()};
  std::vector<int64_t> rows(static_cast<size_t>(problem.tokens));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

float temperature_of(const HeadProblem& problem, int64_t token) {
  if (problem.temperature.empty()) return 1.0f;
  return problem.temperature[problem.temperature.size() == 1 ? 0 : static_cast<size_t>(token)];
}

// Row `row` of a matrix as float32.
void copy_row(const Operand& from, int64_t row, int64_t width, float* to) {
  if (from.bf16) {
    const auto* source = static_cast<const uint16_t*>(from.data) + row * from.row_stride;
    for (int64_t j = 0; j < width; ++j) {
      to[j] = std::bit_cast<float>(static_cast<uint32_t>(source[j * from.column_stride]) << 16);
    }
    return;
  }
  const auto* source = static_cast<const float*>(from.data) + row * from.row_stride;
  for (int64_t j = 0; j < width; ++j) to[j] = source[j * from.column_stride];
}

Operand transposed(const Operand& m) { return {m.data, m.column_stride, m.row_stride, m.bf16}; }

// One row of a chunk, but for its numbers in the two matrices.
struct Row {
  int64_t token;
  float inverse_temperature;
  RowStats stats;
  float g, g_entropy;
};

// A token's streams, advantage, coefficient, gradient and mask, gathered for a chunk.
constexpr int64_t kStreamBytes = (kStreamCount + 3) * kFloat + 1;

int64_t row_bytes(const HeadProblem& problem) {
  return (problem.vocabulary + problem.hidden_size) * kFloat +
         static_cast<int64_t>(sizeof(Row) + sizeof(int64_t)) + kStreamBytes;
}

int64_t rows_of_a_chunk(const HeadProblem& problem) {
  const int64_t room = problem.chunk_bytes - kGemmScratchBytes - kEvaluatorBytes;
  return std::clamp<int64_t>(room / row_bytes(problem), 1,
                             std::max<int64_t>(1, row_count(problem)));
}

void check_sizes(const HeadProblem& problem) {
  LEEWAY_CHECK(problem.hidden_size > 0 && problem.vocabulary > 0 && problem.tokens >= 0,
               "the head has a shape");
  LEEWAY_CHECK(static_cast<int64_t>(problem.targets.size()) == problem.tokens,
               "one target per token");
  LEEWAY_CHECK(problem.temperature.size() <= 1 ||
                   static_cast<int64_t>(problem.temperature.size()) == problem.tokens,
               "one temperature for all tokens, or one each");
  LEEWAY_CHECK(!problem.all_rows || problem.rows.empty(), "either all rows or a list of them");
}

// The memory a chunk of rows needs, and what is done to the chunk.
class Chunk {
 public:
  Chunk(ThreadPool& pool, const HeadProblem& problem)
      : pool_(pool),
        problem_(problem),
        capacity_(rows_of_a_chunk(problem)),
        logits_(static_cast<size_t>(capacity_ * problem.vocabulary)),
        hidden_(static_cast<size_t>(capacity_ * problem.hidden_size)) {
    rows_.reserve(static_cast<size_t>(capacity_));
    kept_.reserve(static_cast<size_t>(capacity_));
  }

  int64_t capacity() const { return capacity_; }
  std::span<Row> rows() { return rows_; }

  // Logits and statistics of these tokens, at most `capacity` of them.
  void forward(std::span<const int64_t> tokens, bool want_entropy) {
    rows_.clear();
    for (int64_t token : tokens) {
      rows_.push_back({token, 1.0f / temperature_of(problem_, token), {}, 0.0f, 0.0f});
    }
    const int64_t count = static_cast<int64_t>(rows_.size());
    const int64_t H = problem_.hidden_size, V = problem_.vocabulary;
    pool_.run_team([&](Team& team) {
      team.for_each(count, [&](int64_t i) {
        copy_row(problem_.hidden, rows_[static_cast<size_t>(i)].token, H, hidden_.data() + i * H);
      });
      gemm(team, count, V, H, rows_of(hidden_.data(), H), transposed(problem_.weight),
           logits_.data(), V);
      team.for_each(count, [&](int64_t i) {
        Row& row = rows_[static_cast<size_t>(i)];
        row.stats = row_softmax(logits_.data() + i * V, V, row.inverse_temperature, target_of(row),
                                want_entropy);
      });
    });
  }

  // From the rows' gradients to those of hidden states (written) and weights (added to); either may
  // be empty. Consumes the chunk's logits and hidden states.
  void backward(std::span<float> d_hidden, std::span<float> d_weight) {
    kept_.clear();
    for (size_t i = 0; i < rows_.size(); ++i) {
      if (rows_[i].g == 0.0f && rows_[i].g_entropy == 0.0f) continue;
      rows_[kept_.size()] = rows_[i];
      kept_.push_back(static_cast<int64_t>(i));
    }
    if (kept_.empty()) return;
    const int64_t count = static_cast<int64_t>(kept_.size());
    const int64_t H = problem_.hidden_size, V = problem_.vocabulary;
    pool_.run_team([&](Team& team) {
      if (kept_.size() < rows_.size()) {
        close_gaps(team, kept_, logits_.data(), V);
        close_gaps(team, kept_, hidden_.data(), H);
      }
      team.for_each(count, [&](int64_t i) {
        const Row& row = rows_[static_cast<size_t>(i)];
        row_softmax_backward(logits_.data() + i * V, V, row.inverse_temperature, target_of(row),
                             row.stats, row.g, row.g_entropy);
      });
      if (!d_weight.empty()) {
        gemm(team, V, H, count, columns_of(logits_.data(), V), rows_of(hidden_.data(), H),
             d_weight.data(), H, Start::old_value);
      }
      if (d_hidden.empty()) return;
      gemm(team, count, H, V, rows_of(logits_.data(), V), problem_.weight, hidden_.data(), H);
      team.for_each(count, [&](int64_t i) {
        std::copy_n(hidden_.data() + i * H, H,
                    d_hidden.data() + rows_[static_cast<size_t>(i)].token * H);
      });
    });
  }

 private:
  int64_t target_of(const Row& row) const {
    return problem_.targets[static_cast<size_t>(row.token)];
  }

  // Row from[i] becomes row i. Rows move in order, and each thread moves columns of its own.
  static void close_gaps(Team& team, std::span<const int64_t> from, float* matrix, int64_t width) {
    team.for_each((width + kColumnBlock - 1) / kColumnBlock, [&](int64_t block) {
      const int64_t first = block * kColumnBlock, columns = std::min(kColumnBlock, width - first);
      for (size_t i = 0; i < from.size(); ++i) {
        const int64_t to = static_cast<int64_t>(i);
        if (from[i] == to) continue;
        std::copy_n(matrix + from[i] * width + first, columns, matrix + to * width + first);
      }
    });
  }

  ThreadPool& pool_;
  const HeadProblem& problem_;
  int64_t capacity_;
  AlignedVector<float> logits_;  // [capacity, V]
  AlignedVector<float> hidden_;  // [capacity, H]
  std::vector<Row> rows_;
  std::vector<int64_t> kept_;  // where the rows with a gradient lie
};

// Calls `body(tokens)` for one run of rows after another.
template <class Body>
void for_each_chunk(std::span<const int64_t> rows, int64_t capacity, Body&& body) {
  for (size_t first = 0; first < rows.size(); first += static_cast<size_t>(capacity)) {
    body(rows.subspan(first, std::min(static_cast<size_t>(capacity), rows.size() - first)));
  }
}

// Logits and gradients of those rows that have one.
void backward_of(Chunk& chunk, std::vector<int64_t> rows, std::span<const float> g,
                 std::span<const float> g_entropy, std::span<float> d_hidden,
                 std::span<float> d_weight) {
  auto entropy_part = [&](int64_t token) {
    return g_entropy.empty() ? 0.0f : g_entropy[static_cast<size_t>(token)];
  };
  std::erase_if(rows, [&](int64_t token) {
    return g[static_cast<size_t>(token)] == 0.0f && entropy_part(token) == 0.0f;
  });
  for_each_chunk(rows, chunk.capacity(), [&](std::span<const int64_t> tokens) {
    chunk.forward(tokens, !g_entropy.empty());
    for (Row& row : chunk.rows()) {
      row.g = g[static_cast<size_t>(row.token)];
      row.g_entropy = entropy_part(row.token);
    }
    chunk.backward(d_hidden, d_weight);
  });
}

void set_to_zero(ThreadPool& pool, std::span<float> values) {
  constexpr size_t kBlock = size_t{1} << 16;
  pool.run((values.size() + kBlock - 1) / kBlock, [&](size_t block) {
    const size_t first = block * kBlock;
    std::fill_n(values.begin() + static_cast<std::ptrdiff_t>(first),
                std::min(kBlock, values.size() - first), 0.0f);
  });
}

void write_logprobs(std::span<const Row> rows, std::span<float> logprobs,
                    std::span<float> entropy) {
  for (const Row& row : rows) {
    const size_t token = static_cast<size_t>(row.token);
    logprobs[token] = row.stats.logprob;
    if (!entropy.empty()) entropy[token] = row.stats.entropy;
  }
}

void check_outputs(const HeadProblem& problem, std::span<const float> logprobs,
                   std::span<const float> entropy, std::span<const float> d_hidden,
                   std::span<const float> d_weight) {
  const size_t n = static_cast<size_t>(problem.tokens),
               H = static_cast<size_t>(problem.hidden_size);
  LEEWAY_CHECK(logprobs.size() == n && (entropy.empty() || entropy.size() == n),
               "one log-probability and entropy per token");
  LEEWAY_CHECK(d_hidden.empty() || d_hidden.size() == n * H, "d_hidden is [tokens, hidden]");
  LEEWAY_CHECK(d_weight.empty() || d_weight.size() == static_cast<size_t>(problem.vocabulary) * H,
               "d_weight is [vocabulary, hidden]");
}

// ---------------------------------------------------------------------------------------------
// The loss of a chunk

// What each token's loss is multiplied by: its weight and what the reduction divides it by.
std::vector<float> coefficients(const LossSpec& spec, const BatchView<float>& batch,
                                std::optional<double> denominator) {
  const std::vector<uint8_t> counted = participating(spec, batch);
  const double divisor =
      std::max(1.0, denominator ? *denominator : count_denominator(spec, batch, counted));
  const std::vector<double> scales = sequence_scales(spec, batch, counted, divisor);
  std::vector<float> out(counted.size());
  for (size_t s = 0; s < scales.size(); ++s) {
    for (int64_t t = batch.offsets[s]; t < batch.offsets[s + 1]; ++t) {
      const size_t i = static_cast<size_t>(t);
      out[i] = (batch.weights.empty() ? 1.0f : batch.weights[i]) * static_cast<float>(scales[s]);
    }
  }
  return out;
}

// g of a one-pass spec, some tokens at a time. The tokens of a chunk are evaluated as a batch of
// one sequence that is summed, with the coefficients as weights: no token depends on another one.
class ChunkLoss {
 public:
  ChunkLoss(const LossSpec& spec, const BatchView<float>& batch, std::optional<double> denominator,
            int64_t capacity)
      : spec_(spec), batch_(batch), denominator_(denominator), alone_(spec) {
    alone_.reduction = {.kind = ReductionKind::sum};
    coefficients_ = coefficients(spec, batch, denominator);
    values_.reserve(static_cast<size_t>(capacity * (kStreamCount + 2)));
    mask_.reserve(static_cast<size_t>(capacity));
    g_.reserve(static_cast<size_t>(capacity));
  }

  // Sets g of the rows. The log-probabilities of their tokens and of all earlier ones are known.
  void evaluate(Evaluator& evaluator, std::span<Row> rows) {
    const size_t count = rows.size();
    values_.clear();
    auto gather = [&](std::span<const float> from) -> std::span<const float> {
      if (from.empty()) return {};
      const size_t first = values_.size();
      for (const Row& row : rows) values_.push_back(from[static_cast<size_t>(row.token)]);
      return std::span<const float>(values_).subspan(first, count);
    };
    const int64_t offsets[] = {0, static_cast<int64_t>(count)};
    BatchView<float> part;
    part.offsets = offsets;
    part.pi = gather(batch_.pi);
    part.prox = gather(batch_.prox);
    part.rollout = gather(batch_.rollout);
    part.ref = gather(batch_.ref);
    part.teacher = gather(batch_.teacher);
    part.advantages = gather(batch_.advantages);
    part.weights = gather(coefficients_);
    if (!batch_.mask.empty()) {
      mask_.clear();
      for (const Row& row : rows) mask_.push_back(batch_.mask[static_cast<size_t>(row.token)]);
      part.mask = mask_;
    }
    g_.resize(count);
    try {
      evaluator.evaluate(alone_, part, g_);
    } catch (const Error&) {
      name_the_place(evaluator, rows.back().token);
      throw;
    }
    for (size_t i = 0; i < count; ++i) rows[i].g = g_[i];
  }

 private:
  // Throws the same error for the whole batch, whose sequences the user knows. Tokens after `last`
  // have no logprob yet.
  void name_the_place(Evaluator& evaluator, int64_t last) const {
    std::vector<uint8_t> mask = participating(spec_, batch_);
    std::fill(mask.begin() + last + 1, mask.end(), uint8_t{0});
    BatchView<float> seen = batch_;
    seen.mask = mask;
    std::vector<float> g(mask.size());
    evaluator.evaluate(spec_, seen, g, denominator_);
  }

  const LossSpec& spec_;
  const BatchView<float>& batch_;
  std::optional<double> denominator_;
  LossSpec alone_;
  std::vector<float> coefficients_;  // [N]
  std::vector<float> values_, g_;
  std::vector<uint8_t> mask_;
};

// Whether the spec reads logprobs of tokens outside the mask.
bool looks_everywhere(const LossSpec& spec) {
  return spec.ratio.over == Positions::all ||
         std::any_of(spec.corrections.begin(), spec.corrections.end(), [](const Correction& c) {
           return c.weight && c.weight->over == Positions::all;
         });
}

// Throws Error if a token whose logprob the loss reads is not among the rows.
void check_rows_cover(const HeadProblem& problem, const LossSpec& spec,
                      const BatchView<float>& batch) {
  if (problem.all_rows) return;
  std::vector<uint8_t> missing = participating(spec, batch);
  if (looks_everywhere(spec)) {
    for (size_t i = 0; i < missing.size(); ++i) missing[i] = has_weight(batch, i);
  }
  for (int64_t row : problem.rows) missing[static_cast<size_t>(row)] = 0;
  for (int64_t s = 0; s < batch.sequence_count(); ++s) {
    for (int64_t t = batch.offsets[s]; t < batch.offsets[s + 1]; ++t) {
      const size_t i = static_cast<size_t>(t);
      if (!missing[i]) continue;
      throw Error(fmt::format(
          "sequence {}, position {} (token {}) is not among the rows; {}", s, t - batch.offsets[s],
          t,
          in_mask(batch, i) ? "it takes part in the loss: list every token that does"
                            : "this preset looks at masked positions too, as its source does"));
    }
  }
}

}  // namespace

void check_head(const HeadProblem& problem) {
  check_sizes(problem);
  int64_t before = -1;
  for (size_t i = 0; i < problem.rows.size(); ++i) {
    const int64_t row = problem.rows[i];
    if (row < 0 || row >= problem.tokens) {
      throw Error(fmt::format("rows[{}] = {}: there are {} tokens", i, row, problem.tokens));
    }
    if (row <= before) {
      throw Error(
          fmt::format("rows[{}] = {}: rows must rise, and the one before is {}", i, row, before));
    }
    before = row;
  }
  const int64_t count = row_count(problem);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = problem.all_rows ? i : problem.rows[static_cast<size_t>(i)];
    const int64_t target = problem.targets[static_cast<size_t>(token)];
    if (target < 0 || target >= problem.vocabulary) {
      throw Error(fmt::format("targets[{}] = {}: outside the vocabulary of {}", token, target,
                              problem.vocabulary));
    }
    // The inverse of the smallest positive numbers is not finite either.
    const float temperature = temperature_of(problem, token);
    if (!(temperature > 0.0f) || !std::isfinite(temperature) ||
        !std::isfinite(1.0f / temperature)) {
      throw Error(fmt::format("temperature[{}] = {}: must be positive and finite",
                              problem.temperature.size() == 1 ? 0 : token, temperature));
    }
  }
}

int64_t head_workspace_bytes(const HeadProblem& problem) {
  return rows_of_a_chunk(problem) * row_bytes(problem) + kGemmScratchBytes + kEvaluatorBytes +
         problem.tokens * kTokenBytes;
}

void head_logprobs(ThreadPool& pool, const HeadProblem& problem, std::span<float> logprobs,
                   std::span<float> entropy) {
  check_head(problem);
  check_outputs(problem, logprobs, entropy, {}, {});
  std::fill(logprobs.begin(), logprobs.end(), 0.0f);
  std::fill(entropy.begin(), entropy.end(), 0.0f);
  const std::vector<int64_t> rows = row_list(problem);
  Chunk chunk(pool, problem);
  for_each_chunk(rows, chunk.capacity(), [&](std::span<const int64_t> tokens) {
    chunk.forward(tokens, !entropy.empty());
    write_logprobs(chunk.rows(), logprobs, entropy);
  });
}

void head_backward(ThreadPool& pool, const HeadProblem& problem, std::span<const float> g,
                   std::span<const float> g_entropy, std::span<float> d_hidden,
                   std::span<float> d_weight) {
  check_head(problem);
  check_outputs(problem, g, g_entropy, d_hidden, d_weight);
  set_to_zero(pool, d_hidden);
  if (d_hidden.empty() && d_weight.empty()) return;
  Chunk chunk(pool, problem);
  backward_of(chunk, row_list(problem), g, g_entropy, d_hidden, d_weight);
}

bool one_pass(const LossSpec& spec) {
  // Statistics of a sequence or of the batch.
  if (spec.needs_sequence_statistics() || spec.m2_threshold || spec.covariance_selection ||
      spec.weight_normalisation != WeightNormalisation::none) {
    return false;
  }
  // A denominator that depends on the log-probabilities or on the longest sequence.
  if (spec.denominator_depends_on_pi() || spec.reduction.denominator != Denominator::original ||
      spec.reduction.kind == ReductionKind::padded_length_mean) {
    return false;
  }
  // Masked positions that take part.
  if (spec.positions != Positions::trained || spec.ratio.over != Positions::trained ||
      spec.shaping.times_mask) {
    return false;
  }
  if (spec.ratio.level != Level::token || spec.ratio.signed_log_clip) return false;
  for (const Gate& gate : spec.gates) {
    if (gate.level != Level::token) return false;
  }
  for (const Penalty& penalty : spec.penalties) {
    if (penalty.gate == PenaltyGate::selected) return false;
  }
  // A user function may look at its whole sequence; the built-in weight declares what it reads.
  for (const Correction& correction : spec.corrections) {
    if (!correction.weight || correction.weight->level != Level::token ||
        correction.weight->over != Positions::trained) {
      return false;
    }
  }
  return true;
}

HeadResult policy_head(ThreadPool& pool, const HeadProblem& problem, const LossSpec& spec,
                       const BatchView<float>& batch, std::optional<double> denominator,
                       std::span<float> logprobs, std::span<float> entropy,
                       std::span<float> d_hidden, std::span<float> d_weight,
                       std::span<uint8_t> kept) {
  check_head(problem);
  check_outputs(problem, logprobs, entropy, d_hidden, d_weight);
  LEEWAY_CHECK(batch.token_count() == problem.tokens, "the batch holds the head's tokens");
  BatchView<float> scored = batch;
  scored.pi = logprobs;
  check_streams(spec, scored);
  check_rows_cover(problem, spec, scored);
  std::fill(logprobs.begin(), logprobs.end(), 0.0f);
  std::fill(entropy.begin(), entropy.end(), 0.0f);
  set_to_zero(pool, d_hidden);

  // With all rows in one chunk the logits are still in memory when the whole batch has been
  // evaluated, so that one pass is enough for any spec.
  Chunk chunk(pool, problem);
  std::vector<int64_t> rows = row_list(problem);
  const bool wants_gradient = !d_hidden.empty() || !d_weight.empty();
  const bool logits_stay = static_cast<int64_t>(rows.size()) <= chunk.capacity();
  Evaluator evaluator(1);  // one thread: its share of the time is nothing beside the logits'
  std::optional<ChunkLoss> chunk_loss;
  if (wants_gradient && !logits_stay && one_pass(spec)) {
    chunk_loss.emplace(spec, scored, denominator, chunk.capacity());
  }
  for_each_chunk(rows, chunk.capacity(), [&](std::span<const int64_t> tokens) {
    chunk.forward(tokens, !entropy.empty());
    write_logprobs(chunk.rows(), logprobs, entropy);
    if (!chunk_loss) return;
    chunk_loss->evaluate(evaluator, chunk.rows());
    chunk.backward(d_hidden, d_weight);
  });

  HeadResult result;
  std::vector<float> g(static_cast<size_t>(problem.tokens));
  result.loss = evaluator.evaluate(spec, scored, g, denominator, &result.metrics, kept);
  if (!wants_gradient || chunk_loss) return result;
  if (logits_stay) {
    for (Row& row : chunk.rows()) row.g = g[static_cast<size_t>(row.token)];
    chunk.backward(d_hidden, d_weight);
  } else {
    backward_of(chunk, std::move(rows), g, {}, d_hidden, d_weight);
  }
  return result;
}

}  // namespace leeway
