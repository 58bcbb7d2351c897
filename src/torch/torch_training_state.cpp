// Weights and optimizer state of a TorchTrainingBackend, as they leave it and come back: snapshots,
// checkpoints, the host's copy. Passes and steps are in torch_training.cpp, what a rank does among
// others in torch_training_ranks.cpp.

#include "torch/device_room.h"
#include "torch/device_weights.h"
#include "torch/torch_training_backend.h"
#include "trainer/state_files.h"
#include "trainer/state_loading.h"

#ifdef LEEWAY_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace leeway {

using torch::Tensor;

namespace {

// While it lives, the calling thread's work is queued beside that of the thread that trains.
struct OtherStream {
  explicit OtherStream([[maybe_unused]] torch::Device device) {
#ifdef LEEWAY_CUDA
    guard.reset_stream(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index()));
  }
  c10::cuda::OptionalCUDAStreamGuard guard;
#else
  }
#endif
};

}  // namespace

int64_t TorchTrainingBackend::spare() const { return spare_bytes(device_); }

const Parameters& TorchTrainingBackend::parameters() {
  if (!host_is_current_) {
    in_words(stream_, [&] {
      if (!has_part()) return policy_.copy_to(host_);
      collect([&](int64_t begin, const Tensor& numbers) {
        copy_part_to_host(policy_.layout(), begin, numbers, host_);
      });
    });
  }
  host_is_current_ = true;
  return host_;
}

std::shared_ptr<const PolicySnapshot> TorchTrainingBackend::snapshot(PolicyVersion version) {
  return in_words(stream_, [&] {
    // A rank whose part of the masters is not all of them gives what passes read to its sampler.
    if (has_part() && exchange_->rank() != 0) return on_device(copy_of_read(), version);
    const bool may_round = !exchange_ && !snapshots_.is_shared && policy_.low().defined();
    SnapshotForm form = snapshot_form({.spare = spare(),
                                       .keep_free = snapshots_.keep_free,
                                       .weights = policy_.layout().size,
                                       .may_round = may_round,
                                       .last_is_there = !last_snapshot_.expired()});
    if (has_part() && host_is_current_) form = SnapshotForm::on_host;
    if (form == SnapshotForm::rounded) return on_device(copy_of_read(), version);
    if (form != SnapshotForm::full) {
      return std::make_shared<const PolicySnapshot>(Parameters(parameters()), version);
    }
    auto snapshot = on_device(copy(), version);
    last_snapshot_ = snapshot;
    return snapshot;
  });
}

std::shared_ptr<const PolicySnapshot> TorchTrainingBackend::on_device(const Tensor& weights,
                                                                      PolicyVersion version) {
  return std::make_shared<const PolicySnapshot>(
      config(), std::make_unique<TorchDeviceWeights>(policy_.layout(), weights, host_.base()),
      version);
}

Tensor TorchTrainingBackend::copy() {
  if (!has_part()) return policy_.copy();
  const Tensor full =
      at::zeros({policy_.layout().size}, at::TensorOptions(device_).dtype(at::kFloat));
  collect([&](int64_t begin, const Tensor& numbers) {
    full.narrow(0, begin, numbers.numel()).copy_(numbers);
  });
  return full;
}

Tensor TorchTrainingBackend::copy_of_read() {
  if (!is_sharded()) return policy_.high().detach().clone();
  const Tensor whole = at::zeros({policy_.layout().size}, policy_.high().options());
  policy_.sharded()->read_all([&](int64_t begin, const Tensor& numbers) {
    whole.narrow(0, begin, numbers.numel()).copy_(numbers);
  });
  return whole;
}

Tensor TorchTrainingBackend::own_part(const Tensor& flat) const {
  return is_sharded() ? flat : flat.narrow(0, policy_.own().begin, policy_.own().count);
}

FlatAdamW TorchTrainingBackend::own_state() {
  FlatAdamW own = policy_.weights_to_step();
  own.moments = learning().moments;
  return own;
}

TrainingState TorchTrainingBackend::state() {
  TrainingState state{parameters(), AdamW(host_)};
  in_words(stream_, [&] {
    if (exchange_) return collect_moments(exchange_->ranks(), *shard_, &state.optimizer);
    copy_to_host(policy_.layout(), learning().moments, state.optimizer);
  });
  state.optimizer.set_steps(steps_);
  return state;
}

std::function<TrainingState()> TorchTrainingBackend::state_later() {
  if (exchange_ || !device_.is_cuda()) return TrainingBackend::state_later();
  // Before what is spare is counted: moments that are not there yet are made now.
  const int64_t moments = in_words(stream_, [&] { return learning().moments.bytes(); });
  if (spare() < 4 * policy_.layout().size + moments) return TrainingBackend::state_later();
  struct Copies {
    std::shared_ptr<const PolicySnapshot> policy;
    FlatMoments moments;
  };
  std::shared_ptr<Copies> copies;
  try {
    const PartStream::Scope scope(stream_);
    const at::NoGradGuard guard;
    copies = std::make_shared<Copies>(Copies{nullptr, learning().moments.clone()});
    copies->policy = on_device(copy(), 0);  // waits for the device, so that any stream may read
  } catch (const std::exception&) {         // no room for a second copy there
    return TrainingBackend::state_later();
  }
  return [this, copies, steps = steps_]() mutable {
    return in_words([&] {
      const OtherStream beside(device_);
      Parameters policy = copies->policy->device()->make_host(config());
      copies->policy->device()->copy_to(policy);
      AdamW optimizer(policy);
      TrainingState state{std::move(policy), std::move(optimizer)};
      copy_to_host(policy_.layout(), copies->moments, state.optimizer);
      state.optimizer.set_steps(steps);
      copies.reset();
      return state;
    });
  };
}

void TorchTrainingBackend::load(const std::string& folder) {
  if (exchange_) {
    in_words(stream_, [&] {
      const auto steps = load_sharded(exchange_->ranks(), folder, *shard_);
      if (!steps) return;
      steps_ = *steps;
      host_is_current_ = false;
      hand_out();
    });
    return;
  }
  AdamW state(host_);
  load_state(folder, host_, state);
  in_words(stream_, [&] {
    policy_.copy_from(host_);
    copy_to_flat(policy_.layout(), state, learning().moments);
  });
  host_is_current_ = true;
  steps_ = state.steps();
}

}  // namespace leeway
