#include "torch/policy_network.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <utility>

#include "leeway/error.h"
#include "model/gpu_sizes.h"
#include "torch/low_rank.h"
#include "torch/split_masters.h"
#include "torch/training_operations.h"
#ifdef LEEWAY_CUDA
#include "cuda/products.h"
#endif

namespace leeway {

using torch::Tensor;

namespace {

// What only the training kernels compute is refused on a GPU where they do not take the model.
void need_training_kernels(const ModelConfig& config, torch::Device device,
                           torch::ScalarType compute, const char* what, const char* remedy) {
  if (!device.is_cuda() || has_training_kernels(config, device, compute)) return;
  if (compute != at::kBFloat16) {
    throw Error(fmt::format(
        "{}: its passes are in bf16; set trainer.precision or --precision to that, or {}", what,
        remedy));
  }
  const std::string why = why_gpu_has_no_training_kernels(config);
  throw Error(fmt::format("{}: {}; {}", what,
                          why.empty() ? "this device has no kernels for it" : why, remedy));
}

}  // namespace

PolicyNetwork::PolicyNetwork(const Parameters& weights,
                             const std::shared_ptr<const Parameters>& base, torch::Device device,
                             torch::ScalarType compute, bool trains, RankPlace place)
    : place_(place) {
  if (place.sharded != nullptr) {
    make_sharded(weights, device, compute, trains);
  } else if (base == nullptr) {
    make_whole(weights, device, compute, trains);
  } else {
    make_over_base(weights, base, device, compute, trains);
  }
}

void PolicyNetwork::change_stream() const {
#ifdef LEEWAY_CUDA
  if (cuda::Products* const own = products()) own->change_stream();
#endif
}

// With a trunk the masters are split, else they are float32 leaves.
void PolicyNetwork::make_whole(const Parameters& weights, torch::Device device,
                               torch::ScalarType compute, bool trains) {
  const bool has_trunk = has_training_kernels(weights.config(), device, compute);
  decoder_.emplace(weights, device, compute, trains && !has_trunk);
  if (!has_trunk) return;
  trunk_.emplace(weights.config(), network_views(decoder_->layout(), decoder_->flat_weights()),
                 decoder_->rope_table());
  if (!trains) return;
  low_ = at::zeros({own().count}, decoder_->flat_weights().options().dtype(at::kShort));
  copy_from(weights);
}

// Masters of a half precision are split; others are what passes read.
void PolicyNetwork::make_sharded(const Parameters& weights, torch::Device device,
                                 torch::ScalarType compute, bool trains) {
  need_training_kernels(weights.config(), device, compute, "trainer.sharding = \"weights\"",
                        "set trainer.sharding = \"optimizer\"");
  sharded_ = std::make_unique<ShardedWeights>(FlatLayout(weights.config()), device, compute,
                                              *place_.sharded);
  trunk_.emplace(weights.config(), sharded_->network(), TorchRopeTable(weights.config(), device));
  if (trains && compute == at::kBFloat16) {
    low_ = at::zeros({own().count}, sharded_->own().options().dtype(at::kShort));
  }
}

void PolicyNetwork::make_over_base(const Parameters& weights,
                                   const std::shared_ptr<const Parameters>& base,
                                   torch::Device device, torch::ScalarType compute, bool trains) {
  const LoraSettings* lora = weights.lora();
  need_training_kernels(weights.config(), device, compute, "an adapter on CUDA", "use the CPU");
  if (lora != nullptr) check_rank(lora->rank, device);
  base_ = base_on_device(base, device, compute);
  const TorchRopeTable rope(weights.config(), device);
  if (lora == nullptr) {
    trunk_.emplace(weights.config(), base_->network, rope);
    return;
  }
  adapter_.emplace(Adapter{FlatLayout(weights), {}, {}});
  const at::TensorOptions on(device);
  adapter_->copy = at::zeros({adapter_->layout.size}, on.dtype(compute));
  if (trains) adapter_->masters = at::zeros({adapter_->layout.size}, on.dtype(at::kFloat));
  copy_from(weights);
  trunk_.emplace(weights.config(), base_->network, rope,
                 adapter_views(adapter_->layout, adapter_->copy));
}

void PolicyNetwork::copy_to(Parameters& host) const {
  if (adapter_) return copy_to_host(adapter_->layout, adapter_->masters, host);
  if (!low_.defined()) return decoder_->copy_to(host);
  copy_to_host(decoder_->layout(), masters(), host);
}

void PolicyNetwork::copy_from(const Parameters& host) {
  if (adapter_) {
    copy_to_flat(adapter_->layout, host, adapter_->copy);
    if (adapter_->masters.defined()) copy_to_flat(adapter_->layout, host, adapter_->masters);
  } else {
    LEEWAY_CHECK(!sharded_, "weights that are whole");
    if (!low_.defined() || place_.ranks > 1) decoder_->copy_from(host);
    if (low_.defined()) copy_to_flat(decoder_->layout(), host, masters(), own().begin);
  }
}

void PolicyNetwork::copy_from(int64_t at, const Tensor& numbers) {
  LEEWAY_CHECK(sharded_ != nullptr, "weights in parts");
  const at::NoGradGuard guard;
  if (low_.defined()) {
    split(numbers, masters().part(at, numbers.numel()));
  } else {
    sharded_->own().narrow(0, at, numbers.numel()).copy_(numbers);
  }
}

Tensor PolicyNetwork::copy() const {
  const at::NoGradGuard guard;
  if (adapter_) return adapter_->masters.clone();
  return low_.defined() ? joined(masters()) : decoder_->flat_parameters().detach().clone();
}

Tensor PolicyNetwork::forward(const Tensor& tokens, std::span<const int64_t> cu_seqlens) const {
  const at::NoGradGuard guard;
  return trunk_ ? trunk_->forward(tokens, cu_seqlens, Recompute::off, nullptr, sharded_.get())
                : decoder_->forward(tokens, cu_seqlens, false);
}

RecordedPass PolicyNetwork::record(const Tensor& tokens, std::span<const int64_t> cu_seqlens,
                                   Recompute recompute) const {
  RecordedPass pass;
  pass.hidden = trunk_
                    ? trunk_->forward(tokens, cu_seqlens, recompute, &pass.record, sharded_.get())
                    : decoder_->forward(tokens, cu_seqlens, recompute != Recompute::off);
  return pass;
}

PolicyGradients PolicyNetwork::use_gradients(const Tensor& flat) {
  if (sharded_) return {sharded_->use_gradients(flat), {}};
  if (adapter_) {
    PolicyGradients gradients;
    gradients.network.layers.resize(base_->network.layers.size());
    gradients.adapter = adapter_views(adapter_->layout, flat);
    return gradients;
  }
  if (!trunk_) {
    const std::vector<Tensor> leaves = parameter_views(decoder_->layout(), flat);
    for (size_t i = 0; i < leaves.size(); ++i) {
      Tensor leaf = decoder_->parameters()[i];
      leaf.mutable_grad() = leaves[i];
    }
  }
  return {network_views(decoder_->layout(), flat), {}};
}

void PolicyNetwork::backward(RecordedPass&& pass, const Tensor& d_hidden,
                             const PolicyGradients& gradients, bool are_new,
                             PassPieces* sums) const {
  if (trunk_) {
    PassPieces* const pieces = sharded_ ? sharded_.get() : sums;
    if (pieces != nullptr) pieces->at(PieceAct::give, kHeadPiece);
    trunk_->backward(std::move(pass.record), d_hidden, gradients.network, are_new,
                     gradients.adapter, pieces);
  } else {
    torch::autograd::backward({pass.hidden}, {d_hidden});
  }
}

FlatAdamW PolicyNetwork::weights_to_step() const {
  const FlatRange range = own();
  const auto part = [&](const Tensor& flat) { return flat.narrow(0, range.begin, range.count); };
  FlatAdamW step;
  step.decaying = std::clamp<int64_t>(layout().decaying - range.begin, 0, range.count);
  if (sharded_) {
    if (low_.defined()) {
      step.copy = sharded_->own(), step.low = low_;
    } else {
      step.parameters = sharded_->own();
    }
  } else if (adapter_) {
    step.parameters = part(adapter_->masters), step.copy = part(adapter_->copy);
  } else if (low_.defined()) {
    step.copy = part(decoder_->flat_weights()), step.low = low_;
  } else {
    const Tensor &leaves = decoder_->flat_parameters(), &weights = decoder_->flat_weights();
    step.parameters = part(leaves);
    if (!weights.is_same(leaves)) step.copy = part(weights);
  }
  return step;
}

std::vector<Tensor> PolicyNetwork::weights_to_hand_out() const {
  if (sharded_) return {};
  if (adapter_) return {adapter_->masters, adapter_->copy};
  const Tensor &leaves = decoder_->flat_parameters(), &weights = decoder_->flat_weights();
  if (low_.defined() || weights.is_same(leaves)) return {weights};
  return {leaves, weights};
}

Tensor PolicyNetwork::head_weight(bool trains) const {
  if (sharded_) {
    sharded_->at(trains ? PieceAct::work : PieceAct::read, kHeadPiece);
    return sharded_->network().head;
  }
  return decoder_ ? decoder_->head_weight().detach() : base_->network.head;
}

}  // namespace leeway
