"""The loss of log-probabilities, and of hidden states, as functions of tensors."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Optional, Union

import torch
from torch import Tensor

from ._batch import Batch, check_device, check_tensor, pack, text_of
from ._correction import apply_corrections
from ._library import ops
from ._metrics import Metrics
from ._spec import Key, Spec, as_spec

Denominator = Union[float, int, Tensor, None]

_LARGEST = torch.finfo(torch.float32).max


def _check_reads(spec: Spec, batch: Batch) -> None:
    missing = batch.missing()
    for stream in spec.described.reads:
        if stream in missing:
            raise ValueError(f"preset {spec.preset} reads the stream \"{stream}\": give {stream}=, "
                             "log-probabilities of the taken tokens; leeway.explain(preset) says what "
                             "it is for")


def _denominator(value: Denominator) -> tuple[float, Optional[Tensor]]:
    """The operator's number, and a tensor that its loss is still to be divided by."""
    if value is None:
        return -1.0, None
    if isinstance(value, Tensor):
        value = check_tensor(value, "denominator")
        if value.numel() != 1 or value.is_complex() or value.device.type == "meta":
            raise ValueError(f"denominator must be one number, got {text_of(value)} on {value.device}")
        if value.device.type == "cpu" and not torch.compiler.is_compiling() and \
                not 0.0 <= float(value) < float("inf"):
            raise ValueError(f"denominator = {float(value)}: must be finite and not negative")
        return 1.0, value.detach().reshape(()).to(torch.float32).clamp(min=1.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"denominator must be a number or a tensor of one, "
                        f"got {type(value).__name__}")
    if not 0.0 <= value <= _LARGEST:
        raise ValueError(f"denominator = {value}: must be finite and not negative; None is the "
                         "batch's own")
    return float(value), None


def _metrics(spec: Spec, row: Tensor, batch: Batch, own: dict[str, Any]) -> dict[str, Any]:
    if not torch.compiler.is_compiling():
        return Metrics(spec, row, batch.missing(), own)
    values = ops.finalize_metrics([row], spec.json)
    missing = batch.missing()
    named = {name: values[k] for k, (name, needs) in enumerate(spec.described.metrics)
             if needs not in missing}
    named.update(own)
    return named


def _loss_of(logprobs: Tensor, batch: Batch, spec: Spec, denominator: Denominator
             ) -> tuple[Tensor, dict[str, Any]]:
    _check_reads(spec, batch)
    if batch.prox_is_current:
        batch = replace(batch, prox=logprobs.detach(), prox_is_current=False)
    number, divisor = _denominator(denominator)
    weights, mask, own = apply_corrections(spec, logprobs, batch)
    # A loss that does not read the rollouts' log-probabilities may lack them, metrics of the mismatch
    # with it; the operator takes something in their place.
    rollout = logprobs.detach() if batch.rollout is None else batch.rollout
    loss, _, row = ops.policy_loss(
        logprobs, batch.cu_seqlens, batch.mask, batch.advantages, rollout, batch.prox, batch.ref,
        batch.teacher, batch.weights, batch.versions, spec.json, number,
        rollout_ids=batch.rollout_ids, correction_weights=weights, correction_mask=mask)
    if divisor is not None:
        loss = loss / divisor
    return loss, _metrics(spec, row, batch, own)


def policy_loss(logprobs: Tensor, *, rollout: Optional[Tensor], advantages: Tensor,
                mask: Optional[Tensor] = None, prox: Union[Tensor, str, None] = None,
                ref: Optional[Tensor] = None, teacher: Optional[Tensor] = None,
                cu_seqlens: Optional[Tensor] = None, weights: Optional[Tensor] = None,
                rollout_ids: Optional[Tensor] = None, versions: Optional[Tensor] = None,
                preset: Union[str, Spec] = "icepop", denominator: Denominator = None,
                **keys: Key) -> tuple[Tensor, dict[str, Any]]:
    """The loss of given log-probabilities, with its gradient, and its metrics.

    Args:
      logprobs: the policy's log-probabilities of the taken tokens, float32, with gradient: [N] packed,
        then `cu_seqlens` says where sequences begin; or [B, T] padded, then `mask` leaves out padding.
      rollout: log-probabilities as recorded when sampling, of the same shape; None for a loss that does
        not read them.
      advantages: one for each token, or one for each sequence.
      mask: trained tokens; without it all. Masked positions never matter, whatever they hold (but for
        presets of other code bases whose source looks past the mask).
      prox, ref, teacher: further log-probabilities, for losses that read them. prox="current": no
        optimizer step lies between the proximal policy and this one, so that their ratio is 1.
      weights: factors of each token's loss; 0 takes a token out.
      rollout_ids: [sequences], equal numbers are samples of one rollout and count once in reductions
        over sequences.
      versions: [tokens], which version of the policy sampled a token; for metrics.
      preset, **keys: the loss by name, or a `leeway.Spec`.
      denominator: of the whole batch, for a part of it; None is this batch's own
        (`leeway.denominator` counts it). A tensor of one number is used without waiting for it.

    Returns the loss, a float32 scalar, and metrics by name. An empty or all-masked batch has loss 0 and
    zero gradients.
    """
    spec = as_spec(preset, keys)
    logprobs = check_tensor(logprobs, "logprobs")
    if logprobs.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"logprobs must be float32, got {text_of(logprobs)}: log-probabilities of 16 "
                         "bits round ratios by several percent; compute them in float32")
    batch = pack(logprobs.shape, logprobs, "logprobs", rollout=rollout, advantages=advantages,
                 mask=mask, prox=prox, ref=ref, teacher=teacher, cu_seqlens=cu_seqlens,
                 weights=weights, rollout_ids=rollout_ids, versions=versions)
    return _loss_of(logprobs.reshape(-1).to(torch.float32), batch, spec, denominator)


class HeadOutput(NamedTuple):
    """What `policy_head` returns. Log-probabilities and entropy have no gradient and are 0 where a
    token is not computed."""
    loss: Tensor
    metrics: dict[str, Any]
    logprobs: Tensor
    entropy: Tensor


def _check_head(hidden: Any, weight: Any, targets: Any, temperature: Any
                ) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
    hidden, weight = check_tensor(hidden, "hidden"), check_tensor(weight, "weight")
    targets = check_tensor(targets, "targets")
    for value, name in ((hidden, "hidden"), (weight, "weight")):
        if value.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"{name} must be float32 or bfloat16, got {text_of(value)}")
    if hidden.dim() not in (2, 3):
        raise ValueError("hidden must be [N, H] packed or [B, T, H] padded, got "
                         f"{text_of(hidden)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"weight must be [vocabulary, {hidden.shape[-1]}], got {text_of(weight)}")
    if weight.dtype != hidden.dtype:
        raise ValueError(f"hidden and weight must have one dtype, got {text_of(hidden)} and "
                         f"{text_of(weight)}: convert one of them")
    if targets.dtype != torch.int64 or targets.shape != hidden.shape[:-1]:
        raise ValueError(f"targets must be int64 {list(hidden.shape[:-1])}, the token that each row "
                         f"predicts, got {text_of(targets)}")
    if hidden.shape[-1] == 0 or weight.shape[0] == 0:
        raise ValueError(f"hidden and weight must have numbers, got {text_of(hidden)} and "
                         f"{text_of(weight)}")
    check_device(weight, "weight", hidden, "hidden")
    check_device(targets, "targets", hidden, "hidden")
    if temperature is None or isinstance(temperature, Tensor):
        if temperature is not None:
            temperature = check_tensor(temperature, "temperature").detach()
            if temperature.numel() != 1 and temperature.shape != targets.shape:
                raise ValueError("temperature must be one number, or one for each token, "
                                 f"{list(targets.shape)}, got {text_of(temperature)}")
            if not (temperature.is_floating_point() or temperature.dtype in (torch.int32, torch.int64)):
                raise ValueError(f"temperature must be float32, got {text_of(temperature)}")
            if temperature.device.type != "cpu":
                check_device(temperature, "temperature", hidden, "hidden")
            temperature = temperature.to(hidden.device, torch.float32).reshape(-1)
        return hidden, weight, targets, temperature
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature must be a number or a tensor, got {type(temperature).__name__}")
    if not 0.0 < temperature <= _LARGEST:
        raise ValueError(f"temperature = {temperature}: must be above 0 and finite")
    number = None if temperature == 1.0 else torch.full((1,), float(temperature),
                                                        device=hidden.device)
    return hidden, weight, targets, number


def _check_options(rows: Any, hidden: Tensor, chunk_bytes: Any, **switches: Any) -> None:
    if rows is not None:
        rows = check_tensor(rows, "rows")
        if rows.dtype != torch.int64 or rows.dim() != 1:
            raise ValueError("rows must be int64 [computed tokens], rising positions of the flattened "
                             f"tokens, got {text_of(rows)}")
        check_device(rows, "rows", hidden, "hidden")
    if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int):
        raise TypeError(f"chunk_bytes must be a whole number, got {type(chunk_bytes).__name__}")
    if not 0 <= chunk_bytes < 2**63:
        raise ValueError(f"chunk_bytes = {chunk_bytes}: must be a number of bytes; 0 is the default")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {type(value).__name__}")


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor,
                   temperature: Union[float, Tensor, None] = None, *,
                   rows: Optional[Tensor] = None, chunk_bytes: int = 0, invariant: bool = False,
                   float32_logits: bool = False, float32_weight_gradient: bool = False
                   ) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of the targets, float32, differentiable in hidden and weight.

    `hidden` is [N, H] or [B, T, H], `weight` [V, H], `targets` the token each row predicts. Logits are
    never all in memory: backward computes them again, four products in all. `temperature` divides the
    logits. `rows`, rising positions of the flattened tokens, are all that is computed. The options
    after it are explained in docs/pytorch.md.
    """
    hidden, weight, targets, temperature = _check_head(hidden, weight, targets, temperature)
    _check_options(rows, hidden, chunk_bytes, invariant=invariant, float32_logits=float32_logits,
                   float32_weight_gradient=float32_weight_gradient)
    logprobs, entropy = ops.token_logprobs(
        hidden.reshape(-1, hidden.shape[-1]), weight, targets.reshape(-1), rows, temperature,
        chunk_bytes=chunk_bytes, invariant=invariant, float32_logits=float32_logits,
        float32_weight_gradient=float32_weight_gradient)
    return logprobs.reshape(targets.shape), entropy.reshape(targets.shape)


def policy_head(hidden: Tensor, weight: Tensor, targets: Tensor, *, rollout: Optional[Tensor],
                advantages: Tensor, mask: Optional[Tensor] = None, prox: Union[Tensor, str, None] = None,
                ref: Optional[Tensor] = None, teacher: Optional[Tensor] = None,
                cu_seqlens: Optional[Tensor] = None, weights: Optional[Tensor] = None,
                rollout_ids: Optional[Tensor] = None, versions: Optional[Tensor] = None,
                preset: Union[str, Spec] = "icepop", denominator: Denominator = None,
                temperature: Union[float, Tensor, None] = None, rows: Optional[Tensor] = None,
                chunk_bytes: int = 0, invariant: bool = False, float32_logits: bool = False,
                float32_weight_gradient: bool = False, **keys: Key) -> HeadOutput:
    """Hidden states to loss, gradients and metrics, without logits of the whole batch in memory.

    `hidden` is [N, H] packed or [B, T, H] padded, float32 or bf16; `weight` the output head [V, H];
    `targets` the token that each row predicts. The rest is as for `policy_loss`, of `targets`' shape.

    Losses that decide token by token take three matrix products over the tokens of `rows` (without it
    the trained ones, but for presets of other code bases, whose sources may look past the mask), and
    their gradients are made in the forward pass, so a second backward is refused. With a correction
    written in Python, and for losses above token level, it is one product more.
    """
    spec = as_spec(preset, keys)
    hidden, weight, targets, temperature = _check_head(hidden, weight, targets, temperature)
    _check_options(rows, hidden, chunk_bytes, invariant=invariant, float32_logits=float32_logits,
                   float32_weight_gradient=float32_weight_gradient)
    batch = pack(targets.shape, hidden, "targets", rollout=rollout, advantages=advantages, mask=mask,
                 prox=prox, ref=ref, teacher=teacher, cu_seqlens=cu_seqlens, weights=weights,
                 rollout_ids=rollout_ids, versions=versions)
    _check_reads(spec, batch)
    flat, taken = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    options = dict(chunk_bytes=chunk_bytes, invariant=invariant, float32_logits=float32_logits,
                   float32_weight_gradient=float32_weight_gradient)
    if rows is None and mask is not None and not spec.described.looks_past_mask and \
            not torch.compiler.is_compiling():
        rows = batch.mask.nonzero().reshape(-1)
        if rows.shape[0] == taken.shape[0]:
            rows = None  # all of them: no list to follow
    if spec.described.callers or batch.rollout is None:
        logprobs, entropy = ops.token_logprobs(flat, weight, taken, rows, temperature, **options)
        loss, metrics = _loss_of(logprobs, batch, spec, denominator)
        logprobs, entropy = logprobs.detach(), entropy.detach()
    else:
        number, divisor = _denominator(denominator)
        loss, logprobs, entropy, row = ops.policy_head(
            flat, weight, taken, rows, batch.cu_seqlens, batch.mask, batch.advantages, batch.rollout,
            batch.prox, batch.ref, batch.teacher, batch.weights, batch.versions, temperature,
            spec.json, number, rollout_ids=batch.rollout_ids, prox_is_pi=batch.prox_is_current,
            **options)
        if divisor is not None:
            loss = loss / divisor
        metrics = _metrics(spec, row, batch, {})
    return HeadOutput(loss, metrics, logprobs.reshape(targets.shape), entropy.reshape(targets.shape))


def denominator(mask: Tensor, *, cu_seqlens: Optional[Tensor] = None,
                weights: Optional[Tensor] = None, rollout_ids: Optional[Tensor] = None,
                preset: Union[str, Spec] = "icepop", **keys: Key) -> Tensor:
    """What the loss of a batch is divided by, a float32 scalar on the mask's device.

    Denominators of the parts of a batch add up to the whole one's (if no rollout is split): sum them
    over micro-batches and ranks, and give the sum to `policy_loss` or `policy_head` with each part.
    """
    spec = as_spec(preset, keys)
    said = spec.described
    if said.whole_batch:
        raise ValueError(f"preset {spec.preset}: {said.whole_batch}, so that parts do not add up: give "
                         "the batch as a whole, without denominator")
    mask = check_tensor(mask, "mask")
    like = torch.zeros(mask.shape, device=mask.device)
    batch = pack(mask.shape, like, "mask", rollout=None, advantages=like, mask=mask, prox=None,
                 ref=None, teacher=None, cu_seqlens=cu_seqlens, weights=weights,
                 rollout_ids=rollout_ids, versions=None)
    trained = batch.mask
    if batch.weights is not None:
        trained = trained & (batch.weights != 0)
    if said.reduction == "sum":
        return torch.ones((), device=mask.device)
    if said.reduction == "token_mean":
        return trained.sum().to(torch.float32)
    if said.looks_past_mask or (said.reduction == "fixed_length" and said.fixed_length == 0.0):
        raise ValueError(f"preset {spec.preset}: its denominator depends on more than the mask: give "
                         "the batch as a whole, without denominator")
    sequences = batch.cu_seqlens.shape[0] - 1
    ends = torch.cat([trained.new_zeros(1, dtype=torch.int64), trained.cumsum(0)])
    counts = ends[batch.cu_seqlens[1:]] - ends[batch.cu_seqlens[:-1]]
    if batch.rollout_ids is not None and sequences > 0:
        _, unit = torch.unique(batch.rollout_ids, return_inverse=True)
        counts = torch.zeros_like(counts).index_add(0, unit, counts)
    units = (counts > 0).sum().to(torch.float32)
    return units * said.fixed_length if said.reduction == "fixed_length" else units
