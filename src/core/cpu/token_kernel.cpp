// The vector kernel, compiled once per SIMD level and chosen at run time. Plain plans have a loop
// of their own per surrogate, in which most of the formula falls away.

#include "core/cpu/token_kernel.h"

#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "core/cpu/token_kernel.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "core/cpu/token_loop-inl.h"

HWY_BEFORE_NAMESPACE();
namespace leeway {
namespace HWY_NAMESPACE {

void token_kernel(const LossPlan& plan, const TokenInputs& in, const SequenceNumbers& sequence,
                  size_t n, KernelSums& sums, KernelHistogram* histogram) {
  auto run = [&](auto shape)
                 HWY_ATTR { run_tokens<decltype(shape)>(plan, in, sequence, n, sums, histogram); };
#ifndef LEEWAY_FEWER_KERNELS  // sanitizers make each instantiation slow to compile
  const bool bare = in.batch_weights == nullptr && in.weights == nullptr && in.flags == nullptr &&
                    in.through == nullptr;
  if (plan.plain && bare) {
    switch (plan.kind) {
      case SurrogateKind::ratio: return run(PlainPlan<SurrogateKind::ratio>());
      case SurrogateKind::log_prob: return run(PlainPlan<SurrogateKind::log_prob>());
      case SurrogateKind::clipped: return run(PlainPlan<SurrogateKind::clipped>());
      case SurrogateKind::detached_ratio: return run(PlainPlan<SurrogateKind::detached_ratio>());
      case SurrogateKind::soft_gate: return run(PlainPlan<SurrogateKind::soft_gate>());
    }
  }
#endif
  run(AnyPlan<TokenRules>());
}

}  // namespace HWY_NAMESPACE
}  // namespace leeway
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace leeway {

HWY_EXPORT(token_kernel);

void run_token_kernel(const LossPlan& plan, const TokenInputs& in, const SequenceNumbers& sequence,
                      size_t count, KernelSums& sums, KernelHistogram* histogram) {
  HWY_DYNAMIC_DISPATCH(token_kernel)(plan, in, sequence, count, sums, histogram);
}

}  // namespace leeway
#endif
