// The operators torch sees. Kernels for the CPU and the gradients are registered beside their code;
// those of another device register with the same schemas.
//
// `rows` are the positions that carry loss, rising; without them every token is computed. Tokens
// that are not listed have log-probability, entropy and gradient 0. `denominator` is the global
// one; a negative number means the batch's own. `metrics` is one row that finalize_metrics joins.
// Names that begin with an underscore are what the gradients are made of, not for users.

#include "leeway/metrics.h"
#include "ops/torch_compat.h"

TORCH_LIBRARY(leeway, m) {
  m.def(
      "token_logprobs(Tensor hidden, Tensor weight, Tensor targets, Tensor? rows, "
      "Tensor? temperature) -> (Tensor logprobs, Tensor entropy)");
  m.def(
      "policy_loss(Tensor logprobs, Tensor cu_seqlens, Tensor mask, Tensor advantages, "
      "Tensor rollout_logprobs, Tensor? prox_logprobs, Tensor? ref_logprobs, "
      "Tensor? teacher_logprobs, Tensor? weights, Tensor? versions, str spec_json, "
      "float denominator) -> (Tensor loss, Tensor g, Tensor metrics)");
  m.def(
      "head_backward(Tensor hidden, Tensor weight, Tensor targets, Tensor g, Tensor? rows, "
      "Tensor? temperature) -> (Tensor d_hidden, Tensor d_weight)");
  m.def(
      "policy_head(Tensor hidden, Tensor weight, Tensor targets, Tensor? rows, Tensor cu_seqlens, "
      "Tensor mask, Tensor advantages, Tensor rollout_logprobs, Tensor? prox_logprobs, "
      "Tensor? ref_logprobs, Tensor? teacher_logprobs, Tensor? weights, Tensor? versions, "
      "Tensor? temperature, str spec_json, float denominator) "
      "-> (Tensor loss, Tensor logprobs, Tensor entropy, Tensor metrics)");
  m.def("metric_names(str spec_json) -> str[]");
  m.def("finalize_metrics(Tensor[] metrics, str spec_json) -> Tensor");

  // Gradients that are not wanted are undefined tensors.
  m.def(
      "_head_backward(Tensor hidden, Tensor weight, Tensor targets, Tensor? g, Tensor? g_entropy, "
      "Tensor? rows, Tensor? temperature, bool want_hidden, bool want_weight) "
      "-> (Tensor d_hidden, Tensor d_weight)");
  m.def(
      "_policy_head(Tensor hidden, Tensor weight, Tensor targets, Tensor? rows, "
      "Tensor cu_seqlens, Tensor mask, Tensor advantages, Tensor rollout_logprobs, "
      "Tensor? prox_logprobs, Tensor? ref_logprobs, Tensor? teacher_logprobs, Tensor? weights, "
      "Tensor? versions, Tensor? temperature, str spec_json, float denominator, "
      "bool want_hidden, bool want_weight) -> (Tensor loss, Tensor logprobs, Tensor entropy, "
      "Tensor metrics, Tensor d_hidden, Tensor d_weight)");
}
