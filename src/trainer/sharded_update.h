// The update of one rank's part of the parameters: it has that part's gradient and moments alone,
// and every rank has all weights. A part is a range of the flat buffer that begins with a block of
// the norm's sum, so that the norm and the step have the same bits for any number of ranks.
//
// All functions but `steps` are called by all ranks at once.
#pragma once

#include <vector>

#include "base/aligned.h"
#include "ranks/ranks.h"
#include "trainer/gradient_update.h"
#include "trainer/rank_backend.h"
#include "trainer/state_shard.h"

namespace leeway {

class ShardedUpdate : public GradientUpdate, public RankShare, public StateShard {
 public:
  // Both must outlive it; `policy` is the one that its functions are given.
  ShardedUpdate(Ranks& ranks, Parameters& policy);

  Parameters& in_place() override;  // aborts: ranks share slots
  void add(ThreadPool& pool, std::optional<Parameters> sum, GradientTree& tree) override;
  double norm(ThreadPool& pool) override;
  void zero() override;
  void step(ThreadPool& pool, const OptimizerTable& table, double rate, double scale,
            Parameters& policy) override;
  int64_t steps() const override { return steps_; }
  // Rank 0; the others call collect_moments for it.
  TrainingState state(const Parameters& policy) override;
  StateShard& shard() override { return *this; }
  // The folder is rank 0's; where that throws, the others change nothing and return.
  void load(const std::string& folder, Parameters& policy) override;

  double take_seconds() override;
  bool needs_weights() const override { return false; }
  void bring_weights() override {}
  void begin_passes(const SlotPass&, int64_t, int64_t) override {}
  void end_passes() override {}
  void bring_snapshot() override {}

  StateModel model() const override { return state_model(policy_); }
  std::vector<StatePiece> pieces(int rank) const override;
  void read(StateKind kind, const StatePiece& piece, std::span<float> to) const override;
  std::function<void()> prepare(const ReadState& read) override;

 private:
  size_t first() const { return bounds_[static_cast<size_t>(ranks_.rank())]; }
  size_t size() const { return bounds_[static_cast<size_t>(ranks_.rank()) + 1] - first(); }
  template <class Work>
  void timed(const Work& work);

  Ranks& ranks_;
  size_t place_of(const StatePiece& piece) const {  // in this rank's part
    return offsets_[piece.parameter] + piece.first - first();
  }
  Parameters& policy_;
  std::vector<size_t> offsets_;                   // of parameters in the flat buffer
  std::vector<size_t> bounds_;                    // [ranks + 1], into the flat buffer
  AlignedVector<float> gradient_, pass_, m_, v_;  // of this rank's part
  bool has_pass_ = false;
  int64_t steps_ = 0;
  double seconds_ = 0.0;
};

}  // namespace leeway
