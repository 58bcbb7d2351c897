#include "trainer/gradient_update.h"

#include <algorithm>
#include <utility>

namespace leeway {

void WholeUpdate::add(ThreadPool& pool, std::optional<Parameters> sum, GradientTree& tree) {
  if (!sum) return;
  if (std::exchange(has_pass_, true)) {
    add_to(pool, sum->flat(), gradients_.flat());
  } else {
    std::swap(gradients_, *sum);
  }
  tree.give_back(std::move(*sum));
}

void WholeUpdate::zero() {
  has_pass_ = false;
  std::fill(gradients_.flat().begin(), gradients_.flat().end(), 0.0f);
}

}  // namespace leeway
