#include "torch/tensor_head.h"

#include <vector>

#include "core/cpu/policy_head.h"
#include "leeway/error.h"
#ifdef LEEWAY_CUDA
#include "torch/ops/cuda_head.h"
#endif

namespace leeway {
namespace {

using torch::Tensor;

template <class T>
Tensor vector_on(std::span<const T> values, torch::Device device) {
  if (values.empty()) return {};
  const auto type = c10::CppTypeToScalarType<T>::value;
  return at::from_blob(const_cast<T*>(values.data()), {static_cast<int64_t>(values.size())},
                       at::TensorOptions(type))
      .to(device);
}
template <class T>
Tensor vector_on(const std::vector<T>& values, torch::Device device) {
  return vector_on(std::span<const T>(values), device);
}

std::span<float> floats_of(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.data_ptr<float>(), static_cast<size_t>(tensor.numel())};
}

// The head on the CPU, which computes in float32.
struct HostHead {
  explicit HostHead(const HeadOnDevice& head)
      : hidden(head.hidden.to(at::kFloat).contiguous()),
        weight(head.weight.to(at::kFloat).contiguous()) {
    const MicroBatch& batch = head.on.batch;
    problem.tokens = batch.size();
    problem.hidden_size = hidden.size(1);
    problem.vocabulary = weight.size(0);
    problem.hidden = rows_of(hidden.data_ptr<float>(), problem.hidden_size);
    problem.weight = rows_of(weight.data_ptr<float>(), problem.hidden_size);
    problem.targets = batch.targets;
    problem.rows = batch.rows;
    problem.all_rows = false;
    problem.temperature = batch.temperature;
  }
  Tensor row_values() const { return at::empty({problem.tokens}, at::kFloat); }

  Tensor hidden, weight;
  HeadProblem problem;
};

#ifdef LEEWAY_CUDA
cuda::HeadTensors cuda_head(const HeadOnDevice& head) {
  return {head.hidden, head.weight, head.on.targets, head.on.rows, head.on.temperature};
}

cuda::HeadOptions options_of(const HeadOnDevice& head) {
  cuda::HeadOptions options;
  options.products = head.products;
  return options;
}

HeadLoss cuda_head_loss(const HeadOnDevice& head, const LossSpec& spec, bool prox_is_pi,
                        std::optional<double> denominator, const Tensor& d_weight, bool is_new) {
  const BatchOnDevice& on = head.on;
  const cuda::HeadTensors tensors = cuda_head(head);
  cuda::LossTensors batch;
  batch.cu_seqlens = on.cu_seqlens;
  batch.mask = on.mask;
  batch.advantages = on.advantages;
  batch.weights = on.weights;
  batch.rollout = on.rollout;
  batch.prox = on.prox;
  batch.ref = on.ref;
  batch.teacher = on.teacher;
  batch.versions = on.versions;
  batch.rollout_ids = on.rollout_ids;
  batch.prox_is_pi = prox_is_pi;
  HeadLoss out;
  out.d_hidden = at::empty_like(head.hidden);
  out.kept = at::empty({head.hidden.size(0)}, head.hidden.options().dtype(at::kByte));
  batch.kept = out.kept;
  const cuda::HeadLoss loss = cuda::head_loss(tensors, spec, batch, denominator, out.d_hidden,
                                              d_weight, options_of(head), is_new);
  out.loss = loss.loss;
  out.metrics = loss.metrics;
  out.values = {loss.logprobs, loss.entropy};
  return out;
}
#endif

}  // namespace

BatchOnDevice::BatchOnDevice(const MicroBatch& host, torch::Device device, bool with_loss)
    : batch(host), tokens(vector_on(host.tokens, device).to(at::kLong)) {
  if (device.is_cpu()) return;
  targets = vector_on(host.targets, device);
  rows = vector_on(host.rows, device);
  temperature = vector_on(host.temperature, device);
  if (!with_loss) return;
  cu_seqlens = vector_on(host.cu_seqlens, device);
  mask = vector_on(host.mask, device);
  advantages = vector_on(host.advantages, device);
  weights = vector_on(host.weights, device);
  rollout = vector_on(host.rollout, device);
  prox = vector_on(host.prox, device);
  ref = vector_on(host.ref, device);
  teacher = vector_on(host.teacher, device);
  versions = vector_on(host.versions, device);
  rollout_ids = vector_on(host.rollout_ids, device);
}

HeadValues head_logprobs(ThreadPool& pool, const HeadOnDevice& head) {
#ifdef LEEWAY_CUDA
  if (head.hidden.is_cuda()) {
    const auto [logprobs, entropy] = cuda::head_logprobs(cuda_head(head), options_of(head));
    return {logprobs, entropy};
  }
#endif
  const HostHead host(head);
  HeadValues out{host.row_values(), host.row_values()};
  head_logprobs(pool, host.problem, floats_of(out.logprobs), floats_of(out.entropy));
  return out;
}

Tensor head_backward(ThreadPool& pool, const HeadOnDevice& head, std::span<const float> g,
                     std::span<const float> g_entropy, const Tensor& d_weight, bool is_new) {
#ifdef LEEWAY_CUDA
  if (head.hidden.is_cuda()) {
    const torch::Device device = head.hidden.device();
    const Tensor d_hidden = at::empty_like(head.hidden);
    cuda::head_backward(cuda_head(head), vector_on(g, device), vector_on(g_entropy, device),
                        d_hidden, d_weight, options_of(head), is_new);
    return d_hidden;
  }
#endif
  if (is_new && d_weight.defined()) d_weight.zero_();
  const HostHead host(head);
  const Tensor d_hidden = at::empty_like(host.hidden);
  head_backward(pool, host.problem, g, g_entropy, floats_of(d_hidden), floats_of(d_weight));
  return d_hidden.to(head.hidden.scalar_type());
}

HeadLoss head_loss(ThreadPool& pool, const HeadOnDevice& head, const LossSpec& spec,
                   bool prox_is_pi, std::optional<double> denominator, const Tensor& d_weight,
                   bool is_new) {
#ifdef LEEWAY_CUDA
  if (head.hidden.is_cuda()) {
    return cuda_head_loss(head, spec, prox_is_pi, denominator, d_weight, is_new);
  }
#endif
  if (is_new && d_weight.defined()) d_weight.zero_();
  const HostHead host(head);
  HeadLoss out;
  out.values = {host.row_values(), host.row_values()};
  out.kept = at::empty({host.problem.tokens}, at::kByte);
  const Tensor d_hidden = at::empty_like(host.hidden);
  const std::span<float> logprobs = floats_of(out.values.logprobs);
  const HeadResult result =
      policy_head(pool, host.problem, spec, head.on.batch.view(logprobs, prox_is_pi), denominator,
                  logprobs, floats_of(out.values.entropy), floats_of(d_hidden), floats_of(d_weight),
                  {out.kept.data_ptr<uint8_t>(), static_cast<size_t>(host.problem.tokens)});
  std::vector<double> flat = result.metrics.flatten();
  out.loss = at::scalar_tensor(result.loss, at::kDouble);
  out.metrics =
      at::from_blob(flat.data(), {static_cast<int64_t>(flat.size())}, at::kDouble).clone();
  out.d_hidden = d_hidden.to(head.hidden.scalar_type());
  return out;
}

}  // namespace leeway
