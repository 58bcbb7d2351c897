// A trainer's backend that hands every call on to another, for tests that change a few of them.
#pragma once

#include <memory>
#include <utility>

#include "trainer/backend.h"

namespace leeway::testing {

class ForwardingBackend : public TrainingBackend {
 public:
  explicit ForwardingBackend(std::unique_ptr<TrainingBackend> inner) : inner_(std::move(inner)) {}

  std::shared_ptr<const PolicySnapshot> snapshot(PolicyVersion version) override {
    return inner_->snapshot(version);
  }
  const Parameters& parameters() override { return inner_->parameters(); }
  const ModelConfig& config() const override { return inner_->config(); }
  void score(PolicyKind policy, const MicroBatch& batch, RowValues& values) override {
    inner_->score(policy, batch, values);
  }
  double loss_pass(const MicroBatch& batch, const LossPass& pass, MetricSums& metrics,
                   RowValues& values) override {
    return inner_->loss_pass(batch, pass, metrics, values);
  }
  void gradient_pass(const MicroBatch& batch, std::span<const float> g, double entropy_gradient,
                     RowValues& values) override {
    inner_->gradient_pass(batch, g, entropy_gradient, values);
  }
  std::vector<SlotResult> run_slots(const PackedBatch& batch, std::span<const GradientSlot> slots,
                                    const SlotPass& pass, std::span<const float> g) override {
    return inner_->run_slots(batch, slots, pass, g);
  }
  int64_t slots() const override { return inner_->slots(); }
  void end_slot(bool any) override { inner_->end_slot(any); }
  void end_pass() override { inner_->end_pass(); }
  double gradient_norm() override { return inner_->gradient_norm(); }
  void zero_gradients() override { inner_->zero_gradients(); }
  void step(const OptimizerTable& table, double rate, double scale) override {
    inner_->step(table, rate, scale);
  }
  int64_t steps() const override { return inner_->steps(); }
  TrainingState state() override { return inner_->state(); }
  std::function<TrainingState()> state_later() override { return inner_->state_later(); }
  std::function<FileSums(const std::string&)> save_later() override { return inner_->save_later(); }
  void load(const std::string& folder) override { inner_->load(folder); }
  bool leave_room(bool leaves) override { return inner_->leave_room(leaves); }

 private:
  const std::unique_ptr<TrainingBackend> inner_;
};

}  // namespace leeway::testing
