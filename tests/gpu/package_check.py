"""The Python package on a GPU beside the CPU: losses with rollout ids, corrections written in Python
and those that are functions of the host, the proximal policy as the current one, torch.compile,
numbers that are not finite, and mistakes.

  LEEWAY_OPS=build-gpu/libleeway_ops.so PYTHONPATH=python/leeway python3 tests/gpu/package_check.py [PART ..]
"""
import math
import sys

import torch

import leeway

checked = 0
FUNCTIONS_OF_THE_HOST = ("areal/ppo+RS", "areal/cispo+RS_clamp", "liger/vespo", "slime/ppo+mis")


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


def losses_with_a_function_of_the_host():
    for preset in FUNCTIONS_OF_THE_HOST:
        results = []
        for device in ("cpu", "cuda"):
            logprobs, batch = example(device)
            loss, metrics = leeway.policy_loss(logprobs, preset=preset, **batch)
            loss.backward()
            results.append((loss, logprobs.grad, torch.tensor([v for v in metrics.values() if v == v])))
        for what, a, b in zip(("loss", "gradient", "metrics"), *results):
            assert b.device.type == "cuda" or what == "metrics"
            close(b, a, 2e-5, f"{preset}: {what}")


def heads():
    torch.manual_seed(0)
    logprobs, batch = example("cpu")
    n = len(logprobs)
    hidden, weight = torch.randn(n, 64), torch.randn(500, 64) * 0.3
    targets = torch.randint(500, (n,))
    for preset, change in (("icepop", {}), ("ppo", {"prox": "current"}), ("reinforce+clipped", {}),
                           ("gspo", {}), ("gspo", {"prox": "current"}),
                           *((preset, {"reduction": None}) for preset in FUNCTIONS_OF_THE_HOST)):
        results = []
        for device in ("cpu", "cuda"):
            h, w = (x.clone().to(device).requires_grad_() for x in (hidden, weight))
            _, there = example(device)
            there = {"reduction": "seq_mean_token_mean", **there, **change, "preset": preset}
            there = {name: value for name, value in there.items() if value is not None}
            out = leeway.policy_head(h, w, targets.to(device), temperature=0.9, **there)
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


def numbers_that_are_not_finite():
    """They make the loss NaN, also where a bound would hide them: min(NaN, cap) is the cap."""
    global checked
    torch.manual_seed(0)
    weight = torch.randn(500, 64, device="cuda") * 0.3
    for preset in ("icepop", "grpo+tis", "gspo+tis", "ppo+icepop_tis", "reinforce+off_policy_is",
                   "reinforce+clipped", "verl/vanilla+IS"):
        for bad in (math.nan, math.inf, -math.inf):
            logprobs, batch = example("cuda")
            hidden = torch.randn(len(logprobs), 64, device="cuda")
            targets = torch.randint(500, (len(logprobs),), device="cuda")
            place = int(batch["mask"].nonzero()[40])
            batch["rollout"][place] = bad
            for masked in (False, True):
                batch["mask"][place] = not masked
                for what, loss in (
                        ("loss", leeway.policy_loss(logprobs, preset=preset, **batch)[0]),
                        ("head", leeway.policy_head(hidden, weight, targets, preset=preset,
                                                    **batch).loss)):
                    assert math.isfinite(float(loss)) == masked, (preset, bad, masked, what, float(loss))
                    checked += 1


def refused(words, call, kind=ValueError):
    global checked
    checked += 1
    try:
        call()
    except kind as error:
        assert all(word in str(error) for word in words), f"{error} lacks {words}"
        return
    raise AssertionError(f"{words}: was taken")


def mistakes():
    global checked
    logprobs, batch = example("cuda")
    n = len(logprobs)
    hidden = torch.randn(n, 64, device="cuda")
    weight, targets = torch.randn(500, 64, device="cuda"), torch.randint(500, (n,), device="cuda")

    def loss(**change):
        return leeway.policy_loss(change.pop("logprobs", logprobs), **{**batch, **change})

    def head(**change):
        given = {"hidden": hidden, "weight": weight, "targets": targets, **batch, **change}
        return leeway.policy_head(given.pop("hidden"), given.pop("weight"), given.pop("targets"), **given)

    for call in (loss, head):
        of = "logprobs on cuda" if call is loss else "on cuda"
        for name in ("rollout", "prox", "ref", "advantages", "mask", "versions", "rollout_ids"):
            refused([f"{name} is on cpu", of, f"{name}.to("],
                    lambda: call(**{name: batch[name].cpu()}))
        refused(["weights is on cpu", of], lambda: call(weights=torch.ones(n)))
        refused(["rollout must be float32", "rollout.float()"],
                lambda: call(rollout=batch["rollout"].bfloat16()))
        refused(["rollout must be [", "float32 ["], lambda: call(rollout=batch["rollout"][:-1]))
        refused(["mask must be bool", "mask.bool()"], lambda: call(mask=batch["mask"].float()))
        refused(["ref requires a gradient", "ref.detach()"],
                lambda: call(ref=batch["ref"].clone().requires_grad_()))
        refused(["cu_seqlens must rise", str(n)], lambda: call(cu_seqlens=torch.tensor([0, 5, n + 9])))
        refused(["no_such_key"], lambda: call(no_such_key=1.0))
    refused(["logprobs must be float32"], lambda: loss(logprobs=logprobs.half()))
    refused(["weight is on cpu", "hidden on cuda", "weight.to("], lambda: head(weight=weight.cpu()))
    refused(["targets is on cpu", "hidden on cuda"], lambda: head(targets=targets.cpu()))
    refused(["rows is on cpu", "hidden on cuda"], lambda: head(rows=torch.arange(n)))
    refused(["must have one dtype", "convert one"], lambda: head(weight=weight.bfloat16()))
    refused(["hidden must be float32 or bfloat16"], lambda: head(hidden=hidden.half(), weight=weight.half()))
    refused(["targets must be int64"], lambda: head(targets=targets.int()))
    refused(["cu_seqlens is on cuda", "logprobs on cpu"], lambda: loss(logprobs=logprobs.detach().cpu()))
    out = head(hidden=hidden.clone().requires_grad_())
    out.loss.backward(retain_graph=True)
    refused(["second backward"], lambda: out.loss.backward(), RuntimeError)
    # What cannot be seen without waiting for the device gives NaN, and never stops it.
    out = head(targets=torch.full_like(targets, 10**9))
    assert math.isnan(float(out.loss))
    for wrong in ([0, 5, n + 10**6], [0, 10**6, n], [7, n], [0, -10**6, n]):
        wrong = torch.tensor(wrong, device="cuda")
        for call in (loss, head):
            for preset in ("icepop", "gspo", "m2po"):
                assert math.isnan(float(call(cu_seqlens=wrong, rollout_ids=None, preset=preset)[0])), wrong
                checked += 1
    torch.cuda.synchronize()


for part in (losses, losses_with_a_function_of_the_host, heads, numbers_that_are_not_finite, mistakes,
             compiled):
    if len(sys.argv) > 1 and part.__name__ not in sys.argv[1:]:
        continue
    part()
    print(f"{part.__name__}: passed", flush=True)
print(f"{checked} comparisons passed")
