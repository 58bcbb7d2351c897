// The operators torch sees. Kernels for the CPU and the gradients are registered next to their
// code; those of another device register with the same schemas.
//
// `rows` are the positions that carry loss, rising; without them every token is computed. Tokens
// that are not listed have log-probability, entropy and gradient 0. `denominator` is the global
// one; a negative number means the batch's own. `metrics` is one row that finalize_metrics joins.
//
// `chunk_bytes` bounds the workspace for logits (0: the device's own choice). With `invariant` a
// row's log-probability does not depend, bit for bit, on the other rows; `float32_logits` keeps
// the logits of bf16 products in float32. The CPU always does both. A weight's gradient is added up
// in its own type, or with `float32_weight_gradient` in float32 (as the CPU does), the type in
// which head_backward then returns it.
//
// `rollout_ids` [sequences]: sequences with equal numbers are samples of one rollout, which count
// once in reductions over sequences. With `prox_is_pi` the log-probabilities computed here stand
// for the proximal ones: no optimizer step lies between the two. `correction_weights` and
// `correction_mask` [tokens] are what corrections that the caller computes give; see spec_json.h.
//
// Names that begin with an underscore are what the gradients and the Python package are made of,
// not for users.

#include <torch/library.h>

#include "leeway/metrics.h"

TORCH_LIBRARY(leeway, m) {
  m.def(
      "token_logprobs(Tensor hidden, Tensor weight, Tensor targets, Tensor? rows, "
      "Tensor? temperature, *, int chunk_bytes=0, bool invariant=False, bool float32_logits=False, "
      "bool float32_weight_gradient=False) "
      "-> (Tensor logprobs, Tensor entropy)");
  m.def(
      "policy_loss(Tensor logprobs, Tensor cu_seqlens, Tensor mask, Tensor advantages, "
      "Tensor rollout_logprobs, Tensor? prox_logprobs, Tensor? ref_logprobs, "
      "Tensor? teacher_logprobs, Tensor? weights, Tensor? versions, str spec_json, "
      "float denominator, *, Tensor? rollout_ids=None, Tensor? correction_weights=None, "
      "Tensor? correction_mask=None) -> (Tensor loss, Tensor g, Tensor metrics)");
  m.def(
      "head_backward(Tensor hidden, Tensor weight, Tensor targets, Tensor g, Tensor? rows, "
      "Tensor? temperature, *, int chunk_bytes=0, bool invariant=False, bool float32_logits=False, "
      "bool float32_weight_gradient=False) "
      "-> (Tensor d_hidden, Tensor d_weight)");
  m.def(
      "policy_head(Tensor hidden, Tensor weight, Tensor targets, Tensor? rows, Tensor cu_seqlens, "
      "Tensor mask, Tensor advantages, Tensor rollout_logprobs, Tensor? prox_logprobs, "
      "Tensor? ref_logprobs, Tensor? teacher_logprobs, Tensor? weights, Tensor? versions, "
      "Tensor? temperature, str spec_json, float denominator, *, int chunk_bytes=0, "
      "bool invariant=False, bool float32_logits=False, "
      "bool float32_weight_gradient=False, Tensor? rollout_ids=None, bool prox_is_pi=False) "
      "-> (Tensor loss, Tensor logprobs, Tensor entropy, Tensor metrics)");
  m.def("metric_names(str spec_json) -> str[]");
  m.def("finalize_metrics(Tensor[] metrics, str spec_json) -> Tensor");

  // Texts about losses, as JSON; catalog_ops.cpp.
  m.def("_describe(str spec_json) -> str");
  m.def("_explain(str spec_json) -> str");
  m.def("_catalog() -> str");
  m.def("_compare(str batch_json, str requests_json) -> str");
  m.def("_set_corrections(str corrections_json) -> ()");

  // Gradients that are not wanted are empty tensors.
  m.def(
      "_head_backward(Tensor hidden, Tensor weight, Tensor targets, Tensor? g, Tensor? g_entropy, "
      "Tensor? rows, Tensor? temperature, int chunk_bytes, bool invariant, bool float32_logits, "
      "bool float32_weight_gradient, "
      "bool want_hidden, bool want_weight) "
      "-> (Tensor d_hidden, Tensor d_weight)");
  m.def(
      "_policy_head(Tensor hidden, Tensor weight, Tensor targets, Tensor? rows, "
      "Tensor cu_seqlens, Tensor mask, Tensor advantages, Tensor rollout_logprobs, "
      "Tensor? prox_logprobs, Tensor? ref_logprobs, Tensor? teacher_logprobs, Tensor? weights, "
      "Tensor? versions, Tensor? temperature, str spec_json, float denominator, int chunk_bytes, "
      "bool invariant, bool float32_logits, "
      "bool float32_weight_gradient, Tensor? rollout_ids, bool prox_is_pi, bool want_hidden, "
      "bool want_weight) "
      "-> (Tensor loss, Tensor logprobs, Tensor entropy, "
      "Tensor metrics, Tensor d_hidden, Tensor d_weight)");
}
