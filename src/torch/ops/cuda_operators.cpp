// The operators' kernels for CUDA tensors. Nothing here reads values back from the device, but for
// losses with a correction that is a function of the host, which are computed there between the
// head's two stages. What the CPU checks (rows or cu_seqlens out of order) is the caller's
// responsibility; numbers that are not finite, and a trained token's target outside the vocabulary,
// make the loss NaN.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <limits>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "torch/ops/cuda_head.h"
#include "torch/ops/spec_json.h"
#include "torch/ops/tensors.h"

namespace leeway::cuda {
namespace {

using TwoTensors = std::tuple<Tensor, Tensor>;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using SixTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Parsing a spec takes longer than some kernels, so each text is parsed once. What the caller
// computes of it is not part of the plan; `given` says whether the call has that. Null for a loss
// that the host computes.
std::shared_ptr<const PlannedSpec> spec_of(const std::string& json, bool given = false) {
  static std::mutex mutex;
  static std::unordered_map<std::string, std::shared_ptr<const PlannedSpec>> known;
  static int64_t generation = -1;
  const std::lock_guard lock(mutex);
  if (known.size() > 256 || generation != catalog_generation()) known.clear();
  generation = catalog_generation();
  const std::string name = (given ? "+" : "-") + json;
  if (const auto found = known.find(name); found != known.end()) return found->second;
  const LossSpec spec = spec_from_json(json);
  check_given(spec, given);
  const LossSpec own = without_callers(spec);
  std::shared_ptr<PlannedSpec> planned;
  if (has_complete_plan(own)) planned = std::make_shared<PlannedSpec>(own);
  if (planned && given) planned->plan.token_level = false;
  return known.emplace(name, planned).first->second;
}

Tensor tensor_of(const OptionalTensor& t) { return t ? *t : Tensor(); }

void check_device(const Tensor& t, const char* name, const Tensor& like, const char* like_name) {
  TORCH_CHECK_VALUE(!t.defined() || t.device() == like.device(), name, " must be on ", like_name,
                    "'s device ", like.device(), ", got ", t.device());
}

HeadTensors head_of(const Tensor& hidden, const Tensor& weight, const HeadArguments& arguments) {
  check_head_tensors(hidden, weight, arguments);
  HeadTensors head{hidden, weight, arguments.targets, tensor_of(arguments.rows),
                   tensor_of(arguments.temperature)};
  check_device(weight, "weight", hidden, "hidden");
  check_device(head.targets, "targets", hidden, "hidden");
  check_device(head.rows, "rows", hidden, "hidden");
  check_device(head.temperature, "temperature", hidden, "hidden");
  return head;
}

LossTensors batch_of(const LossArguments& a, const Tensor& like, int64_t tokens, const char* of) {
  check_loss_tensors(a, tokens, of);
  LossTensors batch;
  batch.cu_seqlens = a.cu_seqlens.to(like.device(), at::kLong);
  batch.mask = a.mask;
  batch.advantages = a.advantages;
  batch.rollout = a.rollout_logprobs;
  batch.prox = tensor_of(a.prox_logprobs);
  batch.ref = tensor_of(a.ref_logprobs);
  batch.teacher = tensor_of(a.teacher_logprobs);
  batch.weights = tensor_of(a.weights);
  check_device(batch.mask, "mask", like, of);
  check_device(batch.advantages, "advantages", like, of);
  check_device(batch.rollout, "rollout_logprobs", like, of);
  check_device(batch.prox, "prox_logprobs", like, of);
  check_device(batch.ref, "ref_logprobs", like, of);
  check_device(batch.teacher, "teacher_logprobs", like, of);
  check_device(batch.weights, "weights", like, of);
  if (a.versions) {
    check_device(*a.versions, "versions", like, of);
    batch.versions = a.versions->to(at::kInt);
  }
  if (a.rollout_ids) batch.rollout_ids = a.rollout_ids->to(like.device(), at::kInt);
  batch.prox_is_pi = a.prox_is_pi;
  batch.correction_weights = tensor_of(a.correction_weights);
  batch.correction_mask = tensor_of(a.correction_mask);
  check_device(batch.correction_weights, "correction_weights", like, of);
  check_device(batch.correction_mask, "correction_mask", like, of);
  return batch;
}

Tensor weight_gradient_for(const Tensor& weight, bool float32) {
  return at::empty(weight.sizes(),
                   weight.options().dtype(float32 ? at::kFloat : weight.scalar_type()));
}

// A gradient that is not wanted: tensors that leave an operator are defined.
Tensor or_empty(const Tensor& t, const at::TensorOptions& options) {
  return t.defined() ? t : at::empty({0}, options);
}

std::optional<double> denominator_of(double value) {
  return value < 0.0 ? std::nullopt : std::optional(value);
}

TwoTensors token_logprobs_cuda(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                               const OptionalTensor& rows, const OptionalTensor& temperature,
                               int64_t chunk_bytes, bool invariant, bool float32_logits,
                               bool float32_weight_gradient) {
  const HeadSettings settings{chunk_bytes, invariant, float32_logits, float32_weight_gradient};
  const auto [logprobs, entropy] = with_value_errors([&] {
    return head_logprobs(head_of(hidden, weight, {targets, rows, temperature, settings}),
                         {chunk_bytes, invariant, float32_logits});
  });
  return {logprobs, entropy};
}

TwoTensors backward_cuda(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                         const OptionalTensor& g, const OptionalTensor& g_entropy,
                         const OptionalTensor& rows, const OptionalTensor& temperature,
                         int64_t chunk_bytes, bool invariant, bool float32_logits,
                         bool float32_weight_gradient, bool want_hidden, bool want_weight) {
  const HeadSettings settings{chunk_bytes, invariant, float32_logits, float32_weight_gradient};
  const HeadTensors head = head_of(hidden, weight, {targets, rows, temperature, settings});
  const int64_t tokens = hidden.size(0);
  const Tensor by_logprob = g ? checked_stream(*g, "g", tokens, "hidden")
                              : at::zeros({tokens}, hidden.options().dtype(at::kFloat));
  const Tensor by_entropy =
      g_entropy ? checked_stream(*g_entropy, "g_entropy", tokens, "hidden") : Tensor();
  check_device(by_logprob, "g", hidden, "hidden");
  Tensor d_hidden, d_weight;
  if (want_hidden) d_hidden = at::empty(hidden.sizes(), hidden.options());
  if (want_weight) d_weight = weight_gradient_for(weight, float32_weight_gradient);
  if (want_hidden || want_weight) {
    head_backward(head, by_logprob, by_entropy, d_hidden, d_weight,
                  {chunk_bytes, invariant, float32_logits}, true);
  }
  return {or_empty(d_hidden, hidden.options()), or_empty(d_weight, weight.options())};
}

TwoTensors head_backward_cuda(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                              const Tensor& g, const OptionalTensor& rows,
                              const OptionalTensor& temperature, int64_t chunk_bytes,
                              bool invariant, bool float32_logits, bool float32_weight_gradient) {
  return backward_cuda(hidden, weight, targets, g, {}, rows, temperature, chunk_bytes, invariant,
                       float32_logits, float32_weight_gradient, true, true);
}

// ---------------------------------------------------------------------------------------------
// Losses that the host computes, from a few numbers per token that are copied there and back

Tensor on_host(const Tensor& t) { return t.to(at::kCPU); }
OptionalTensor on_host(const OptionalTensor& t) {
  return t ? OptionalTensor(on_host(*t)) : OptionalTensor();
}

// loss, g, metrics, on the device.
ThreeTensors loss_on_host(const Tensor& logprobs, const LossArguments& a) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("leeway::policy_loss", "")
          .typed<ThreeTensors(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                              const Tensor&, const OptionalTensor&, const OptionalTensor&,
                              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                              std::string, double, const OptionalTensor&, const OptionalTensor&,
                              const OptionalTensor&)>();
  const auto [loss, g, metrics] =
      op.call(on_host(logprobs), on_host(a.cu_seqlens), on_host(a.mask), on_host(a.advantages),
              on_host(a.rollout_logprobs), on_host(a.prox_logprobs), on_host(a.ref_logprobs),
              on_host(a.teacher_logprobs), on_host(a.weights), on_host(a.versions), a.spec_json,
              a.denominator, on_host(a.rollout_ids), on_host(a.correction_weights),
              on_host(a.correction_mask));
  const at::Device device = logprobs.device();
  return {loss.to(device), g.to(device), metrics.to(device)};
}

HeadLoss head_loss_on_host(const HeadTensors& head, LossArguments arguments, const Tensor& d_hidden,
                           const Tensor& d_weight, const HeadOptions& options) {
  HeadLoss out;
  std::tie(out.logprobs, out.entropy) = head_logprobs(head, options);
  Tensor pi = out.logprobs;
  if (head.rows.defined()) {  // a trained token that is not computed must show
    pi = at::full_like(pi, std::numeric_limits<float>::quiet_NaN());
    pi.index_copy_(0, head.rows, out.logprobs.index_select(0, head.rows));
  }
  if (arguments.prox_is_pi) arguments.prox_logprobs = pi;
  Tensor g;
  std::tie(out.loss, g, out.metrics) = loss_on_host(pi, arguments);
  if (d_hidden.defined() || d_weight.defined()) {
    head_backward(head, g, Tensor(), d_hidden, d_weight, options, true);
  }
  return out;
}

ThreeTensors policy_loss_cuda(const Tensor& logprobs, const Tensor& cu_seqlens, const Tensor& mask,
                              const Tensor& advantages, const Tensor& rollout_logprobs,
                              const OptionalTensor& prox_logprobs,
                              const OptionalTensor& ref_logprobs,
                              const OptionalTensor& teacher_logprobs, const OptionalTensor& weights,
                              const OptionalTensor& versions, std::string spec_json,
                              double denominator, const OptionalTensor& rollout_ids,
                              const OptionalTensor& correction_weights,
                              const OptionalTensor& correction_mask) {
  const LossArguments arguments{
      cu_seqlens,         mask,           advantages, rollout_logprobs, prox_logprobs, ref_logprobs,
      teacher_logprobs,   weights,        versions,   spec_json,        denominator,   rollout_ids,
      correction_weights, correction_mask};
  const auto spec =
      with_value_errors([&] { return spec_of(spec_json, arguments.has_correction()); });
  TORCH_CHECK_VALUE(logprobs.dim() == 1, "logprobs must be [tokens], got ", logprobs.sizes());
  checked_stream(logprobs, "logprobs", logprobs.size(0), "logprobs");
  const LossTensors batch = batch_of(arguments, logprobs, logprobs.size(0), "logprobs");
  if (spec == nullptr) return loss_on_host(logprobs, arguments);
  const TokenLoss out = with_value_errors(
      [&] { return token_loss(logprobs, *spec, batch, denominator_of(denominator)); });
  return {out.loss, out.g, out.metrics};
}

SixTensors with_gradients_cuda(
    const Tensor& hidden, const Tensor& weight, const Tensor& targets, const OptionalTensor& rows,
    const Tensor& cu_seqlens, const Tensor& mask, const Tensor& advantages,
    const Tensor& rollout_logprobs, const OptionalTensor& prox_logprobs,
    const OptionalTensor& ref_logprobs, const OptionalTensor& teacher_logprobs,
    const OptionalTensor& weights, const OptionalTensor& versions,
    const OptionalTensor& temperature, std::string spec_json, double denominator,
    int64_t chunk_bytes, bool invariant, bool float32_logits, bool float32_weight_gradient,
    const OptionalTensor& rollout_ids, bool prox_is_pi, bool want_hidden, bool want_weight) {
  const auto spec = with_value_errors([&] { return spec_of(spec_json); });
  const HeadSettings settings{chunk_bytes, invariant, float32_logits, float32_weight_gradient};
  const HeadTensors head = head_of(hidden, weight, {targets, rows, temperature, settings});
  const LossArguments arguments{cu_seqlens,
                                mask,
                                advantages,
                                rollout_logprobs,
                                prox_logprobs,
                                ref_logprobs,
                                teacher_logprobs,
                                weights,
                                versions,
                                spec_json,
                                denominator,
                                rollout_ids,
                                {},
                                {},
                                prox_is_pi};
  const LossTensors batch = batch_of(arguments, hidden, hidden.size(0), "hidden");
  Tensor d_hidden, d_weight;
  if (want_hidden) d_hidden = at::empty(hidden.sizes(), hidden.options());
  if (want_weight) d_weight = weight_gradient_for(weight, float32_weight_gradient);
  const HeadOptions options{chunk_bytes, invariant, float32_logits};
  const HeadLoss out = with_value_errors([&] {
    return spec == nullptr ? head_loss_on_host(head, arguments, d_hidden, d_weight, options)
                           : head_loss(head, *spec, batch, denominator_of(denominator), d_hidden,
                                       d_weight, options, true);
  });
  return {out.loss,
          out.logprobs,
          out.entropy,
          out.metrics,
          or_empty(d_hidden, hidden.options()),
          or_empty(d_weight, weight.options())};
}

FourTensors policy_head_cuda(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                             const OptionalTensor& rows, const Tensor& cu_seqlens,
                             const Tensor& mask, const Tensor& advantages,
                             const Tensor& rollout_logprobs, const OptionalTensor& prox_logprobs,
                             const OptionalTensor& ref_logprobs,
                             const OptionalTensor& teacher_logprobs, const OptionalTensor& weights,
                             const OptionalTensor& versions, const OptionalTensor& temperature,
                             std::string spec_json, double denominator, int64_t chunk_bytes,
                             bool invariant, bool float32_logits, bool float32_weight_gradient,
                             const OptionalTensor& rollout_ids, bool prox_is_pi) {
  const auto [loss, logprobs, entropy, metrics, d_hidden, d_weight] = with_gradients_cuda(
      hidden, weight, targets, rows, cu_seqlens, mask, advantages, rollout_logprobs, prox_logprobs,
      ref_logprobs, teacher_logprobs, weights, versions, temperature, std::move(spec_json),
      denominator, chunk_bytes, invariant, float32_logits, float32_weight_gradient, rollout_ids,
      prox_is_pi, false, false);
  return {loss, logprobs, entropy, metrics};
}

}  // namespace

TORCH_LIBRARY_IMPL(leeway, CUDA, m) {
  m.impl("token_logprobs", token_logprobs_cuda);
  m.impl("head_backward", head_backward_cuda);
  m.impl("_head_backward", backward_cuda);
  m.impl("policy_loss", policy_loss_cuda);
  m.impl("policy_head", policy_head_cuda);
  m.impl("_policy_head", with_gradients_cuda);
}

}  // namespace leeway::cuda
