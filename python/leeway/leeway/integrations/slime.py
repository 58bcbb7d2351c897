"""slime: corrections as a custom TIS function, and losses as a custom loss.

  --use-tis --custom-tis-function-path leeway.integrations.slime.tis
  --loss-type custom_loss --custom-loss-function-path leeway.integrations.slime.loss

with the keys in LEEWAY_SPEC: {"correction": "icepop_tis", "tis_ratio_high": 3.0} for the first,
{"preset": "icepop", ..} for the second; or a path of a .json or .toml file with them.

The TIS function multiplies slime's own policy loss by a correction's weights: `tis`, `icepop_tis`
(proximal/rollout), `off_policy_is` (current/rollout, where slime passes cur_log_probs) or one of your
own. With slime's REINFORCE-like loss and `off_policy_is` that is CISPO. A correction's mask goes back as
changed loss masks: rejected tokens lose policy and KL terms, denominators stay.

The custom loss is a preset over the same log-probabilities, under slime's reducer.
"""
from __future__ import annotations

import functools
import json
import os
from typing import Any, Callable, Optional, Sequence

import torch
from torch import Tensor

from .._batch import pack
from .._correction import apply_corrections
from .._library import ops
from .._loss import policy_loss
from .._spec import Spec
from ._host import host_spec, keys_of_environment, without_nan

_TIS = "leeway.integrations.slime.tis"
_LOSS = "leeway.integrations.slime.loss"


@functools.lru_cache(maxsize=16)
def _parsed(text: str) -> str:
    return json.dumps(keys_of_environment())


def _keys() -> dict[str, Any]:
    return json.loads(_parsed(os.environ.get("LEEWAY_SPEC", "")))


@functools.lru_cache(maxsize=16)
def _correction_spec(text: str) -> Spec:
    keys = json.loads(text)
    name = keys.pop("correction", "tis")
    if "preset" in keys:
        raise ValueError(f"{_TIS}: LEEWAY_SPEC names a preset: slime's loss is the base here, give "
                         '{"correction": "tis"}')
    return Spec(f"reinforce+{name}", **keys, reduction="sum")


def tis(args: Any, *, pg_loss: Tensor, train_log_probs: Sequence[Tensor],
        rollout_log_probs: Sequence[Tensor], loss_masks: Sequence[Tensor],
        cur_log_probs: Optional[Sequence[Tensor]] = None, **_: Any
        ) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
    """slime's hook: (weighted pg_loss, loss masks, metrics of each token)."""
    keys = _keys()
    name = keys.get("correction", "tis")
    spec = _correction_spec(json.dumps(keys, sort_keys=True))
    own = bool(spec.described.callers)
    from_current = "prox" not in spec.reads and not own
    if cur_log_probs is None and from_current:
        raise ValueError(f"{_TIS}: {name} weighs the current policy against the rollouts, but this slime "
                         "passes no cur_log_probs: use tis or icepop_tis, or leeway.integrations.slime.loss")
    for given, what in ((train_log_probs, "train_log_probs"), (rollout_log_probs, "rollout_log_probs")):
        if not given:
            raise ValueError(f"{_TIS}: slime passes no {what}: a correction weighs one policy against "
                             "the other, so that rollouts must record theirs")
    prox = torch.cat(list(train_log_probs)).detach().float()
    rollout = torch.cat(list(rollout_log_probs)).detach().float()
    current = prox if cur_log_probs is None else torch.cat(list(cur_log_probs)).detach().float()
    mask = torch.cat(list(loss_masks)).to(prox.device) != 0
    lengths = torch.tensor([0, *(len(part) for part in loss_masks)], device=prox.device).cumsum(0)
    # REINFORCE with an advantage of -1 and a sum as reduction: its gradient is the weight.
    batch = pack(prox.shape, prox, "train_log_probs", rollout=rollout,
                 advantages=torch.full_like(prox, -1.0), mask=mask, prox=prox, ref=None, teacher=None,
                 cu_seqlens=lengths, weights=None, rollout_ids=None, versions=None)
    weights, keep, metrics = apply_corrections(spec, current, batch)
    # What a correction of one's own takes out goes back to slime as masks.
    everything = None if keep is None else torch.ones_like(keep)
    _, gradient, _ = ops.policy_loss(
        current, batch.cu_seqlens, mask, batch.advantages, rollout, prox, None, None, None, None,
        spec.json, 1.0, correction_weights=weights, correction_mask=everything)
    # slime multiplies what is reported by masks, so that masked positions must be finite.
    raw = torch.where(mask, torch.exp((current if from_current else prox) - rollout),
                      torch.ones_like(rollout))
    # The operator's exp and PyTorch's differ in their last bits; a bound moves a weight further.
    bounded = mask & ((gradient - raw).abs() > 1e-5 * raw)
    per_token = {"tis": raw, "tis_abs": (raw - 1).abs(), "tis_clipfrac": bounded.float()}
    for metric, value in metrics.items():
        per_token[metric] = torch.full_like(raw, float(value))
    weighted = torch.where(mask, pg_loss * gradient.to(pg_loss.dtype), torch.zeros_like(pg_loss))
    if keep is None:
        return weighted, loss_masks, per_token
    parts = torch.split(keep, [len(part) for part in loss_masks])
    changed = [part * kept.to(part.dtype) for part, kept in zip(loss_masks, parts)]
    return weighted, changed, per_token


def _current_log_probs(args: Any, batch: Any, logits: Tensor) -> list[Tensor]:
    """slime's own log-probabilities of the response, one tensor for each sample."""
    from slime.backends.megatron_utils.loss import (get_log_probs_and_entropy,
                                                    get_rollout_top_p_logprob_kwargs)
    _, found = get_log_probs_and_entropy(
        logits, args=args, unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"], response_lengths=batch["response_lengths"],
        with_entropy=False, **get_rollout_top_p_logprob_kwargs(args, batch))
    return list(found["log_probs"])


@functools.lru_cache(maxsize=16)
def _loss_spec(text: str) -> Spec:
    keys = json.loads(text)
    return host_spec(_LOSS, keys.pop("preset", "icepop"), keys, "sum",
                     "slime's reducer decides what the sum is divided by",
                     {"teacher": "which slime does not pass"}, "in slime's micro-batches")


def loss(args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
         ) -> tuple[Tensor, dict[str, Tensor]]:
    """slime's custom loss: a preset over its log-probabilities, under its reducer."""
    spec = _loss_spec(json.dumps(_keys(), sort_keys=True))
    parts = _current_log_probs(args, batch, logits)
    current = torch.cat(parts)

    def stream(name: str) -> Optional[Tensor]:
        values = batch.get(name)
        return None if not values else torch.cat(list(values)).detach().float()

    # What each token counts in slime's reducer, which is linear: context parallelism, samples of one
    # rollout and per-token losses included.
    probe = torch.zeros_like(current, dtype=torch.float32, requires_grad=True)
    with torch.enable_grad():
        coefficients, = torch.autograd.grad(sum_of_sample_mean(probe), probe)
    lengths = torch.tensor([0, *(len(part) for part in parts)], device=current.device).cumsum(0)
    prox = stream("log_probs")
    total, metrics = policy_loss(
        current.float(), rollout=stream("rollout_log_probs"), prox="current" if prox is None else prox,
        ref=stream("ref_log_probs"), advantages=stream("advantages"), mask=coefficients != 0,
        weights=coefficients, cu_seqlens=lengths, preset=spec, denominator=1.0)
    # slime adds reported numbers up over micro-batches and divides: sums are what it expects.
    scale = sum_of_sample_mean(torch.ones_like(probe.detach()))
    reported = {name: scale * value for name, value in without_nan(metrics).items()}
    return total, {"loss": total.detach().clone(), **reported}
