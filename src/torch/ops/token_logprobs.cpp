// The head without a loss: logprobs and entropies of the targets, and the backward pass from any
// gradient of theirs.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "torch/ops/tensors.h"

namespace leeway {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using TwoTensors = std::tuple<Tensor, Tensor>;

constexpr const char* kChunkBytes = "chunk_bytes";
constexpr const char* kInvariant = "invariant";
constexpr const char* kFloat32Logits = "float32_logits";
constexpr const char* kFloat32WeightGradient = "float32_weight_gradient";

TwoTensors token_logprobs_cpu(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                              const OptionalTensor& rows, const OptionalTensor& temperature,
                              int64_t chunk_bytes, bool, bool, bool) {
  return with_value_errors([&]() -> TwoTensors {
    const HeadTensors head(hidden, weight, {targets, rows, temperature, {chunk_bytes}});
    Tensor logprobs = at::empty({head.problem().tokens}, at::kFloat);
    Tensor entropy = at::empty({head.problem().tokens}, at::kFloat);
    const PoolLease pool;
    head_logprobs(*pool, head.problem(), writable_floats_of(logprobs), writable_floats_of(entropy));
    return {logprobs, entropy};
  });
}

// Gradients are accumulated in float32, then converted to the dtype of their tensor.
TwoTensors backward_cpu(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                        const OptionalTensor& g, const OptionalTensor& g_entropy,
                        const OptionalTensor& rows, const OptionalTensor& temperature,
                        int64_t chunk_bytes, bool, bool, bool float32_weight_gradient,
                        bool want_hidden, bool want_weight) {
  const HeadTensors head(hidden, weight, {targets, rows, temperature, {chunk_bytes}});
  const int64_t tokens = head.problem().tokens;
  const Tensor by_logprob =
      g ? checked_stream(*g, "g", tokens, "hidden") : at::zeros({tokens}, at::kFloat);
  const Tensor by_entropy =
      g_entropy ? checked_stream(*g_entropy, "g_entropy", tokens, "hidden") : Tensor();
  Tensor d_hidden = at::empty(want_hidden ? hidden.sizes() : at::IntArrayRef{0}, at::kFloat);
  Tensor d_weight = at::zeros(want_weight ? weight.sizes() : at::IntArrayRef{0}, at::kFloat);
  {
    const PoolLease pool;
    head_backward(*pool, head.problem(), floats_of(by_logprob),
                  by_entropy.defined() ? floats_of(by_entropy) : std::span<const float>(),
                  writable_floats_of(d_hidden), writable_floats_of(d_weight));
  }
  d_hidden = d_hidden.to(hidden.scalar_type());
  if (!float32_weight_gradient) d_weight = d_weight.to(weight.scalar_type());
  return {d_hidden, d_weight};
}

TwoTensors head_backward_cpu(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                             const Tensor& g, const OptionalTensor& rows,
                             const OptionalTensor& temperature, int64_t chunk_bytes, bool invariant,
                             bool float32_logits, bool float32_weight_gradient) {
  return backward_cpu(hidden, weight, targets, g, {}, rows, temperature, chunk_bytes, invariant,
                      float32_logits, float32_weight_gradient, true, true);
}

// ---------------------------------------------------------------------------------------------
// Shapes alone

TwoTensors token_logprobs_meta(const Tensor&, const Tensor&, const Tensor& targets,
                               const OptionalTensor&, const OptionalTensor&, int64_t, bool, bool,
                               bool) {
  const auto options = targets.options().dtype(at::kFloat);
  return {at::empty_like(targets, options), at::empty_like(targets, options)};
}

TwoTensors backward_meta(const Tensor& hidden, const Tensor& weight, const Tensor&,
                         const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                         const OptionalTensor&, int64_t, bool, bool, bool float32_weight_gradient,
                         bool want_hidden, bool want_weight) {
  const auto of_weight =
      float32_weight_gradient ? weight.options().dtype(at::kFloat) : weight.options();
  return {want_hidden ? at::empty_like(hidden, at::MemoryFormat::Contiguous)
                      : at::empty({0}, hidden.options()),
          want_weight ? at::empty_like(weight, of_weight, at::MemoryFormat::Contiguous)
                      : at::empty({0}, of_weight)};
}

TwoTensors head_backward_meta(const Tensor& hidden, const Tensor& weight, const Tensor& targets,
                              const Tensor& g, const OptionalTensor& rows,
                              const OptionalTensor& temperature, int64_t chunk_bytes,
                              bool invariant, bool float32_logits, bool float32_weight_gradient) {
  return backward_meta(hidden, weight, targets, g, {}, rows, temperature, chunk_bytes, invariant,
                       float32_logits, float32_weight_gradient, true, true);
}

// ---------------------------------------------------------------------------------------------
// Gradients

OptionalTensor optional_of(const Tensor& t) {
  return t.defined() ? OptionalTensor(t) : OptionalTensor();
}
Tensor tensor_of(const OptionalTensor& t) { return t ? *t : Tensor(); }

class TokenLogprobs : public torch::autograd::Function<TokenLogprobs> {
 public:
  static variable_list forward(AutogradContext* context, const Tensor& hidden, const Tensor& weight,
                               const HeadArguments& head) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("leeway::token_logprobs", "")
                               .typed<decltype(token_logprobs_cpu)>();
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [logprobs, entropy] =
        op.call(hidden, weight, head.targets, head.rows, head.temperature,
                head.settings.chunk_bytes, head.settings.invariant, head.settings.float32_logits,
                head.settings.float32_weight_gradient);
    context->saved_data[kChunkBytes] = head.settings.chunk_bytes;
    context->saved_data[kInvariant] = head.settings.invariant;
    context->saved_data[kFloat32Logits] = head.settings.float32_logits;
    context->saved_data[kFloat32WeightGradient] = head.settings.float32_weight_gradient;
    context->save_for_backward(
        {hidden, weight, head.targets, tensor_of(head.rows), tensor_of(head.temperature)});
    context->set_materialize_grads(false);
    return {logprobs, entropy};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("leeway::_head_backward", "")
                               .typed<decltype(backward_cpu)>();
    refuse_second_derivative("token_logprobs");
    const variable_list saved = context->get_saved_variables();
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [d_hidden, d_weight] = op.call(
        saved[0], saved[1], saved[2], optional_of(gradients[0]), optional_of(gradients[1]),
        optional_of(saved[3]), optional_of(saved[4]), context->saved_data[kChunkBytes].toInt(),
        context->saved_data[kInvariant].toBool(), context->saved_data[kFloat32Logits].toBool(),
        context->saved_data[kFloat32WeightGradient].toBool(), context->needs_input_grad(0),
        context->needs_input_grad(1));
    return {context->needs_input_grad(0) ? d_hidden : Tensor(),
            context->needs_input_grad(1) ? d_weight : Tensor(), Tensor()};
  }
};

TwoTensors token_logprobs_autograd(const Tensor& hidden, const Tensor& weight,
                                   const Tensor& targets, const OptionalTensor& rows,
                                   const OptionalTensor& temperature, int64_t chunk_bytes,
                                   bool invariant, bool float32_logits,
                                   bool float32_weight_gradient) {
  const variable_list out = TokenLogprobs::apply(
      hidden, weight,
      HeadArguments{targets,
                    rows,
                    temperature,
                    {chunk_bytes, invariant, float32_logits, float32_weight_gradient}});
  return {out[0], out[1]};
}

}  // namespace

TORCH_LIBRARY_IMPL(leeway, CPU, m) {
  m.impl("token_logprobs", token_logprobs_cpu);
  m.impl("head_backward", head_backward_cpu);
  m.impl("_head_backward", backward_cpu);
}
TORCH_LIBRARY_IMPL(leeway, Meta, m) {
  m.impl("token_logprobs", token_logprobs_meta);
  m.impl("head_backward", head_backward_meta);
  m.impl("_head_backward", backward_meta);
}
TORCH_LIBRARY_IMPL(leeway, Autograd, m) {
  m.impl("token_logprobs", token_logprobs_autograd);
  // What these return has no gradient of its own.
  m.impl("head_backward", torch::CppFunction::makeFallthrough());
  m.impl("_head_backward", torch::CppFunction::makeFallthrough());
}

}  // namespace leeway
