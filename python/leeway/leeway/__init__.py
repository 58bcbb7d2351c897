"""Policy losses and off-policy corrections for reinforcement learning of language models.

  loss, metrics = leeway.policy_loss(logprobs, rollout=.., advantages=.., mask=.., preset="icepop")
  loss, metrics, logprobs, entropy = leeway.policy_head(hidden, weight, targets, rollout=.., ..)

`leeway.presets()` lists the losses, `leeway.explain("grpo+tis")` says what one computes,
`leeway.compare(batch)` what each would do to a batch. `leeway.integrations` has TRL, verl, prime-rl and
slime; importing this package imports none of them.
"""
from ._compare import compare
from ._correction import Effect, Tokens, correction
from ._loss import HeadOutput, denominator, policy_head, policy_loss, token_logprobs
from ._metrics import Metrics, join_metrics
from ._spec import Preset, Spec, explain, presets

__version__ = "0.1.0"
__all__ = ["Effect", "HeadOutput", "Metrics", "Preset", "Spec", "Tokens", "compare", "correction",
           "denominator", "explain", "join_metrics", "policy_head", "policy_loss", "presets",
           "token_logprobs"]
