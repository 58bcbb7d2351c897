// Sums the gradients of slots in a binary tree, ((0 + 1) + (2 + 3)), as they are finished one after
// another: at most log2(slots) + 1 gradients are in memory.
#pragma once

#include <optional>
#include <vector>

#include "base/thread_pool.h"
#include "model/parameters.h"

namespace leeway {

class GradientTree {
 public:
  // Gradients have the layout of `like`.
  explicit GradientTree(const Parameters& like);

  // What the slot at hand is added to: zeros when the slot begins.
  Parameters& current();
  // The slot is finished. Without `any` it is left out: nothing was added to it.
  void end_slot(ThreadPool& pool, bool any);
  // The sum of all finished slots, a power of two of them, handed out; null if all were left out.
  std::optional<Parameters> take_sum();
  // Takes memory back for the next slots.
  void give_back(Parameters&& spare) { spare_.push_back(std::move(spare)); }
  // Forgets all slots.
  void clear();

 private:
  struct Node {
    int level;
    std::optional<Parameters> sum;  // null: all its slots were left out
  };

  ModelConfig config_;
  std::optional<LoraSettings> lora_;
  std::optional<Parameters> current_;
  std::vector<Node> nodes_;  // levels fall
  std::vector<Parameters> spare_;
};

// to += from, in order, whatever the threads.
void add_to(ThreadPool& pool, std::span<const float> from, std::span<float> to);

}  // namespace leeway
