"""verl: policy losses `leeway/<preset>`, registered when verl is imported (entry point verl.plugins).

  actor_rollout_ref.actor.policy_loss.loss_mode=leeway/icepop
  LEEWAY_SPEC='{"icepop_ratio_high": 2.0}'      # or the path of a .toml or .json file with the keys

verl's loss functions get the log-probabilities of one earlier policy, `old_log_prob`:

- Losses that compare with the proximal policy (ppo, grpo, gspo, ..) take it as prox. What verl's own
  rollout correction gives (`rollout_is_weights`) multiplies their policy term.
- Losses that compare with the rollouts (icepop, dppo_tv, ..) need it to be the rollouts':
  algorithm.rollout_correction.bypass_mode=true, which the loss sees only if
  actor_rollout_ref.actor.policy_loss.rollout_correction.bypass_mode=true says so too.
- Losses that read both, a reference or a teacher are refused by name.

The sum is divided as `agg_loss` does: loss_agg_mode with config.global_batch_info, times dp_size.
"""
from __future__ import annotations

import contextvars
from typing import Any, Mapping, Optional

from torch import Tensor
from verl.trainer.ppo.core_algos import register_policy_loss

from .._correction import correction
from .._loss import policy_loss
from .._spec import Spec, presets
from ._host import host_spec, keys_of_environment

_REDUCTIONS = {"token-mean": "token_mean", "token-sum": "sum",
               "seq-mean-token-sum": "seq_mean_token_sum",
               "seq-mean-token-sum-norm": "seq_mean_token_sum",
               "seq-mean-token-mean": "seq_mean_token_mean"}

_is_weights: contextvars.ContextVar[Tensor] = contextvars.ContextVar("leeway_verl_is_weights")


@correction("verl_rollout_is", reads=(), formula="verl's rollout_is_weights")
def _rollout_is(tokens):
    """the weights of verl's own rollout correction"""
    return _is_weights.get()


def _checked_spec(preset: str, keys: Mapping[str, Any], reduction: str) -> Spec:
    name = f"leeway/{preset}"
    spec = host_spec(
        name, preset, keys, reduction, "verl's loss_agg_mode decides what the sum is divided by",
        {stream: "which verl does not hand to a policy loss (use_kl_loss adds a reference penalty)"
         for stream in ("ref", "teacher")}, "in micro-batches")
    if "prox" in spec.reads and "rollout" in spec.reads:
        raise ValueError(f"{name}: reads prox and rollout log-probabilities, verl hands over one of them: "
                         "use the base preset with verl's own rollout correction "
                         "(algorithm.rollout_correction.rollout_is)")
    return spec


def _bypasses(config: Any) -> bool:
    policy = getattr(config, "policy_loss", None)
    settings = policy.get("rollout_correction", None) if policy is not None else None
    return bool(settings.get("bypass_mode", False)) if settings is not None else False


def _divisor(mode: str, info: Mapping[str, Any], mask: Tensor) -> Any:
    """What agg_loss divides the sum of this micro-batch by."""
    dp_size = info.get("dp_size") or 1
    tokens, batch_size = info.get("batch_num_tokens"), info.get("global_batch_size")
    if mode == "token-sum":
        return 1.0 / dp_size
    if mode == "token-mean":
        if tokens is None and dp_size > 1:
            raise ValueError("(global) batch_num_tokens is required when dp_size > 1")
        return (mask.sum().clamp(min=1) if tokens is None else tokens) / dp_size
    if batch_size is None and dp_size > 1:
        raise ValueError("global_batch_size is required when dp_size > 1")
    if batch_size is None:
        batch_size = mask.any(dim=-1).sum().clamp(min=1)
    scale = 1.0
    if mode == "seq-mean-token-sum-norm":
        scale = info.get("loss_scale_factor") or mask.shape[-1]
    return batch_size * scale / dp_size


def register(preset: str, name: Optional[str] = None, **keys: Any) -> None:
    """Registers `leeway/<preset>` (or `name`) with these keys; without keys those of LEEWAY_SPEC are
    read at the first call. For own corrections: call it in a module of VERL_USE_EXTERNAL_MODULES."""
    name = name or f"leeway/{preset}"
    known: dict[str, Spec] = {}
    if keys:
        _checked_spec(preset, keys, "token_mean")

    def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean",
             config=None, rollout_is_weights=None):
        if loss_agg_mode not in _REDUCTIONS:
            raise ValueError(f"{name}: loss_agg_mode = {loss_agg_mode}: must be one of "
                             f"{', '.join(_REDUCTIONS)}")
        weighted = rollout_is_weights is not None
        slot = f"{loss_agg_mode} {weighted}"
        if slot not in known:
            given = dict(keys or keys_of_environment())
            chosen = given.pop("preset", preset)
            if preset != "spec" and chosen != preset:
                raise ValueError(f"{name}: LEEWAY_SPEC has keys of preset {chosen}: set "
                                 "loss_mode=leeway/spec, or leave \"preset\" out")
            if chosen == "spec":
                raise ValueError("leeway/spec: LEEWAY_SPEC must name a preset")
            base = _checked_spec(chosen, given, _REDUCTIONS[loss_agg_mode])
            if weighted and "rollout" in base.reads:
                raise ValueError(f"{name}: verl's rollout_is_weights would correct for the rollouts a "
                                 "second time: set algorithm.rollout_correction.rollout_is=null")
            known[slot] = Spec(chosen + "+verl_rollout_is", **base.keys) if weighted else base
        spec = known[slot]
        from_rollout = "rollout" in spec.reads
        if from_rollout and not _bypasses(config):
            raise ValueError(
                f"{name}: compares the policy with the rollouts, but verl hands over the log-probabilities "
                "of the proximal policy: set algorithm.rollout_correction.bypass_mode=true and "
                "actor_rollout_ref.actor.policy_loss.rollout_correction.bypass_mode=true")
        mask = response_mask.bool()
        token = _is_weights.set(rollout_is_weights.reshape(-1)) if weighted else None
        try:
            total, metrics = policy_loss(
                log_prob.float(), rollout=old_log_prob.float() if from_rollout else None,
                prox=None if from_rollout else old_log_prob.float(), advantages=advantages.float(),
                mask=mask, preset=spec, denominator=1.0)
        finally:
            if token is not None:
                _is_weights.reset(token)
        info = getattr(config, "global_batch_info", None) or {}
        return (total / _divisor(loss_agg_mode, info, mask),
                {f"actor/leeway/{metric}": value for metric, value in metrics.items()})

    loss.__name__ = loss.__qualname__ = "leeway_" + "".join(c if c.isalnum() else "_" for c in preset)
    register_policy_loss(name)(loss)


def _register_all() -> None:
    listed = presets()
    bases = [entry.name for entry in listed if entry.kind == "preset"]
    weights = [entry.name for entry in listed
               if entry.kind == "correction" and entry.name != "verl_rollout_is"]
    for base in bases:
        register(base)
        for weight in weights:
            register(f"{base}+{weight}")
    register("off_policy_is")
    register("spec")


_register_all()
