"""The Python package on a GPU beside the CPU: losses with rollout ids, corrections written in Python,
the proximal policy as the current one, torch.compile, and tensors of two devices.

  LEEWAY_OPS=build-gpu/libleeway_ops.so PYTHONPATH=python/leeway python3 tests/gpu/package_check.py
"""
import math

import torch

import leeway

checked = 0


def close(got, expected, tolerance, what):
    global checked
    checked += 1
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    worst = (got - expected).abs().max().item() if got.numel() else 0.0
    scale = expected.abs().max().item() + 1e-12 if expected.numel() else 1.0
    assert worst <= tolerance * scale, f"{what}: {worst} of {scale}"


@leeway.correction("clipped", keys={"clipped_high": 1.3})
def clipped(tokens, clipped_high):
    ratio = torch.exp(tokens.pi - tokens.rollout)
    return leeway.Effect(ratio.clamp(max=clipped_high), tokens.rollout > math.log(0.05),
                         {"mean": tokens.sequence_mean(ratio)[tokens.mask].mean()})


def example(device):
    generator = torch.Generator().manual_seed(3)
    lengths = [30, 1, 77, 40, 129, 2, 64]
    n = sum(lengths)
    rand = lambda: torch.randn(n, generator=generator)
    prox = -1.5 + 0.4 * rand()
    batch = dict(rollout=prox + 0.3 * rand(), prox=prox, ref=prox + 0.2 * rand(), advantages=rand(),
                 mask=torch.rand(n, generator=generator) < 0.8,
                 cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
                 rollout_ids=torch.tensor([4, 4, 1, 0, 1, 7, 4]), versions=torch.arange(n) // 50)
    logprobs = prox + 0.2 * rand()
    return logprobs.to(device).requires_grad_(), {k: v.to(device) for k, v in batch.items()}


def losses():
    for preset in ("icepop", "ppo", "gspo", "m2po", "grpo+tis", "reinforce+clipped", "ipo_kl+clipped",
                   "gspo+clipped", "ppo+tis+clipped"):
        for reduction in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum"):
            results = []
            for device in ("cpu", "cuda"):
                logprobs, batch = example(device)
                loss, metrics = leeway.policy_loss(logprobs, preset=preset, reduction=reduction, **batch)
                loss.backward()
                results.append((loss, logprobs.grad, metrics))
            (a, da, ma), (b, db, mb) = results
            close(b, a, 2e-5, f"{preset} {reduction}: loss")
            close(db, da, 2e-5, f"{preset} {reduction}: gradient")
            assert ma.keys() == mb.keys()
            for name in ma:
                same = math.isclose(ma[name], mb[name], rel_tol=2e-4, abs_tol=2e-5)
                assert same or (math.isnan(ma[name]) and math.isnan(mb[name])), (preset, name)


def heads():
    torch.manual_seed(0)
    logprobs, batch = example("cpu")
    n = len(logprobs)
    hidden, weight = torch.randn(n, 64), torch.randn(500, 64) * 0.3
    targets = torch.randint(500, (n,))
    for preset, change in (("icepop", {}), ("ppo", {"prox": "current"}), ("reinforce+clipped", {}),
                           ("gspo", {}), ("gspo", {"prox": "current"})):
        results = []
        for device in ("cpu", "cuda"):
            h, w = (x.clone().to(device).requires_grad_() for x in (hidden, weight))
            _, there = example(device)
            there.update(change, preset=preset, reduction="seq_mean_token_mean", temperature=0.9)
            out = leeway.policy_head(h, w, targets.to(device), **there)
            out.loss.backward()
            results.append((out.loss, out.logprobs, h.grad, w.grad))
        for what, a, b in zip(("loss", "logprobs", "d_hidden", "d_weight"), *results):
            close(b, a, 2e-4, f"head {preset} {change}: {what}")


def compiled():
    logprobs, batch = example("cuda")
    torch.manual_seed(0)
    hidden = torch.randn(len(logprobs), 64, device="cuda", requires_grad=True)
    weight = (torch.randn(500, 64, device="cuda") * 0.3).requires_grad_()
    targets = torch.randint(500, (len(logprobs),), device="cuda")

    def step(hidden, weight, preset):
        logprobs, _ = leeway.token_logprobs(hidden, weight, targets)
        loss, metrics = leeway.policy_loss(logprobs, preset=preset, **batch)
        out = leeway.policy_head(hidden, weight, targets, preset=preset, **batch)
        return loss + out.loss, metrics["is_masked"]

    for preset in ("icepop", "icepop+clipped"):
        torch._dynamo.reset()
        for a, b in zip(*(torch.autograd.grad(f(hidden, weight, preset)[0], (hidden, weight)) for f in
                          (step, torch.compile(step, fullgraph=True)))):
            close(b, a, 2e-5, f"compiled {preset}")


def mistakes():
    logprobs, batch = example("cuda")
    batch["rollout"] = batch["rollout"].cpu()
    try:
        leeway.policy_loss(logprobs, **batch)
    except ValueError as error:
        assert "rollout is on cpu, logprobs on cuda" in str(error), error
        return
    raise AssertionError("tensors of two devices were taken")


for part in (losses, heads, compiled, mistakes):
    part()
    print(f"{part.__name__}: passed", flush=True)
print(f"{checked} comparisons passed")
