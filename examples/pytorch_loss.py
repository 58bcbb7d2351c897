"""A training loop of one's own in PyTorch with Leeway's policy head: hidden states in, loss out.

  python3 examples/pytorch_loss.py                          with the package installed
  python3 examples/pytorch_loss.py build/libleeway_ops.so   without

The policy writes eight tokens after a first one and is rewarded for even ones. Each batch serves
four optimizer steps, so that the loss needs a correction: here IcePop.
"""
import os
import sys
from pathlib import Path

import torch

if len(sys.argv) > 1:
    os.environ["LEEWAY_OPS"] = sys.argv[1]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python/leeway"))
import leeway

VOCABULARY, WIDTH, LENGTH, GROUPS, GROUP_SIZE = 32, 64, 8, 16, 8
SPEC = leeway.Spec("icepop", icepop_ratio_low=0.5, icepop_ratio_high=2.0)


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.mix = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def hidden(self, tokens):  # what the head reads: one row per token
        return torch.tanh(self.mix(self.embedding(tokens)))


def sample(policy, prompts):
    """Tokens [R, LENGTH + 1] and their log-probabilities [R, LENGTH] as sampled."""
    tokens, logprobs = [prompts], []
    for _ in range(LENGTH):
        distribution = torch.distributions.Categorical(
            logits=policy.head(policy.hidden(tokens[-1])))
        tokens.append(distribution.sample())
        logprobs.append(distribution.log_prob(tokens[-1]))
    return torch.stack(tokens, 1), torch.stack(logprobs, 1)


torch.manual_seed(1)
policy = Policy()
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
for step in range(1, 31):
    with torch.no_grad():
        prompts = torch.randint(VOCABULARY, (GROUPS,)).repeat_interleave(GROUP_SIZE)
        tokens, rollout = sample(policy, prompts)
    reward = (tokens[:, 1:] % 2 == 0).float().mean(1)
    groups = reward.view(GROUPS, GROUP_SIZE)
    advantage = (groups - groups.mean(1, keepdim=True)).flatten()

    # Sequences lie side by side; cu_seqlens says where each begins. There is no padding.
    inputs, targets = tokens[:, :-1].flatten(), tokens[:, 1:].flatten()
    cu_seqlens = torch.arange(0, targets.numel() + 1, LENGTH)
    for _ in range(4):
        loss, metrics, logprobs, entropy = leeway.policy_head(
            policy.hidden(inputs), policy.head.weight, targets, rollout=rollout.flatten(),
            advantages=advantage, cu_seqlens=cu_seqlens, preset=SPEC)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    if step % 10 == 0 or step == 1:
        print(f"step {step:2}  reward {reward.mean():.3f}  masked {metrics['is_masked']:.2%}  "
              f"mismatch_kl {metrics['mismatch_kl']:.4f}  ESS {metrics['effective_sample_size']:.3f}")
