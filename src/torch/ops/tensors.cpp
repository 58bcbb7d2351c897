#include "torch/ops/tensors.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>
#include <limits>
#include <memory>

namespace leeway {
namespace {

std::string dtype_text(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return "float32";
    case at::kDouble: return "float64";
    case at::kHalf: return "float16";
    case at::kBFloat16: return "bfloat16";
    case at::kBool: return "bool";
    case at::kByte: return "uint8";
    case at::kInt: return "int32";
    case at::kLong: return "int64";
    default: return c10::toString(type);
  }
}

std::string text_of(const Tensor& t) {
  return fmt::format("{} [{}]", dtype_text(t.scalar_type()), fmt::join(t.sizes(), ", "));
}

// `must` completes "NAME must be". Devices are torch's to tell apart: a kernel of the CPU sees the
// CPU's tensors alone.
void check_argument(bool right, const Tensor& t, const char* name, const std::string& must) {
  TORCH_CHECK_VALUE(right, name, " must be ", must, ", got ", text_of(t));
}

std::string tokens_text(int64_t tokens, const char* of) {
  return fmt::format("[{}], one value for each token of {}", tokens, of);
}

bool is_vector(const Tensor& t, int64_t size) { return t.dim() == 1 && t.size(0) == size; }

Operand operand_of(const Tensor& matrix) {
  return {matrix.data_ptr(), matrix.stride(0), matrix.stride(1),
          matrix.scalar_type() == at::kBFloat16};
}

template <class T>
std::span<const T> values_of(const Tensor& t) {
  return {t.data_ptr<T>(), static_cast<size_t>(t.numel())};
}

void check_matrix(const Tensor& t, const char* name, const char* shape) {
  check_argument(t.dim() == 2, t, name, shape);
  check_argument(t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16, t, name,
                 "float32 or bfloat16");
}

std::vector<int64_t> checked_offsets(const Tensor& t, int64_t tokens, const char* of) {
  const Tensor wide = t.to(at::kLong).contiguous();
  const std::span<const int64_t> ends = values_of<int64_t>(wide);
  TORCH_CHECK_VALUE(ends.front() == 0, "cu_seqlens[0] = ", ends.front(), ": must be 0");
  for (size_t i = 1; i < ends.size(); ++i) {
    TORCH_CHECK_VALUE(ends[i] >= ends[i - 1], "cu_seqlens[", i, "] = ", ends[i],
                      ": must not be below the one before, ", ends[i - 1]);
  }
  TORCH_CHECK_VALUE(ends.back() == tokens, "cu_seqlens ends at ", ends.back(), ", but ", of,
                    " has ", tokens, " tokens");
  return {ends.begin(), ends.end()};
}

std::vector<int32_t> checked_int32(const Tensor& t, const char* name) {
  const Tensor wide = t.to(at::kLong).contiguous();
  std::vector<int32_t> narrow;
  for (int64_t value : values_of<int64_t>(wide)) {
    TORCH_CHECK_VALUE(value >= std::numeric_limits<int32_t>::min() &&
                          value <= std::numeric_limits<int32_t>::max(),
                      name, "[", narrow.size(), "] = ", value, ": must fit 32 bits");
    narrow.push_back(static_cast<int32_t>(value));
  }
  return narrow;
}

struct Pool {
  std::mutex mutex;
  std::unique_ptr<ThreadPool> threads;
};

Pool& process_pool() {
  static Pool pool;
  return pool;
}

}  // namespace

Tensor checked_stream(const Tensor& values, const char* name, int64_t tokens, const char* of) {
  check_argument(values.scalar_type() == at::kFloat, values, name, "float32");
  check_argument(is_vector(values, tokens), values, name, tokens_text(tokens, of));
  return values.contiguous();
}

std::span<const float> floats_of(const Tensor& values) { return values_of<float>(values); }

std::span<float> writable_floats_of(const Tensor& values) {
  return {values.data_ptr<float>(), static_cast<size_t>(values.numel())};
}

void check_head_tensors(const Tensor& hidden, const Tensor& weight,
                        const HeadArguments& arguments) {
  check_matrix(hidden, "hidden", "[tokens, hidden size]");
  check_matrix(weight, "weight", "[vocabulary, hidden size]");
  TORCH_CHECK_VALUE(hidden.scalar_type() == weight.scalar_type(),
                    "hidden and weight must have one dtype, got ", text_of(hidden), " and ",
                    text_of(weight), "; convert one of them");
  check_argument(hidden.size(1) >= 1, hidden, "hidden", "of hidden size 1 or more");
  check_argument(weight.size(0) >= 1, weight, "weight", "of vocabulary 1 or more");
  TORCH_CHECK_VALUE(hidden.size(1) == weight.size(1),
                    "hidden and weight must have the same hidden size, got ", text_of(hidden),
                    " and ", text_of(weight));
  const int64_t tokens = hidden.size(0);
  check_argument(arguments.targets.scalar_type() == at::kLong, arguments.targets, "targets",
                 "int64");
  check_argument(is_vector(arguments.targets, tokens), arguments.targets, "targets",
                 tokens_text(tokens, "hidden"));
  if (arguments.rows) {
    check_argument(arguments.rows->scalar_type() == at::kLong, *arguments.rows, "rows", "int64");
    check_argument(arguments.rows->dim() == 1, *arguments.rows, "rows",
                   "[rows], positions of tokens");
  }
  if (arguments.temperature) {
    const Tensor& temperature = *arguments.temperature;
    check_argument(temperature.scalar_type() == at::kFloat, temperature, "temperature", "float32");
    check_argument(
        temperature.dim() == 0 || is_vector(temperature, 1) || is_vector(temperature, tokens),
        temperature, "temperature", fmt::format("one number, or [{}], one for each token", tokens));
  }
  TORCH_CHECK_VALUE(arguments.settings.chunk_bytes >= 0,
                    "chunk_bytes = ", arguments.settings.chunk_bytes, ": must be 0 or more");
}

HeadTensors::HeadTensors(const Tensor& hidden, const Tensor& weight, const HeadArguments& arguments)
    : hidden_(hidden), weight_(weight) {
  check_head_tensors(hidden, weight, arguments);
  targets_ = arguments.targets.contiguous();
  problem_.tokens = hidden.size(0);
  problem_.hidden_size = hidden.size(1);
  problem_.vocabulary = weight.size(0);
  problem_.hidden = operand_of(hidden);
  problem_.weight = operand_of(weight);
  problem_.targets = values_of<int64_t>(targets_);
  if (arguments.rows) {
    rows_ = arguments.rows->contiguous();
    problem_.all_rows = false;
    problem_.rows = values_of<int64_t>(rows_);
  }
  if (arguments.temperature) {
    temperature_ = arguments.temperature->contiguous();
    problem_.temperature = floats_of(temperature_);
  }
  if (arguments.settings.chunk_bytes > 0) problem_.chunk_bytes = arguments.settings.chunk_bytes;
  check_head(problem_);
}

void check_loss_tensors(const LossArguments& arguments, int64_t tokens, const char* of) {
  const Tensor& offsets = arguments.cu_seqlens;
  check_argument(offsets.scalar_type() == at::kInt || offsets.scalar_type() == at::kLong, offsets,
                 "cu_seqlens", "int32 or int64");
  check_argument(offsets.dim() == 1 && offsets.size(0) >= 2, offsets, "cu_seqlens",
                 "[sequences + 1] with at least one sequence");
  const Tensor& mask = arguments.mask;
  check_argument(mask.scalar_type() == at::kBool || mask.scalar_type() == at::kByte, mask, "mask",
                 "bool or uint8");
  check_argument(is_vector(mask, tokens), mask, "mask", tokens_text(tokens, of));
  const auto check_stream = [&](const Tensor& values, const char* name) {
    check_argument(values.scalar_type() == at::kFloat, values, name, "float32");
    check_argument(is_vector(values, tokens), values, name, tokens_text(tokens, of));
  };
  check_stream(arguments.advantages, "advantages");
  check_stream(arguments.rollout_logprobs, "rollout_logprobs");
  if (arguments.prox_logprobs) check_stream(*arguments.prox_logprobs, "prox_logprobs");
  if (arguments.ref_logprobs) check_stream(*arguments.ref_logprobs, "ref_logprobs");
  if (arguments.teacher_logprobs) check_stream(*arguments.teacher_logprobs, "teacher_logprobs");
  if (arguments.weights) check_stream(*arguments.weights, "weights");
  if (arguments.versions) {
    const Tensor& versions = *arguments.versions;
    check_argument(versions.scalar_type() == at::kInt || versions.scalar_type() == at::kLong,
                   versions, "versions", "int32 or int64");
    check_argument(is_vector(versions, tokens), versions, "versions", tokens_text(tokens, of));
  }
  if (arguments.rollout_ids) {
    const Tensor& ids = *arguments.rollout_ids;
    const int64_t sequences = offsets.size(0) - 1;
    check_argument(ids.scalar_type() == at::kInt || ids.scalar_type() == at::kLong, ids,
                   "rollout_ids", "int32 or int64");
    check_argument(is_vector(ids, sequences), ids, "rollout_ids",
                   fmt::format("[{}], one value for each sequence", sequences));
  }
  TORCH_CHECK_VALUE(!arguments.prox_is_pi || !arguments.prox_logprobs,
                    "prox_logprobs are given, and so is prox_is_pi: give one of them");
  if (arguments.correction_weights) {
    check_stream(*arguments.correction_weights, "correction_weights");
  }
  if (arguments.correction_mask) {
    const Tensor& keep = *arguments.correction_mask;
    check_argument(keep.scalar_type() == at::kBool || keep.scalar_type() == at::kByte, keep,
                   "correction_mask", "bool or uint8");
    check_argument(is_vector(keep, tokens), keep, "correction_mask", tokens_text(tokens, of));
  }
  TORCH_CHECK_VALUE(std::isfinite(arguments.denominator), "denominator = ", arguments.denominator,
                    ": must be finite; negative means the batch's own");
}

BatchTensors::BatchTensors(const LossArguments& arguments, int64_t tokens, const char* of) {
  check_loss_tensors(arguments, tokens, of);
  offsets_ = checked_offsets(arguments.cu_seqlens, tokens, of);
  view_.offsets = offsets_;
  held_.push_back(arguments.mask.contiguous());
  view_.mask = {static_cast<const uint8_t*>(held_.back().data_ptr()), static_cast<size_t>(tokens)};

  auto stream = [&](const Tensor& values) {
    held_.push_back(values.contiguous());
    return floats_of(held_.back());
  };
  auto optional_stream = [&](const OptionalTensor& values) {
    return values ? stream(*values) : std::span<const float>();
  };
  view_.advantages = stream(arguments.advantages);
  view_.rollout = stream(arguments.rollout_logprobs);
  view_.prox = optional_stream(arguments.prox_logprobs);
  view_.ref = optional_stream(arguments.ref_logprobs);
  view_.teacher = optional_stream(arguments.teacher_logprobs);
  view_.weights = optional_stream(arguments.weights);
  if (arguments.versions) {
    versions_ = checked_int32(*arguments.versions, "versions");
    view_.versions = versions_;
  }
  if (arguments.rollout_ids) {
    rollout_ids_ = checked_int32(*arguments.rollout_ids, "rollout_ids");
    view_.rollout_ids = rollout_ids_;
  }
  correction_weights_ = optional_stream(arguments.correction_weights);
  if (arguments.correction_mask) {
    held_.push_back(arguments.correction_mask->contiguous());
    correction_mask_ = {static_cast<const uint8_t*>(held_.back().data_ptr()),
                        static_cast<size_t>(tokens)};
  }
  if (arguments.denominator >= 0.0) denominator_ = arguments.denominator;
}

Tensor metrics_tensor(const MetricSums& sums, const BatchView<float>& batch) {
  MetricSums marked = sums;
  if (batch.ref.empty()) marked[Slot::ref_kl] = std::nan("");
  if (batch.teacher.empty()) marked[Slot::teacher_kl] = std::nan("");
  const std::vector<double> flat = marked.flatten();
  Tensor row = at::empty({static_cast<int64_t>(flat.size())}, at::kDouble);
  std::copy(flat.begin(), flat.end(), row.data_ptr<double>());
  return row;
}

PoolLease::PoolLease() : lock_(process_pool().mutex) {
  std::unique_ptr<ThreadPool>& threads = process_pool().threads;
  const int wanted = at::get_num_threads();
  if (threads && threads->threads() == wanted) return;
  threads.reset();  // the old threads end before the new ones begin
  threads = std::make_unique<ThreadPool>(wanted);
}

ThreadPool& PoolLease::operator*() const { return *process_pool().threads; }

void refuse_second_derivative(const char* op) {
  TORCH_CHECK(!at::GradMode::is_enabled(), "leeway::", op,
              " has no second derivative: call backward without create_graph");
}

}  // namespace leeway
