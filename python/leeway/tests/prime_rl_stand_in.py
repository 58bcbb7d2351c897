"""The types of prime-rl's published loss interface, as its trainer hands them over."""
from dataclasses import dataclass

import torch


@dataclass
class LossInputs:
    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: "torch.Tensor | None"
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: "torch.Tensor | None" = None


@dataclass
class LossOutputs:
    loss: torch.Tensor
    metrics: dict
