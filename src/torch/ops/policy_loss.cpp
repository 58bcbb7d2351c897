// The loss of given logprobs with its closed-form gradient, and its metrics.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>

#include "leeway/evaluator.h"
#include "leeway/metrics.h"
#include "torch/ops/spec_json.h"
#include "torch/ops/tensors.h"

namespace leeway {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using ThreeTensors = std::tuple<Tensor, Tensor, Tensor>;

ThreeTensors policy_loss_cpu(const Tensor& logprobs, const Tensor& cu_seqlens, const Tensor& mask,
                             const Tensor& advantages, const Tensor& rollout_logprobs,
                             const OptionalTensor& prox_logprobs,
                             const OptionalTensor& ref_logprobs,
                             const OptionalTensor& teacher_logprobs, const OptionalTensor& weights,
                             const OptionalTensor& versions, std::string spec_json,
                             double denominator, const OptionalTensor& rollout_ids,
                             const OptionalTensor& correction_weights,
                             const OptionalTensor& correction_mask) {
  return with_value_errors([&]() -> ThreeTensors {
    LossSpec spec = spec_from_json(spec_json);
    TORCH_CHECK_VALUE(logprobs.dim() == 1, "logprobs must be [tokens], got ", logprobs.sizes());
    const Tensor pi = checked_stream(logprobs, "logprobs", logprobs.size(0), "logprobs");
    const LossArguments arguments{cu_seqlens,         mask,           advantages,
                                  rollout_logprobs,   prox_logprobs,  ref_logprobs,
                                  teacher_logprobs,   weights,        versions,
                                  spec_json,          denominator,    rollout_ids,
                                  correction_weights, correction_mask};
    const BatchTensors batch(arguments, logprobs.size(0), "logprobs");
    check_given(spec, arguments.has_correction());
    BatchView<float> view = batch.view();
    view.pi = floats_of(pi);
    bind_corrections(spec, view.advantages.data(), batch.correction_weights(),
                     batch.correction_mask());
    const Tensor g = at::empty_like(pi);
    MetricSums sums;
    Evaluator evaluator(1);  // a few nanoseconds per token: less than waking threads takes
    const double loss =
        evaluator.evaluate(spec, view, writable_floats_of(g), batch.denominator(), &sums);
    return {at::scalar_tensor(loss, at::kFloat), g, metrics_tensor(sums, view)};
  });
}

ThreeTensors policy_loss_meta(const Tensor& logprobs, const Tensor&, const Tensor&, const Tensor&,
                              const Tensor&, const OptionalTensor&, const OptionalTensor&,
                              const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                              std::string, double, const OptionalTensor&, const OptionalTensor&,
                              const OptionalTensor&) {
  return {at::empty({}, logprobs.options()), at::empty_like(logprobs),
          at::empty({MetricSums::kFlatSize}, logprobs.options().dtype(at::kDouble))};
}

class PolicyLoss : public torch::autograd::Function<PolicyLoss> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& logprobs,
                               const LossArguments& a) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("leeway::policy_loss", "")
                               .typed<decltype(policy_loss_cpu)>();
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [loss, g, metrics] =
        op.call(logprobs, a.cu_seqlens, a.mask, a.advantages, a.rollout_logprobs, a.prox_logprobs,
                a.ref_logprobs, a.teacher_logprobs, a.weights, a.versions, a.spec_json,
                a.denominator, a.rollout_ids, a.correction_weights, a.correction_mask);
    context->save_for_backward({g});
    context->mark_non_differentiable({g, metrics});
    return {loss, g, metrics};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    refuse_second_derivative("policy_loss");
    return {gradients[0] * context->get_saved_variables()[0], Tensor()};
  }
};

ThreeTensors policy_loss_autograd(
    const Tensor& logprobs, const Tensor& cu_seqlens, const Tensor& mask, const Tensor& advantages,
    const Tensor& rollout_logprobs, const OptionalTensor& prox_logprobs,
    const OptionalTensor& ref_logprobs, const OptionalTensor& teacher_logprobs,
    const OptionalTensor& weights, const OptionalTensor& versions, std::string spec_json,
    double denominator, const OptionalTensor& rollout_ids, const OptionalTensor& correction_weights,
    const OptionalTensor& correction_mask) {
  const variable_list out = PolicyLoss::apply(
      logprobs,
      LossArguments{cu_seqlens, mask, advantages, rollout_logprobs, prox_logprobs, ref_logprobs,
                    teacher_logprobs, weights, versions, std::move(spec_json), denominator,
                    rollout_ids, correction_weights, correction_mask});
  return {out[0], out[1], out[2]};
}

// ---------------------------------------------------------------------------------------------
// Metrics

// The metrics defined for a spec on a batch with every stream. If a batch lacks one, its row says
// so by NaN.
std::vector<const MetricInfo*> metrics_of(const LossSpec& spec) {
  std::vector<const MetricInfo*> list;
  for (const MetricInfo& info : metric_table()) {
    if (info.applies(spec, true, true, true)) list.push_back(&info);
  }
  return list;
}

std::vector<std::string> metric_names(std::string spec_json) {
  return with_value_errors([&] {
    std::vector<std::string> names;
    for (const MetricInfo* info : metrics_of(spec_from_json(spec_json))) {
      names.emplace_back(info->name);
    }
    return names;
  });
}

MetricSums sums_of(const Tensor& metrics, size_t index) {
  TORCH_CHECK_VALUE(metrics.scalar_type() == at::kDouble && metrics.dim() == 1 &&
                        metrics.size(0) == MetricSums::kFlatSize,
                    "metrics[", index, "] must be the float64 [",
                    static_cast<int64_t>(MetricSums::kFlatSize),
                    "] that policy_loss and policy_head return, got ", metrics.scalar_type(), " ",
                    metrics.sizes());
  const Tensor row = metrics.to(at::kCPU).contiguous();
  const std::span<const double> flat(row.data_ptr<double>(), MetricSums::kFlatSize);
  for (size_t i = static_cast<size_t>(kSlotCount); i < flat.size(); ++i) {
    TORCH_CHECK_VALUE(flat[i] >= 0.0 && flat[i] <= 0x1p53, "metrics[", index, "] holds a count of ",
                      flat[i], ": it is not a row of policy_loss or policy_head");
  }
  return MetricSums::from_flat(flat);
}

std::vector<const MetricInfo*> metrics_of(const std::string& spec_json) {
  return with_value_errors([&] { return metrics_of(spec_from_json(spec_json)); });
}

Tensor finalize_metrics_meta(at::TensorList, std::string spec_json) {
  const auto count = static_cast<int64_t>(metrics_of(spec_json).size());
  return at::empty({count}, at::TensorOptions().dtype(at::kDouble).device(at::kMeta));
}

Tensor finalize_metrics_op(at::TensorList metrics, std::string spec_json) {
  const std::vector<const MetricInfo*> list = metrics_of(spec_json);
  MetricSums sums;
  for (size_t i = 0; i < metrics.size(); ++i) sums.merge(sums_of(metrics[i], i));
  Tensor out = at::empty({static_cast<int64_t>(list.size())}, at::kDouble);
  for (size_t i = 0; i < list.size(); ++i) out.data_ptr<double>()[i] = list[i]->compute(sums);
  // On the rows' device, as operators that torch.compile traces have it.
  return metrics.empty() ? out : out.to(metrics[0].device());
}

}  // namespace

TORCH_LIBRARY_IMPL(leeway, CPU, m) { m.impl("policy_loss", policy_loss_cpu); }
TORCH_LIBRARY_IMPL(leeway, Meta, m) {
  m.impl("policy_loss", policy_loss_meta);
  m.impl("finalize_metrics", finalize_metrics_meta);
}
TORCH_LIBRARY_IMPL(leeway, Autograd, m) { m.impl("policy_loss", policy_loss_autograd); }
TORCH_LIBRARY_IMPL(leeway, CompositeExplicitAutograd, m) {
  m.impl("metric_names", metric_names);
  m.impl("finalize_metrics", finalize_metrics_op);
}

}  // namespace leeway
