#include "trainer/sharded_update.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/bytes.h"
#include "leeway/error.h"

namespace leeway {
namespace {

template <class T>
std::span<std::byte> bytes_of(std::span<T> numbers) {
  return std::as_writable_bytes(numbers);
}

}  // namespace

ShardedUpdate::ShardedUpdate(Ranks& ranks, const Parameters& policy) : ranks_(ranks) {
  const size_t numbers = policy.flat().size(), count = static_cast<size_t>(ranks.size());
  const size_t blocks = (numbers + kNormBlock - 1) / kNormBlock;
  for (size_t r = 0; r <= count; ++r) {
    bounds_.push_back(std::min(numbers, kNormBlock * (blocks * r / count)));
  }
  for (AlignedVector<float>* part : {&gradient_, &pass_, &m_, &v_}) part->resize(size());
}

template <class Work>
void ShardedUpdate::timed(const Work& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double ShardedUpdate::take_seconds() { return std::exchange(seconds_, 0.0); }

Parameters& ShardedUpdate::in_place() {
  LEEWAY_CHECK(false, "ranks share a step's slots: there is more than one");
}

void ShardedUpdate::add(ThreadPool& pool, std::optional<Parameters> sum, GradientTree& tree) {
  const std::span<const float> whole = sum ? sum->flat() : std::span<const float>();
  bool any = false;
  timed([&] { any = ranks_.reduce_scatter(whole, bounds_, pass_); });
  if (sum) tree.give_back(std::move(*sum));
  if (!any) return;
  if (std::exchange(has_pass_, true)) {
    add_to(pool, pass_, gradient_);
  } else {
    std::swap(gradient_, pass_);
  }
}

double ShardedUpdate::norm(ThreadPool& pool) {
  ByteWriter own;
  own.put(squares_of_blocks(pool, gradient_));
  std::vector<double> squares;
  timed([&] {
    for (const std::string& part : ranks_.all_gather(own.take())) {
      ByteReader reader(part);
      const auto list = reader.get_list<double>();
      squares.insert(squares.end(), list.begin(), list.end());
    }
  });
  return norm_of_blocks(squares);
}

void ShardedUpdate::zero() {
  has_pass_ = false;
  std::fill(gradient_.begin(), gradient_.end(), 0.0f);
}

void ShardedUpdate::step(ThreadPool& pool, const OptimizerTable& table, double rate, double scale,
                         Parameters& policy) {
  ++steps_;
  AdamW::step_part(pool, table, rate, scale, steps_, first(), gradient_, m_, v_, policy);
  timed([&] { ranks_.all_gather(policy.flat(), bounds_); });
}

TrainingState ShardedUpdate::state(const Parameters& policy) {
  LEEWAY_CHECK(ranks_.rank() == 0, "rank 0 gathers the state");
  TrainingState state{policy, AdamW(policy)};
  state.optimizer.set_steps(steps_);
  const std::span<float> m = state.optimizer.first_moment().flat();
  const std::span<float> v = state.optimizer.second_moment().flat();
  std::copy(m_.begin(), m_.end(), m.begin());
  std::copy(v_.begin(), v_.end(), v.begin());
  for (size_t r = 1; r + 1 < bounds_.size(); ++r) {
    const std::string message = ranks_.receive(static_cast<int>(r), Channel::training);
    ByteReader reader(message);
    reader.get_list(m.subspan(bounds_[r], bounds_[r + 1] - bounds_[r]));
    reader.get_list(v.subspan(bounds_[r], bounds_[r + 1] - bounds_[r]));
    reader.end();
  }
  return state;
}

void ShardedUpdate::send_moments() {
  ByteWriter message;
  message.put(std::span<const float>(m_));
  message.put(std::span<const float>(v_));
  ranks_.send(0, Channel::training, message.take());
}

void ShardedUpdate::load(const std::string& folder, Parameters& policy) {
  std::optional<TrainingState> state;
  std::optional<Error> failure;
  int64_t steps = -1;  // the folder cannot be read
  if (ranks_.rank() == 0) {
    try {
      state.emplace(TrainingState{policy, AdamW(policy)});
      load_state(folder, state->policy, state->optimizer);
      steps = state->optimizer.steps();
    } catch (const Error& error) {
      failure = error;
    }
  }
  ranks_.broadcast(bytes_of(std::span(&steps, 1)), 0);
  if (failure) throw Error(*failure);
  if (steps < 0) return;
  steps_ = steps;
  if (state) policy = std::move(state->policy);
  ranks_.broadcast(bytes_of(policy.flat()), 0);
  for (AlignedVector<float>* part : {&m_, &v_}) {
    if (!state) {
      const std::string message = ranks_.receive(0, Channel::training);
      ByteReader reader(message);
      reader.get_list(std::span<float>(*part));
      reader.end();
      continue;
    }
    const std::span<const float> whole = part == &m_ ? state->optimizer.first_moment().flat()
                                                     : state->optimizer.second_moment().flat();
    for (size_t r = 1; r + 1 < bounds_.size(); ++r) {
      ByteWriter message;
      message.put(whole.subspan(bounds_[r], bounds_[r + 1] - bounds_[r]));
      ranks_.send(static_cast<int>(r), Channel::training, message.take());
    }
    std::copy_n(whole.begin() + static_cast<std::ptrdiff_t>(first()), size(), part->begin());
  }
}

}  // namespace leeway
