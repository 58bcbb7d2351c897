// Credit by turn: advantages of the steps of a rollout, and of its tokens, where an environment
// says more than one reward at the end. A step is one call of the policy.
//
// Turn rewards. Where a step of any rollout of a group has a `reward`, each step of its rollouts
// has an advantage of its own, from the return from that step on:
//
//   R    the rollout's reward: the parts given at its end, plus all turn rewards
//   G_k  R - (turn rewards of the steps before k)           k = 0, 1, ..
//   A_k  orchestrator.advantage (advantages.h) over the G_k of the rollouts that have a step k;
//        the others take no part in the baseline of turn k
//
// A group without turn rewards has G_k = R, and one advantage per rollout, A_0. So turn rewards
// that are all on the last step of rollouts of equally many steps give the advantages of one reward
// at the end, bit for bit. length_penalty changes R, once, before this.
//
// Advantages. Where a step has `advantages`, they take the place of all this for its tokens.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "data/sample.h"
#include "orchestrator/advantages.h"
#include "orchestrator/scheduler.h"

namespace leeway {

// What is wrong with a rollout's credit: it is not empty and has not one entry per step, a list of
// advantages has neither one entry nor one per completion token, or a number is not one that a
// float32 can hold. Empty: nothing.
std::string credit_problem(const Rollout& rollout);

// A_k as [group][rollout][step]; empty lists for groups without turn rewards. Throws Error like
// compute_advantages.
std::vector<std::vector<std::vector<double>>> turn_advantages(std::span<const Group> groups,
                                                              const AdvantageOptions& options);

// The advantages of a sample that split_trajectory made of `rollout`: one for all tokens where the
// rollout has no credit, else one per token. `advantage` is the rollout's, `by_step` its list of
// turn_advantages, or empty. Tokens that were not sampled have the rollout's.
std::vector<float> token_advantages(const Sample& sample, const Rollout& rollout, double advantage,
                                    std::span<const double> by_step);

}  // namespace leeway
