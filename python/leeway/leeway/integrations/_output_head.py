"""The output head of a Hugging Face model, and what it computes in place of logits."""
from __future__ import annotations

import contextlib
from typing import Callable, Iterator

import torch
from torch import Tensor


def output_head(model: torch.nn.Module) -> torch.nn.Module:
    if hasattr(model, "get_base_model"):  # PEFT
        model = model.get_base_model()
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear:
        raise ValueError(f"the model's output head is a {type(head).__name__}: the policy head reads "
                         "the weight of a plain Linear (leave lm_head out of LoRA's target_modules)")
    if head.bias is not None:
        raise ValueError("the model's output head has a bias, which the policy head does not add")
    config = getattr(model.config, "text_config", None) or model.config
    for key in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, key, None) not in (None, 1.0, 1):
            raise ValueError(f"the model's {key} = {getattr(config, key)} changes logits after the head: "
                             "not supported")
    return head


@contextlib.contextmanager
def head_as(head: torch.nn.Module, compute: Callable[[Tensor, Tensor], Tensor]) -> Iterator[None]:
    """While this lasts the head returns compute(hidden, weight) instead of logits."""

    def forward(hidden: Tensor) -> Tensor:
        dtype = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        elif head.weight.dtype != dtype:
            dtype = head.weight.dtype
        return compute(hidden.to(dtype), head.weight.to(dtype))

    before = head.__dict__.get("forward")  # another patch of this instance
    head.forward = forward
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before
