// Draws tokens from logits in host memory, with all threads of a pool.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/thread_pool.h"
#include "engine/scheduler.h"

namespace leeway {

class HostDraws {
 public:
  // The pool must outlive this object.
  explicit HostDraws(ThreadPool& pool);

  // drawn[i] from row draws[i].logits of `logits` [rows, vocabulary]. Which thread draws which
  // token does not matter: each has its own row and its own random numbers.
  void draw(std::span<const Draw> draws, const float* logits, int64_t vocabulary,
            std::span<Drawn> drawn);
  // The same rows' most likely tokens alone, for tokens that were drawn elsewhere.
  void find_most_likely(std::span<const Draw> draws, const float* logits, int64_t vocabulary,
                        std::span<Drawn> drawn);

 private:
  // draw_one(i, sampler) for all draws.
  template <class DrawOne>
  void for_each(std::span<const Draw> draws, int64_t vocabulary, const DrawOne& draw_one);

  ThreadPool& pool_;
  std::vector<TokenSampler> samplers_;  // [threads]
};

}  // namespace leeway
