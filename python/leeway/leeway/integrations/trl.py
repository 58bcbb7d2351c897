"""TRL: GRPOTrainer with a loss of Leeway's, computed by the head itself.

  from leeway.integrations.trl import LeewayGRPOTrainer
  trainer = LeewayGRPOTrainer(model=.., args=GRPOConfig(..), reward_funcs=.., train_dataset=..,
                              spec="icepop")

The preset decides a token's loss, TRL's `loss_type` what the sum is divided by:

  grpo, sapo            mean over sequences of each one's token mean, / accumulation steps
  bnpo                  trained tokens of the micro-batch, / accumulation steps
  dr_grpo               sequences * max_completion_length, / accumulation steps
  dapo, cispo, vespo    trained tokens of the accumulation window over all processes
  luspo                 mean over sequences of each one's sum, / accumulation steps

Streams: prox is `old_per_token_logps`, where TRL leaves it out (no optimizer step lies between) the
current policy; rollout is `sampling_per_token_logps` (vLLM, or a rollout_func that returns logprobs),
without them prox; ref is there with `beta` != 0. Hidden states become loss and gradients in one pass
where the output head is, so that logits are never stored; FSDP and DeepSpeed have its weight whole there.
"""
from __future__ import annotations

from typing import Any, Callable, Union

import torch
from torch import Tensor
from trl import GRPOTrainer

from .._loss import policy_head, policy_loss, token_logprobs
from .._spec import Spec, as_spec
from ._host import host_spec
from ._output_head import head_as, output_head

_REDUCTIONS = {"grpo": "seq_mean_token_mean", "sapo": "seq_mean_token_mean", "bnpo": "token_mean",
               "dr_grpo": "sum", "dapo": "sum", "cispo": "sum", "vespo": "sum",
               "luspo": "seq_mean_token_sum"}


class LeewayGRPOTrainer(GRPOTrainer):
    """GRPOTrainer whose loss is a preset of Leeway's: `spec` is a leeway.Spec or a preset's name."""

    def __init__(self, *args: Any, spec: Union[str, Spec] = "icepop", **kwargs: Any) -> None:
        spec = as_spec(spec, {})
        decides = "TRL's loss_type decides what the sum is divided by"
        lacks = {"teacher": "which TRL does not have"}
        host_spec("spec", spec.preset, spec.keys, "sum", decides, lacks, "in TRL's micro-batches")
        super().__init__(*args, **kwargs)
        if self.loss_type not in _REDUCTIONS:
            raise ValueError(f"loss_type = {self.loss_type}: unknown here; use one of "
                             f"{', '.join(_REDUCTIONS)}")
        if "ref" in spec.reads and self.beta == 0.0:
            raise ValueError(f"spec: preset {spec.preset} reads reference log-probabilities, which TRL "
                             "computes with beta != 0 (its value is then not used)")
        if self.beta != 0.0 and "ref" not in spec.reads:
            raise ValueError(f"beta = {self.beta} has no effect with preset {spec.preset}: use "
                             'leeway.Spec("grpo", ref_kl=..) or leave beta 0')
        for name, inert in (("top_entropy_quantile", 1.0), ("off_policy_mask_threshold", None)):
            if getattr(self, name, inert) != inert:
                raise ValueError(f"{name} = {getattr(self, name)} has no effect with a preset: leave it "
                                 "out, or write it as a correction (leeway.correction)")
        if getattr(self, "_entropy_bonus_enabled", False):
            raise ValueError("entropy_coef has no effect: presets have no entropy bonus")
        if getattr(self, "aux_loss_enabled", False):
            raise ValueError("router_aux_loss_coef has no effect with a preset: leave it 0")
        self.spec = spec.with_keys(reduction=_REDUCTIONS[self.loss_type])
        output_head(self.accelerator.unwrap_model(self.model))

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep,
                                           batch_size=None, compute_entropy=False,
                                           compute_aux_loss=False, **multimodal):
        """Log-probabilities of the completion without its logits in memory: by the same head as the
        loss, so that the ratio of an unchanged policy is exactly 1."""
        self._refuse_images(multimodal)
        head = output_head(self.accelerator.unwrap_model(model))
        logprobs, entropies = [], []
        for start in range(0, input_ids.size(0), batch_size or input_ids.size(0)):
            part = slice(start, start + (batch_size or input_ids.size(0)))
            targets = input_ids[part, -logits_to_keep:]
            out: list[Tensor] = []

            def compute(hidden: Tensor, weight: Tensor) -> Tensor:
                out.extend(token_logprobs(hidden[:, :-1], weight, targets, self.temperature))
                return out[0].unsqueeze(-1)

            self._run(model, head, compute, input_ids[part], attention_mask[part], logits_to_keep)
            logprobs.append(out[0])
            entropies.append(out[1])
        entropy = torch.cat(entropies) if compute_entropy else None
        return torch.cat(logprobs), entropy, None

    def _refuse_images(self, inputs: dict[str, Any]) -> None:
        for name, value in inputs.items():
            if value is not None and name in ("pixel_values", "image_grid_thw", "image_sizes"):
                raise ValueError(f"{name}: LeewayGRPOTrainer is for text")

    def _run(self, model: torch.nn.Module, head: torch.nn.Module,
             compute: Callable[[Tensor, Tensor], Tensor], input_ids: Tensor, attention_mask: Tensor,
             logits_to_keep: int) -> None:
        with self.accelerator.autocast(), head_as(head, compute):
            model(input_ids=input_ids, attention_mask=attention_mask,
                  logits_to_keep=logits_to_keep + 1, use_cache=False)

    def _normalizer(self, inputs: dict[str, Any], mask: Tensor, training: bool) -> Union[float, Tensor]:
        """What TRL divides the sum of this micro-batch by."""
        accumulation = self.current_gradient_accumulation_steps if training else 1.0
        sequences = mask.size(0)
        if self.loss_type in ("grpo", "sapo", "luspo"):
            return float(sequences) * accumulation
        if self.loss_type == "bnpo":
            return mask.sum().clamp(min=1.0) * accumulation
        if self.loss_type == "dr_grpo":
            return float(sequences) * self.max_completion_length * accumulation
        window = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
        return window * accumulation / self.args.steps_per_generation if training else window

    def _compute_loss(self, model, inputs):
        self._refuse_images(inputs)
        completion, mask = inputs["completion_ids"], inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        keep = completion.size(1)
        training = self.model.training
        prox = inputs.get("old_per_token_logps")
        rollout = inputs.get("sampling_per_token_logps")
        if rollout is None:
            rollout = prox
        streams = dict(advantages=inputs["advantages"], mask=mask,
                       ref=inputs.get("ref_per_token_logps"), preset=self.spec, denominator=1.0)
        out: dict[str, Any] = {}

        def compute(hidden: Tensor, weight: Tensor) -> Tensor:
            hidden = hidden[:, :-1]
            if rollout is not None or "rollout" not in self.spec.reads:
                out["loss"], out["metrics"], _, out["entropy"] = policy_head(
                    hidden, weight, completion, temperature=self.temperature, rollout=rollout,
                    prox="current" if prox is None else prox, **streams)
            else:
                # Neither was recorded: no optimizer step lies between rollouts and this policy.
                logprobs, entropy = token_logprobs(hidden, weight, completion, self.temperature)
                out["loss"], out["metrics"] = policy_loss(
                    logprobs, rollout=logprobs.detach(), prox="current", **streams)
                out["entropy"] = entropy.detach()
            return out["loss"].reshape(1, 1, 1)

        head = output_head(self.accelerator.unwrap_model(model))
        self._run(model, head, compute, torch.cat([inputs["prompt_ids"], completion], dim=1),
                  torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1), keep)
        self._log_loss(out["metrics"], out["entropy"], mask, "train" if training else "eval")
        return out["loss"] / self._normalizer(inputs, mask, training)

    def _log_loss(self, metrics: Any, entropy: Tensor, mask: Tensor, mode: str) -> None:
        count = torch.stack([(entropy * mask).sum(), mask.sum().to(entropy.dtype)])
        total, tokens = self.accelerator.reduce(count, reduction="sum").tolist()
        self._metrics[mode]["entropy"].append(total / max(tokens, 1.0))
        for name, value in metrics.items():
            if value == value:  # NaN: there was no such token
                self._metrics[mode][f"leeway/{name}"].append(value)
