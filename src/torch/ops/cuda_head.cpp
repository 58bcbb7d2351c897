#include "torch/ops/cuda_head.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

#include "leeway/error.h"
#include "leeway/metrics.h"
#include "torch/cuda_tensors.h"

namespace leeway::cuda {
namespace {

template <class T>
T* pointer(const Tensor& t) {
  return t.defined() ? static_cast<T*>(t.data_ptr()) : nullptr;
}

Tensor contiguous(const Tensor& t) { return t.defined() ? t.contiguous() : t; }

// The head's tensors as kernels read them, held until the call has queued its work.
struct HeldHead {
  explicit HeldHead(const HeadTensors& head) {
    hidden = head.hidden.stride(1) == 1 || head.hidden.size(1) == 1 ? head.hidden
                                                                    : head.hidden.contiguous();
    weight = head.weight.contiguous();
    targets = head.targets.contiguous();
    // Rows rise, so a list of as many as there are tokens is every token, which needs no gathering.
    const bool is_every = head.rows.defined() && head.rows.size(0) == hidden.size(0);
    if (!is_every) rows = contiguous(head.rows);
    temperature = contiguous(head.temperature);
    problem.tokens = hidden.size(0);
    problem.row_count = rows.defined() ? rows.size(0) : problem.tokens;
    // An empty list is still a list, but torch gives it no address.
    if (rows.defined() && rows.numel() == 0) rows = at::zeros({1}, rows.options());
    problem.hidden_size = hidden.size(1);
    problem.vocabulary = weight.size(0);
    problem.type = dtype_of(hidden);
    problem.hidden = hidden.data_ptr();
    problem.hidden_stride = problem.tokens > 1 ? hidden.stride(0) : problem.hidden_size;
    problem.weight = weight.data_ptr();
    problem.targets = pointer<int64_t>(targets);
    problem.rows = rows.defined() ? pointer<int64_t>(rows) : nullptr;
    problem.temperature = pointer<float>(temperature);
    problem.temperature_per_token =
        temperature.defined() && temperature.dim() == 1 && temperature.size(0) == problem.tokens;
  }

  Tensor hidden, weight, targets, rows, temperature;
  HeadProblem problem;
};

struct HeldBatch {
  HeldBatch(const LossTensors& tensors, int64_t tokens) {
    const auto hold = [&](const Tensor& t) {
      held.push_back(contiguous(t));
      return held.back();
    };
    batch.tokens = tokens;
    batch.sequences = tensors.cu_seqlens.size(0) - 1;
    batch.offsets = pointer<int64_t>(hold(tensors.cu_seqlens));
    batch.mask = pointer<uint8_t>(hold(tensors.mask));
    batch.advantages = pointer<float>(hold(tensors.advantages));
    batch.weights = pointer<float>(hold(tensors.weights));
    batch.versions = pointer<int32_t>(hold(tensors.versions));
    batch.rollout_ids = pointer<int32_t>(hold(tensors.rollout_ids));
    batch.correction_weights = pointer<float>(hold(tensors.correction_weights));
    batch.correction_mask = pointer<uint8_t>(hold(tensors.correction_mask));
    const auto stream = [&](Stream s, const Tensor& t) {
      batch.streams[static_cast<int>(s)] = pointer<float>(hold(t));
    };
    stream(Stream::rollout, tensors.rollout);
    stream(Stream::prox, tensors.prox);
    stream(Stream::ref, tensors.ref);
    stream(Stream::teacher, tensors.teacher);
    batch.prox_is_pi = tensors.prox_is_pi;
    batch.kept = pointer<uint8_t>(tensors.kept);
  }

  std::vector<Tensor> held;
  LossBatch batch;
};

void check_reads(const PlannedSpec& spec, const LossBatch& batch) {
  for (int k = 0; k < kStreamCount; ++k) {
    const Stream stream = static_cast<Stream>(k);
    const bool is_read = (spec.plan.reads >> k & 1u) != 0;
    const bool is_pi = stream == Stream::pi || (stream == Stream::prox && batch.prox_is_pi);
    if (is_pi || batch.streams[k] != nullptr || !is_read || batch.tokens == 0) continue;
    throw Error("preset " + spec.preset + " reads the stream \"" + name_of(stream) +
                "\", which the batch does not have");
  }
}

Tensor bytes_on(const Tensor& like, int64_t bytes) {
  return at::empty({bytes}, like.options().dtype(at::kByte));
}

HeadGradients gradients_of(const Tensor& d_hidden, const Tensor& d_weight, bool is_new) {
  HeadGradients gradients;
  gradients.d_weight_is_new = is_new;
  gradients.d_hidden = pointer<void>(d_hidden);
  gradients.d_weight = pointer<void>(d_weight);
  if (d_weight.defined()) gradients.d_weight_type = dtype_of(d_weight);
  return gradients;
}

double denominator_of(const std::optional<double>& denominator) {
  return denominator.value_or(-1.0);
}

}  // namespace

std::pair<Tensor, Tensor> head_logprobs(const HeadTensors& head, const HeadOptions& options) {
  const c10::cuda::CUDAGuard guard(head.hidden.device());
  const HeldHead held(head);
  check_head(held.problem, options);
  const auto floats = head.hidden.options().dtype(at::kFloat);
  const Tensor logprobs = at::empty({held.problem.tokens}, floats),
               entropy = at::empty_like(logprobs);
  const Tensor workspace =
      bytes_on(head.hidden, head_workspace_bytes(held.problem, options, nullptr, 0));
  head_logprobs(at::cuda::getCurrentCUDABlasHandle(), at::cuda::getCurrentCUDAStream(),
                held.problem, options, workspace.data_ptr(), pointer<float>(logprobs),
                pointer<float>(entropy));
  return {logprobs, entropy};
}

void head_backward(const HeadTensors& head, const Tensor& g, const Tensor& g_entropy,
                   const Tensor& d_hidden, const Tensor& d_weight, const HeadOptions& options,
                   bool d_weight_is_new) {
  const c10::cuda::CUDAGuard guard(head.hidden.device());
  const HeldHead held(head);
  check_head(held.problem, options);
  const Tensor by_logprob = g.contiguous(), by_entropy = contiguous(g_entropy);
  const Tensor workspace =
      bytes_on(head.hidden, head_workspace_bytes(held.problem, options, nullptr, 0));
  head_backward(at::cuda::getCurrentCUDABlasHandle(), at::cuda::getCurrentCUDAStream(),
                held.problem, options, workspace.data_ptr(), pointer<float>(by_logprob),
                pointer<float>(by_entropy), gradients_of(d_hidden, d_weight, d_weight_is_new));
}

HeadLoss head_loss(const HeadTensors& head, const PlannedSpec& spec, const LossTensors& batch,
                   std::optional<double> denominator, const Tensor& d_hidden,
                   const Tensor& d_weight, const HeadOptions& options, bool d_weight_is_new) {
  const c10::cuda::CUDAGuard guard(head.hidden.device());
  const HeldHead held(head);
  check_head(held.problem, options);
  const LossPlan& plan = spec.plan;
  const HeldBatch streams(batch, held.problem.tokens);
  check_reads(spec, streams.batch);
  const auto floats = head.hidden.options().dtype(at::kFloat);
  HeadLoss out;
  out.loss = at::empty({}, floats);
  out.logprobs = at::empty({held.problem.tokens}, floats);
  out.entropy = at::empty_like(out.logprobs);
  out.metrics = at::empty({MetricSums::kFlatSize}, floats.dtype(at::kDouble));
  const Tensor workspace = bytes_on(
      head.hidden, head_workspace_bytes(held.problem, options, &plan, streams.batch.sequences));
  policy_head(at::cuda::getCurrentCUDABlasHandle(), at::cuda::getCurrentCUDAStream(), held.problem,
              options, workspace.data_ptr(), plan, streams.batch, denominator_of(denominator),
              pointer<float>(out.loss), pointer<float>(out.logprobs), pointer<float>(out.entropy),
              pointer<double>(out.metrics), gradients_of(d_hidden, d_weight, d_weight_is_new));
  return out;
}

TokenLoss token_loss(const Tensor& logprobs, const PlannedSpec& spec, const LossTensors& batch,
                     std::optional<double> denominator) {
  const c10::cuda::CUDAGuard guard(logprobs.device());
  const LossPlan& plan = spec.plan;
  const Tensor pi = logprobs.contiguous();
  HeldBatch streams(batch, pi.size(0));
  streams.batch.streams[static_cast<int>(Stream::pi)] = pointer<float>(pi);
  check_reads(spec, streams.batch);
  TokenLoss out;
  out.loss = at::empty({}, pi.options());
  out.g = at::empty_like(pi);
  out.metrics = at::empty({MetricSums::kFlatSize}, pi.options().dtype(at::kDouble));
  const int64_t sequences = streams.batch.sequences;
  const Tensor workspace = bytes_on(pi, loss_workspace_bytes(plan, pi.size(0), sequences));
  policy_loss(plan, streams.batch, denominator_of(denominator), pointer<float>(out.g),
              pointer<float>(out.loss), pointer<double>(out.metrics),
              lay_out_loss(plan, pi.size(0), sequences, workspace.data_ptr()), false,
              at::cuda::getCurrentCUDAStream());
  return out;
}

Tensor scaled(const Tensor& gradient, const Tensor& factor) {
  const c10::cuda::CUDAGuard guard(gradient.device());
  const Tensor by = factor.to(at::kFloat).contiguous();
  scale_in_place(gradient.data_ptr(), gradient.numel(), dtype_of(gradient), pointer<float>(by),
                 at::cuda::getCurrentCUDAStream());
  return gradient;
}

}  // namespace leeway::cuda
