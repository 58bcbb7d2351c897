// Hidden states to loss in one operator. The gradients are computed in the forward pass, where the
// logits are available, and kept for backward, which scales and releases them.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "leeway/metrics.h"
#include "torch/ops/spec_json.h"
#include "torch/ops/tensors.h"
#ifdef LEEWAY_CUDA
#include "torch/ops/cuda_head.h"
#endif

namespace leeway {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using FourTensors = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using SixTensors = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

constexpr const char* kHidden = "d_hidden";
constexpr const char* kWeight = "d_weight";

SixTensors with_gradients_cpu(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                              const OptionalTensor& rows, const Tensor& cu_seqlens,
                              const Tensor& mask, const Tensor& advantages,
                              const Tensor& rollout_logprobs, const OptionalTensor& prox_logprobs,
                              const OptionalTensor& ref_logprobs,
                              const OptionalTensor& teacher_logprobs, const OptionalTensor& weights,
                              const OptionalTensor& versions, const OptionalTensor& temperature,
                              std::string spec_json, double denominator, int64_t chunk_bytes, bool,
                              bool, bool float32_weight_gradient, const OptionalTensor& rollout_ids,
                              bool prox_is_pi, bool want_hidden, bool want_weight) {
  return with_value_errors([&]() -> SixTensors {
    const LossSpec spec = spec_from_json(spec_json);
    check_given(spec, false);
    const HeadTensors head(hidden, weight, {targets, rows, temperature, {chunk_bytes}});
    const int64_t tokens = head.problem().tokens;
    const BatchTensors batch({cu_seqlens,
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
                              prox_is_pi},
                             tokens, "hidden");
    Tensor logprobs = at::empty({tokens}, at::kFloat), entropy = at::empty({tokens}, at::kFloat);
    Tensor d_hidden = at::empty(want_hidden ? hidden.sizes() : at::IntArrayRef{0}, at::kFloat);
    Tensor d_weight = at::zeros(want_weight ? weight.sizes() : at::IntArrayRef{0}, at::kFloat);
    const Tensor prox = at::empty({prox_is_pi ? tokens : 0}, at::kFloat);
    HeadResult result;
    {
      const PoolLease pool;
      BatchView<float> view = batch.view();
      if (prox_is_pi) {
        head_logprobs(*pool, head.problem(), writable_floats_of(prox), {});
        view.prox = floats_of(prox);
      }
      result = policy_head(*pool, head.problem(), spec, view, batch.denominator(),
                           writable_floats_of(logprobs), writable_floats_of(entropy),
                           writable_floats_of(d_hidden), writable_floats_of(d_weight));
    }
    d_hidden = d_hidden.to(hidden.scalar_type());
    if (!float32_weight_gradient) d_weight = d_weight.to(weight.scalar_type());
    return {at::scalar_tensor(result.loss, at::kFloat),   logprobs, entropy,
            metrics_tensor(result.metrics, batch.view()), d_hidden, d_weight};
  });
}

FourTensors policy_head_cpu(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                            const OptionalTensor& rows, const Tensor& cu_seqlens,
                            const Tensor& mask, const Tensor& advantages,
                            const Tensor& rollout_logprobs, const OptionalTensor& prox_logprobs,
                            const OptionalTensor& ref_logprobs,
                            const OptionalTensor& teacher_logprobs, const OptionalTensor& weights,
                            const OptionalTensor& versions, const OptionalTensor& temperature,
                            std::string spec_json, double denominator, int64_t chunk_bytes,
                            bool invariant, bool float32_logits, bool float32_weight_gradient,
                            const OptionalTensor& rollout_ids, bool prox_is_pi) {
  const auto [loss, logprobs, entropy, metrics, d_hidden, d_weight] = with_gradients_cpu(
      hidden, weight, targets, rows, cu_seqlens, mask, advantages, rollout_logprobs, prox_logprobs,
      ref_logprobs, teacher_logprobs, weights, versions, temperature, std::move(spec_json),
      denominator, chunk_bytes, invariant, float32_logits, float32_weight_gradient, rollout_ids,
      prox_is_pi, false, false);
  return {loss, logprobs, entropy, metrics};
}

SixTensors with_gradients_meta(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                               const OptionalTensor&, const Tensor&, const Tensor&, const Tensor&,
                               const Tensor&, const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, std::string, double, int64_t, bool, bool,
                               bool float32_weight_gradient, const OptionalTensor&, bool,
                               bool want_hidden, bool want_weight) {
  const auto options = targets.options().dtype(at::kFloat);
  const auto of_weight =
      float32_weight_gradient ? weight.options().dtype(at::kFloat) : weight.options();
  return {at::empty({}, options),
          at::empty_like(targets, options),
          at::empty_like(targets, options),
          at::empty({MetricSums::kFlatSize}, options.dtype(at::kDouble)),
          want_hidden ? at::empty_like(hidden, at::MemoryFormat::Contiguous)
                      : at::empty({0}, hidden.options()),
          want_weight ? at::empty_like(weight, of_weight, at::MemoryFormat::Contiguous)
                      : at::empty({0}, of_weight)};
}

FourTensors policy_head_meta(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                             const OptionalTensor& rows, const Tensor& cu_seqlens,
                             const Tensor& mask, const Tensor& advantages,
                             const Tensor& rollout_logprobs, const OptionalTensor& prox_logprobs,
                             const OptionalTensor& ref_logprobs,
                             const OptionalTensor& teacher_logprobs, const OptionalTensor& weights,
                             const OptionalTensor& versions, const OptionalTensor& temperature,
                             std::string spec_json, double denominator, int64_t chunk_bytes,
                             bool invariant, bool float32_logits, bool float32_weight_gradient,
                             const OptionalTensor& rollout_ids, bool prox_is_pi) {
  const auto [loss, logprobs, entropy, metrics, d_hidden, d_weight] = with_gradients_meta(
      hidden, weight, targets, rows, cu_seqlens, mask, advantages, rollout_logprobs, prox_logprobs,
      ref_logprobs, teacher_logprobs, weights, versions, temperature, std::move(spec_json),
      denominator, chunk_bytes, invariant, float32_logits, float32_weight_gradient, rollout_ids,
      prox_is_pi, false, false);
  return {loss, logprobs, entropy, metrics};
}

// While a graph is traced there are no values to look at.
bool is_traced(const Tensor& t) {
  return t.key_set().has(c10::DispatchKey::Python) ||
         t.key_set().has(c10::DispatchKey::Functionalize);
}

// A factor of one, the usual case, costs next to nothing.
Tensor scaled(Tensor gradient, const Tensor& factor) {
  if (is_traced(gradient) || is_traced(factor)) return gradient * factor.to(gradient.scalar_type());
  if (factor.is_cpu() && factor.item<double>() == 1.0) return gradient;
#ifdef LEEWAY_CUDA
  if (gradient.is_cuda() && factor.is_cuda()) return cuda::scaled(gradient, factor);
#endif
  return gradient.mul_(factor);
}

class PolicyHead : public torch::autograd::Function<PolicyHead> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& hidden, const Tensor& weight,
                               const HeadArguments& h, const LossArguments& a, bool want_hidden,
                               bool want_weight) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("leeway::_policy_head", "")
                               .typed<decltype(with_gradients_cpu)>();
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [loss, logprobs, entropy, metrics, d_hidden, d_weight] =
        op.call(hidden, weight, h.targets, h.rows, a.cu_seqlens, a.mask, a.advantages,
                a.rollout_logprobs, a.prox_logprobs, a.ref_logprobs, a.teacher_logprobs, a.weights,
                a.versions, h.temperature, a.spec_json, a.denominator, h.settings.chunk_bytes,
                h.settings.invariant, h.settings.float32_logits, h.settings.float32_weight_gradient,
                a.rollout_ids, a.prox_is_pi, want_hidden, want_weight);
    context->saved_data[kHidden] = want_hidden ? d_hidden : Tensor();
    context->saved_data[kWeight] = want_weight ? d_weight : Tensor();
    context->mark_non_differentiable({logprobs, entropy, metrics});
    return {loss, logprobs, entropy, metrics};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    refuse_second_derivative("policy_head");
    const auto d_hidden = context->saved_data.find(kHidden);
    const auto d_weight = context->saved_data.find(kWeight);
    TORCH_CHECK(d_hidden != context->saved_data.end() && d_weight != context->saved_data.end(),
                "leeway::policy_head: a second backward: its gradients are computed in the forward "
                "pass and released by the first; run the forward pass again, or use "
                "token_logprobs and policy_loss, which keep what they need");
    Tensor of_hidden = d_hidden->second.toTensor(), of_weight = d_weight->second.toTensor();
    context->saved_data.clear();  // the gradients are no longer referenced here
    const auto times = [&](Tensor gradient) {
      return gradient.defined() ? scaled(std::move(gradient), gradients[0]) : gradient;
    };
    return {times(std::move(of_hidden)),
            times(std::move(of_weight)),
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

FourTensors policy_head_autograd(
    const Tensor& hidden, const Tensor& weight, const Tensor& targets, const OptionalTensor& rows,
    const Tensor& cu_seqlens, const Tensor& mask, const Tensor& advantages,
    const Tensor& rollout_logprobs, const OptionalTensor& prox_logprobs,
    const OptionalTensor& ref_logprobs, const OptionalTensor& teacher_logprobs,
    const OptionalTensor& weights, const OptionalTensor& versions,
    const OptionalTensor& temperature, std::string spec_json, double denominator,
    int64_t chunk_bytes, bool invariant, bool float32_logits, bool float32_weight_gradient,
    const OptionalTensor& rollout_ids, bool prox_is_pi) {
  const bool want_hidden = at::GradMode::is_enabled() && hidden.requires_grad();
  const bool want_weight = at::GradMode::is_enabled() && weight.requires_grad();
  const variable_list out = PolicyHead::apply(
      hidden, weight,
      HeadArguments{targets,
                    rows,
                    temperature,
                    {chunk_bytes, invariant, float32_logits, float32_weight_gradient}},
      LossArguments{cu_seqlens,
                    mask,
                    advantages,
                    rollout_logprobs,
                    prox_logprobs,
                    ref_logprobs,
                    teacher_logprobs,
                    weights,
                    versions,
                    std::move(spec_json),
                    denominator,
                    rollout_ids,
                    {},
                    {},
                    prox_is_pi},
      want_hidden, want_weight);
  return {out[0], out[1], out[2], out[3]};
}

}  // namespace

TORCH_LIBRARY_IMPL(leeway, CPU, m) {
  m.impl("policy_head", policy_head_cpu);
  m.impl("_policy_head", with_gradients_cpu);
}
TORCH_LIBRARY_IMPL(leeway, Meta, m) {
  m.impl("policy_head", policy_head_meta);
  m.impl("_policy_head", with_gradients_meta);
}
TORCH_LIBRARY_IMPL(leeway, Autograd, m) {
  m.impl("policy_head", policy_head_autograd);
  m.impl("_policy_head", torch::CppFunction::makeFallthrough());
}

}  // namespace leeway
