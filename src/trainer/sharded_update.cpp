#include "trainer/sharded_update.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <utility>

#include "base/bytes.h"
#include "leeway/error.h"
#include "trainer/cpu_backend.h"
#include "trainer/state_loading.h"

namespace leeway {

ShardedUpdate::ShardedUpdate(Ranks& ranks, Parameters& policy) : ranks_(ranks), policy_(policy) {
  for (size_t i = 0; i < policy.table().size(); ++i) {
    offsets_.push_back(static_cast<size_t>(policy.of(i).data() - policy.flat().data()));
  }
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

std::vector<StatePiece> ShardedUpdate::pieces(int rank) const {
  const auto r = static_cast<size_t>(rank);
  return pieces_between(policy_.table(), offsets_, bounds_[r], bounds_[r + 1]);
}

void ShardedUpdate::read(StateKind kind, const StatePiece& piece, std::span<float> to) const {
  if (kind == StateKind::weight) {
    const auto from = std::as_const(policy_).of(piece.parameter).subspan(piece.first, piece.count);
    std::copy(from.begin(), from.end(), to.begin());
    return;
  }
  const AlignedVector<float>& all = kind == StateKind::first_moment ? m_ : v_;
  std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(place_of(piece)), piece.count, to.begin());
}

std::function<void()> ShardedUpdate::prepare(const ReadState& read) {
  auto fresh = std::make_shared<std::array<AlignedVector<float>, std::size(kStateKinds)>>();
  for (const StateKind kind : kStateKinds) {
    AlignedVector<float>& all = (*fresh)[static_cast<size_t>(kind)];
    all.resize(size());
    for (const StatePiece& piece : pieces(ranks_.rank())) {
      read(kind, piece, std::span<float>(all).subspan(place_of(piece), piece.count));
    }
  }
  return [this, fresh] {
    auto& [weights, m, v] = *fresh;
    std::copy(weights.begin(), weights.end(), policy_.flat().subspan(first()).begin());
    m_ = std::move(m);
    v_ = std::move(v);
  };
}

TrainingState ShardedUpdate::state(const Parameters& policy) {
  TrainingState state{policy, AdamW(policy)};
  state.optimizer.set_steps(steps_);
  collect_moments(ranks_, *this, &state.optimizer);
  return state;
}

void ShardedUpdate::load(const std::string& folder, Parameters& policy) {
  const std::optional<int64_t> steps = load_sharded(ranks_, folder, *this);
  if (!steps) return;
  steps_ = *steps;
  ranks_.all_gather(policy.flat(), bounds_);
}

MakeRankBackend cpu_rank_backend() {
  return [](Ranks& ranks, TrainingWeights weights, const TrainerTable& table) {
    RankBackend made;
    made.backend = make_cpu_training(std::move(weights), table, [&](Parameters& policy) {
      auto update = std::make_unique<ShardedUpdate>(ranks, policy);
      made.share = update.get();
      return update;
    });
    return made;
  };
}

}  // namespace leeway
