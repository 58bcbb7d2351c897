#include "trainer/gradient_tree.h"

#include <algorithm>
#include <utility>

#include "leeway/error.h"

namespace leeway {

void add_to(ThreadPool& pool, std::span<const float> from, std::span<float> to) {
  constexpr size_t kBlock = size_t{1} << 14;
  pool.run((to.size() + kBlock - 1) / kBlock, [&](size_t block) {
    const size_t first = block * kBlock, count = std::min(kBlock, to.size() - first);
    float* __restrict sum = to.data() + first;
    const float* __restrict more = from.data() + first;
    for (size_t i = 0; i < count; ++i) sum[i] += more[i];
  });
}

GradientTree::GradientTree(const Parameters& like) : config_(like.config()) {
  if (like.lora() != nullptr) lora_ = *like.lora();
}

Parameters& GradientTree::current() {
  if (current_) return *current_;
  if (spare_.empty()) {
    current_.emplace(config_, lora_);
  } else {
    current_ = std::move(spare_.back());
    spare_.pop_back();
    std::fill(current_->flat().begin(), current_->flat().end(), 0.0f);
  }
  return *current_;
}

void GradientTree::end_slot(ThreadPool& pool, bool any) {
  nodes_.push_back({0, any ? std::exchange(current_, std::nullopt) : std::nullopt});
  LEEWAY_CHECK(!any || nodes_.back().sum, "a slot with samples has a gradient");
  while (nodes_.size() > 1 && nodes_[nodes_.size() - 2].level == nodes_.back().level) {
    Node right = std::move(nodes_.back());
    nodes_.pop_back();
    Node& left = nodes_.back();
    ++left.level;
    if (!right.sum) continue;
    if (!left.sum) {
      left.sum = std::move(right.sum);
      continue;
    }
    add_to(pool, right.sum->flat(), left.sum->flat());
    give_back(std::move(*right.sum));
  }
}

std::optional<Parameters> GradientTree::take_sum() {
  LEEWAY_CHECK(nodes_.size() == 1, "the slots of a pass are a power of two");
  std::optional<Parameters> sum = std::move(nodes_[0].sum);
  nodes_.clear();
  return sum;
}

void GradientTree::clear() {
  if (current_) give_back(std::move(*current_));
  current_.reset();
  for (Node& node : nodes_) {
    if (node.sum) give_back(std::move(*node.sum));
  }
  nodes_.clear();
}

}  // namespace leeway
