"""prime-rl: a custom loss, and its fused output head computed by Leeway.

  [trainer.loss]
  type = "custom"
  import_path = "leeway.integrations.prime_rl.loss"      # or ..loss_and_head
  kwargs = { preset = "icepop", icepop_ratio_high = 2.0 }

prime-rl hands over one sequence at a time and divides the sum by the trained tokens of all ranks, so
losses that look at the whole batch are refused, and so are those of a proximal policy, which it does not
have (give anchor = "rollout").

`loss_and_head` is the same loss and calls patch_head() when prime-rl imports it.
"""
from __future__ import annotations

import functools
import sys
from typing import Any, Callable

import torch

from .._loss import policy_loss, token_logprobs
from .._spec import Spec
from ._host import host_spec, without_nan

_NAME = "leeway.integrations.prime_rl.loss"


@functools.lru_cache(maxsize=64)
def _spec(preset: str, keys: tuple[tuple[str, Any], ...]) -> Spec:
    return host_spec(
        _NAME, preset, dict(keys), "sum", "prime-rl divides the sum by the trained tokens of all ranks",
        {"prox": "which prime-rl does not have: give anchor = \"rollout\", or leave the correction "
                 "out"}, "one sequence at a time")


def loss(inputs: Any, preset: str = "icepop", **keys: Any) -> Any:
    """LossInputs of one sequence to LossOutputs: the sum over its tokens, and metrics as tensors."""
    spec = _spec(preset, tuple(sorted(keys.items())))
    ref = inputs.ref_logprobs
    for stream in ("ref", "teacher"):
        if stream in spec.reads and ref is None:
            raise ValueError(f"{_NAME}: preset {preset} reads {stream} log-probabilities, but prime-rl "
                             "computed none: configure a reference model")
    logprobs = inputs.trainer_logprobs
    offsets = torch.tensor([0, logprobs.shape[0]], device=logprobs.device)
    weights = inputs.loss_weights
    total, metrics = policy_loss(
        logprobs.float(), rollout=inputs.inference_logprobs.float(), advantages=inputs.advantages.float(),
        mask=inputs.loss_mask, ref=None if ref is None else ref.float(),
        teacher=None if ref is None else ref.float(), cu_seqlens=offsets,
        weights=None if weights is None else weights.float(), preset=spec, denominator=1.0)
    outputs = sys.modules[type(inputs).__module__].LossOutputs
    return outputs(loss=total, metrics={
        name: torch.tensor(value, device=logprobs.device)
        for name, value in without_nan(metrics).items()})


def patch_head() -> Callable[[], None]:
    """Lets prime-rl's FusedOutputLinear compute by Leeway's token_logprobs: four matrix products,
    differentiable in log-probabilities and entropy. Returns a function that undoes it.

    It is patched on the class, so that FSDP2's instances have it too. Models with capped logits (Gemma)
    have another head in prime-rl and keep it.
    """
    from prime_rl.trainer.models.layers import lm_head

    fused = lm_head.FusedOutputLinear
    before = fused.forward

    def forward(self, hidden_states, labels=None, temperature=None):
        if labels is None or temperature is None:
            raise ValueError("FusedOutputLinear needs labels and temperatures, one for each token")
        weight = self.weight
        logprobs, entropy = token_logprobs(hidden_states.to(weight.dtype), weight, labels,
                                           temperature.float())
        return lm_head.PrimeLmOutput(logprobs=logprobs, entropy=entropy)

    fused.forward = forward

    def undo() -> None:
        fused.forward = before

    return undo


def __getattr__(name: str) -> Any:
    if name == "loss_and_head":
        patch_head()
        return loss
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
