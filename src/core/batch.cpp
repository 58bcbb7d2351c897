#include "leeway/error.h"
#include "leeway/loss.h"

namespace leeway {

BatchView<double> Batch::view() const {
  return {offsets,    pi,      prox, rollout,  ref,        teacher,
          advantages, weights, mask, versions, rollout_ids};
}

FloatBatch::FloatBatch(const Batch& b)
    : offsets(b.offsets),
      pi(b.pi.begin(), b.pi.end()),
      prox(b.prox.begin(), b.prox.end()),
      rollout(b.rollout.begin(), b.rollout.end()),
      ref(b.ref.begin(), b.ref.end()),
      teacher(b.teacher.begin(), b.teacher.end()),
      advantages(b.advantages.begin(), b.advantages.end()),
      weights(b.weights.begin(), b.weights.end()),
      mask(b.mask),
      versions(b.versions),
      rollout_ids(b.rollout_ids) {}

BatchView<float> FloatBatch::view() const {
  return {offsets,    pi,      prox, rollout,  ref,        teacher,
          advantages, weights, mask, versions, rollout_ids};
}

Batch slice(const Batch& b, int64_t first, int64_t last) {
  LEEWAY_CHECK(0 <= first && first <= last && last < static_cast<int64_t>(b.offsets.size()),
               "sequences of the batch");
  Batch out;
  const int64_t begin = b.offsets[static_cast<size_t>(first)];
  const int64_t end = b.offsets[static_cast<size_t>(last)];
  for (int64_t s = first; s < last; ++s) {
    out.offsets.push_back(b.offsets[static_cast<size_t>(s) + 1] - begin);
  }
  auto tokens = [&](const auto& from, auto& to) {
    if (!from.empty()) to.assign(from.begin() + begin, from.begin() + end);
  };
  tokens(b.pi, out.pi);
  tokens(b.prox, out.prox);
  tokens(b.rollout, out.rollout);
  tokens(b.ref, out.ref);
  tokens(b.teacher, out.teacher);
  tokens(b.advantages, out.advantages);
  tokens(b.weights, out.weights);
  tokens(b.mask, out.mask);
  tokens(b.versions, out.versions);
  if (!b.rollout_ids.empty()) {
    out.rollout_ids.assign(b.rollout_ids.begin() + first, b.rollout_ids.begin() + last);
  }
  if (!b.groups.empty()) out.groups.assign(b.groups.begin() + first, b.groups.begin() + last);
  return out;
}

}  // namespace leeway
