"""Batches as the operators read them: packed, float32, checked. Mistakes name the argument, what it
is and the remedy: TypeError for what is no plain tensor, ValueError for the rest."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

_WIDE = (torch.float32, torch.float64)
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64)
_MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def text_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def check_tensor(value: Any, name: str) -> Tensor:
    """A plain dense tensor, or TypeError."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if type(value).__name__ == "DTensor" or hasattr(value, "full_tensor"):
        raise TypeError(
            f"{name} is a DTensor, a part of a tensor on several ranks: give {name}.full_tensor(), or "
            "call this in the forward of the module that owns it, where FSDP has it whole")
    if value.is_nested:
        raise TypeError(f"{name} is a nested tensor: give a plain one, packed with cu_seqlens or padded "
                        "with mask")
    if value.layout != torch.strided:
        raise TypeError(f"{name} is sparse: give {name}.to_dense()")
    if value.is_quantized:
        raise TypeError(f"{name} is quantised: give {name}.dequantize()")
    return value


def check_device(value: Tensor, name: str, like: Tensor, like_name: str) -> None:
    if value.device != like.device:
        raise ValueError(f"{name} is on {value.device}, {like_name} on {like.device}: give "
                         f"{name}.to({like_name}.device)")


def _without_gradient(value: Tensor, name: str) -> None:
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, but the loss has none for it: give "
                         f"{name}.detach()")


@dataclass
class Batch:
    """All of a batch but the current log-probabilities, packed; N tokens in S sequences."""
    shape: torch.Size            # of the log-probabilities as given: [N] or [B, T]
    cu_seqlens: Tensor           # int64 [S + 1]
    mask: Tensor                 # bool [N]
    advantages: Tensor           # float32 [N]
    rollout: Optional[Tensor]    # float32 [N], as the streams
    prox: Optional[Tensor]
    ref: Optional[Tensor]
    teacher: Optional[Tensor]
    weights: Optional[Tensor]
    versions: Optional[Tensor]   # int64 [N]
    rollout_ids: Optional[Tensor]  # int64 [S]
    prox_is_current: bool = False  # the current log-probabilities stand for prox

    def missing(self) -> list[str]:
        return [name for name in ("rollout", "prox", "ref", "teacher")
                if getattr(self, name) is None and not (name == "prox" and self.prox_is_current)]


def _stream(value: Any, name: str, shape: torch.Size, like: Tensor, like_name: str) -> Tensor:
    value = check_tensor(value, name)
    if value.dtype not in _WIDE:
        remedy = ("log-probabilities of 16 bits round ratios by several percent; compute them in "
                  f"float32, or give {name}.float()" if value.dtype in _FLOATS
                  else f"give {name}.float()")
        raise ValueError(f"{name} must be float32, got {text_of(value)}: {remedy}")
    if value.shape != shape:
        raise ValueError(f"{name} must be {list(shape)} as {like_name}, got {text_of(value)}")
    check_device(value, name, like, like_name)
    _without_gradient(value, name)
    return value.detach().to(torch.float32).reshape(-1)


def _advantages(value: Any, shape: torch.Size, sequences: int, lengths: Optional[Tensor],
                like: Tensor, like_name: str) -> Tensor:
    value = check_tensor(value, "advantages")
    if value.dtype not in _FLOATS:
        raise ValueError(f"advantages must be float32, got {text_of(value)}: give "
                         "advantages.float()")
    check_device(value, "advantages", like, like_name)
    _without_gradient(value, "advantages")
    value = value.detach().to(torch.float32)
    if value.shape == shape:
        return value.reshape(-1)
    if tuple(value.shape) in ((sequences,), (sequences, 1)):
        value = value.reshape(-1)
        if lengths is None:  # padded
            return value.unsqueeze(1).expand(shape).reshape(-1)
        tokens = shape[0]
        return torch.repeat_interleave(value, lengths, output_size=tokens)
    raise ValueError(f"advantages must be {list(shape)}, one for each token, or [{sequences}], one "
                     f"for each sequence, got {text_of(value)}")


def usable_offsets(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Offsets on a device that nobody waits for, and whether they rise from 0 to the number of tokens:
    where they do not, those of one sequence, so that nothing is read outside the batch."""
    ordered = (offsets[0] == 0) & (offsets[-1] == tokens) & (offsets[1:] >= offsets[:-1]).all()
    one = torch.arange(offsets.shape[0], device=offsets.device).clamp(max=1) * tokens
    return torch.where(ordered, offsets, one), ordered


def pack(shape: torch.Size, like: Tensor, like_name: str, *, rollout: Any, advantages: Any,
         mask: Any, prox: Any, ref: Any, teacher: Any, cu_seqlens: Any, weights: Any,
         rollout_ids: Any, versions: Any) -> Batch:
    """Checks and packs what comes with log-probabilities of this shape, on `like`'s device."""
    if len(shape) not in (1, 2):
        raise ValueError(f"{like_name}: log-probabilities are [N] packed or [B, T] padded, "
                         f"got {list(shape)}")
    padded = len(shape) == 2
    lengths: Optional[Tensor] = None
    ordered: Optional[Tensor] = None  # False makes the loss NaN
    if padded:
        if cu_seqlens is not None:
            raise ValueError(f"cu_seqlens is for packed log-probabilities [N]; {like_name} is padded, "
                             f"{list(shape)}: give mask alone")
        sequences, width = shape
        if sequences == 0:
            raise ValueError(f"{like_name} has no sequence, {list(shape)}: leave an empty batch out, or "
                             "give one sequence that mask takes out")
        offsets = torch.arange(sequences + 1, device=like.device, dtype=torch.int64) * width
    else:
        if cu_seqlens is None:
            raise ValueError(
                f"cu_seqlens is missing: packed log-probabilities {list(shape)} need the places where "
                "sequences begin, and their end; for one sequence torch.tensor([0, "
                f"{shape[0]}])")
        offsets = check_tensor(cu_seqlens, "cu_seqlens")
        if offsets.dtype not in _INTEGERS or offsets.dim() != 1 or offsets.shape[0] < 2:
            raise ValueError("cu_seqlens must be int32 or int64 [sequences + 1] with at least one "
                             f"sequence, got {text_of(offsets)}")
        if offsets.device.type != "cpu":
            check_device(offsets, "cu_seqlens", like, like_name)
        sequences = offsets.shape[0] - 1
        if not torch.compiler.is_compiling() and offsets.device.type == "cpu" and (
                int(offsets[0]) != 0 or bool((offsets[1:] < offsets[:-1]).any())
                or int(offsets[-1]) != shape[0]):
            raise ValueError(f"cu_seqlens must rise from 0 to the number of tokens, {shape[0]}, got "
                             f"{offsets.tolist() if sequences < 16 else 'other numbers'}")
        on_device = offsets.device.type != "cpu"
        offsets = offsets.to(device=like.device, dtype=torch.int64)
        if on_device:
            offsets, ordered = usable_offsets(offsets, shape[0])
        lengths = offsets[1:] - offsets[:-1]
    if mask is None:
        packed_mask = torch.ones(shape, dtype=torch.bool, device=like.device).reshape(-1)
    else:
        mask = check_tensor(mask, "mask")
        if mask.dtype not in _MASKS:
            raise ValueError(f"mask must be bool, got {text_of(mask)}: give mask.bool(); weights of "
                             "tokens are another argument")
        if mask.shape != shape:
            raise ValueError(f"mask must be {list(shape)} as {like_name}, got {text_of(mask)}")
        check_device(mask, "mask", like, like_name)
        packed_mask = (mask if mask.dtype == torch.bool else mask != 0).reshape(-1)

    prox_is_current = isinstance(prox, str)
    if prox_is_current:
        if prox != "current":
            raise ValueError(f'prox must be a tensor, None or "current", got {prox!r}')
        prox = None

    def stream(value: Any, name: str) -> Optional[Tensor]:
        return None if value is None else _stream(value, name, shape, like, like_name)

    def integers(value: Any, name: str, size: torch.Size, what: str) -> Optional[Tensor]:
        if value is None:
            return None
        value = check_tensor(value, name)
        if value.dtype not in _INTEGERS or value.shape != size:
            raise ValueError(f"{name} must be int64 {list(size)}, one for each {what}, "
                             f"got {text_of(value)}")
        check_device(value, name, like, like_name)
        return value.reshape(-1)

    packed_advantages = _advantages(advantages, shape, sequences, lengths, like, like_name)
    if ordered is not None:
        packed_advantages = torch.where(ordered, packed_advantages, torch.nan)
    return Batch(
        shape=shape, cu_seqlens=offsets, mask=packed_mask, advantages=packed_advantages,
        rollout=stream(rollout, "rollout"), prox=stream(prox, "prox"), ref=stream(ref, "ref"),
        teacher=stream(teacher, "teacher"), weights=stream(weights, "weights"),
        versions=integers(versions, "versions", shape, "token"),
        rollout_ids=integers(rollout_ids, "rollout_ids", torch.Size([sequences]), "sequence"),
        prox_is_current=prox_is_current)
