// A correction, a preset and a metric of one's own, in a library that leeway loads:
//
//   mine           a weight, min(pi/rollout, mine_high): REINFORCE with it is CISPO
//   vanilla_pg     a preset, -A log pi, with nothing to set
//   plugin/risen   a metric, the share of tokens that have become more likely
//
// They appear in `leeway loss list --plugin libmine.so`; keys are as strict as those of built-in
// ones.

#include <algorithm>
#include <cmath>

#include "leeway/plugin.h"

using namespace leeway;

LEEWAY_PLUGIN(catalog) {
  const KeyInfo high{"mine_high", KeyType::number, "5", "largest weight", {0.0, kInfinity}, true,
                     {}};
  catalog.add(CorrectionInfo{"mine",
                             "this example",
                             "a clipped current/rollout weight",
                             {high},
                             [](const KeyValues& keys) {
                               const double most = keys.number("mine_high");
                               return make_correction(
                                   "mine", "min(pi/rollout, mine_high)", {Stream::rollout},
                                   [most](const auto& sequence, auto effect) {
                                     for (size_t t = 0; t < sequence.mask.size(); ++t) {
                                       if (!sequence.mask[t])
                                         continue;  // masked positions may hold anything
                                       const auto ratio =
                                           std::exp(sequence.pi[t] - sequence.rollout[t]);
                                       effect.weights[t] =
                                           std::min(ratio, static_cast<decltype(ratio)>(most));
                                     }
                                   });
                             }});
  catalog.add(PresetInfo{"vanilla_pg", "this example", "-A log pi", {}, [](const KeyValues&) {
                           LossSpec spec;
                           spec.surrogate.kind = SurrogateKind::log_prob;
                           return spec;
                         }});
  catalog.add(OwnMetric{"risen",
                        "share of trained tokens with pi > rollout",
                        {Stream::rollout},
                        [](const SequenceView<double>& sequence) {
                          MetricShare share;
                          for (size_t t = 0; t < sequence.mask.size(); ++t) {
                            if (!sequence.mask[t]) continue;
                            share.count += 1.0;
                            share.sum += sequence.pi[t] > sequence.rollout[t] ? 1.0 : 0.0;
                          }
                          return share;
                        }});
}
