"""policy_head and token_logprobs against plain PyTorch in float64, and torch.compile."""
import json

import pytest
import torch
from torch.library import opcheck

import leeway

N, H, V = 31, 7, 23
OFFSETS = torch.tensor([0, 9, 10, 27, 31])


class Example:
    def __init__(self, seed=1, dtype=torch.float32):
        torch.manual_seed(seed)
        self.hidden = torch.randn(N, H).to(dtype).requires_grad_()
        self.weight = (torch.randn(V, H) * 0.5).to(dtype).requires_grad_()
        self.targets = torch.randint(V, (N,))
        self.mask = torch.rand(N) < 0.75
        pi = self.reference()[1].detach().float()
        stream = lambda scale: pi + scale * torch.randn(N)
        self.batch = dict(rollout=stream(0.5), prox=stream(0.2), ref=stream(0.3), teacher=stream(0.3),
                          advantages=torch.randn(N), mask=self.mask, cu_seqlens=OFFSETS)

    def reference(self, temperature=1.0):
        h, w = (x.detach().double().requires_grad_() for x in (self.hidden, self.weight))
        logits = h @ w.T / temperature
        logprobs = torch.log_softmax(logits, 1)
        return (h, w), logprobs.gather(1, self.targets.unsqueeze(1)).squeeze(1)


def close(got, expected, tolerance):
    got, expected = got.double(), expected.double()
    assert (got - expected).abs().max() <= tolerance * (expected.abs().max() + 1e-30)


# bf16 gradients are rounded to bf16 at the end: half a unit of its last place, 2^-9.
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("preset", ["icepop", "gspo", "grpo+tis", "m2po", "dro"])
def test_the_head_is_the_loss_of_its_log_probabilities(preset, dtype, tolerance):
    e = Example(dtype=dtype)
    out = leeway.policy_head(e.hidden, e.weight, e.targets, preset=preset, temperature=0.8, **e.batch)
    out.loss.backward()
    (h, w), logprobs = e.reference(0.8)
    single = logprobs.detach().float().requires_grad_()
    loss, metrics = leeway.policy_loss(single, preset=preset, **e.batch)
    loss.backward()
    logprobs.backward(single.grad.double())
    assert out.loss.item() == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
    close(e.hidden.grad, h.grad, tolerance)
    close(e.weight.grad, w.grad, tolerance)
    assert not e.hidden.grad[~e.mask].any() and not out.logprobs[~e.mask].any()
    assert out.metrics["tokens"] == metrics["tokens"]


def test_padded_is_packed():
    e = Example()
    lengths = OFFSETS.diff().tolist()
    width = max(lengths)

    def padded(x, fill=0):
        out = torch.full((len(lengths), width, *x.shape[1:]), fill, dtype=x.dtype)
        for k, row in enumerate(torch.split(x, lengths)):
            out[k, :len(row)] = row
        return out

    packed = leeway.policy_head(e.hidden, e.weight, e.targets, **e.batch)
    weight_gradient, = torch.autograd.grad(packed.loss, e.weight)
    batch = {k: padded(v) for k, v in e.batch.items() if k != "cu_seqlens"}
    wide = leeway.policy_head(padded(e.hidden.detach(), torch.nan), e.weight, padded(e.targets), **batch)
    again, = torch.autograd.grad(wide.loss, e.weight)
    assert packed.loss.item() == pytest.approx(wide.loss.item(), rel=1e-6)
    torch.testing.assert_close(again, weight_gradient, rtol=1e-5, atol=1e-8)
    assert wide.logprobs.shape == (4, width)


def test_a_proximal_pass_of_the_same_weights_has_a_ratio_of_one():
    e = Example()
    with torch.no_grad():
        prox, _ = leeway.token_logprobs(e.hidden, e.weight, e.targets)
    e.batch["prox"] = prox
    recorded = leeway.policy_head(e.hidden, e.weight, e.targets, preset="ppo", **e.batch)
    e.batch["prox"] = "current"
    current = leeway.policy_head(e.hidden, e.weight, e.targets, preset="ppo", **e.batch)
    assert recorded.loss.item() == current.loss.item()
    for a, b in zip(torch.autograd.grad(recorded.loss, (e.hidden, e.weight)),
                    torch.autograd.grad(current.loss, (e.hidden, e.weight))):
        assert torch.equal(a, b)


def test_token_logprobs_has_gradients_of_both_outputs():
    e = Example()
    temperature = torch.rand(N) + 0.5
    logprobs, entropy = leeway.token_logprobs(e.hidden, e.weight, e.targets, temperature)
    (h, w), expected = e.reference(temperature.double().unsqueeze(1))
    a, b = torch.randn(N), torch.randn(N)
    (logprobs * a + entropy * b).sum().backward()
    log_p = torch.log_softmax(h @ w.T / temperature.double().unsqueeze(1), 1)
    (expected * a + -(log_p.exp() * log_p).sum(1) * b).sum().backward()
    close(logprobs, expected, 1e-5)
    close(e.hidden.grad, h.grad, 2e-5)
    close(e.weight.grad, w.grad, 2e-5)


def test_a_second_backward_is_refused_and_no_grad_has_none():
    e = Example()
    out = leeway.policy_head(e.hidden, e.weight, e.targets, **e.batch)
    out.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward.*run the forward pass again"):
        out.loss.backward()
    with torch.no_grad():
        assert not leeway.policy_head(e.hidden, e.weight, e.targets, **e.batch).loss.requires_grad


@pytest.mark.parametrize("preset", ["icepop", "gspo"])
def test_operators_pass_torchs_own_check(preset):
    ops = torch.ops.leeway
    e = Example()
    b, spec = e.batch, json.dumps({"preset": preset})
    logprobs = e.reference()[1].detach().float().requires_grad_()
    versions = torch.arange(N)
    streams = (OFFSETS, b["mask"], b["advantages"], b["rollout"], b["prox"], b["ref"], b["teacher"], None,
               versions)
    opcheck(ops.policy_loss.default, (logprobs, *streams, spec, -1.0),
            {"rollout_ids": torch.tensor([0, 0, 1, 2])})
    opcheck(ops.token_logprobs.default, (e.hidden, e.weight, e.targets, None, None))
    opcheck(ops.policy_head.default, (e.hidden, e.weight, e.targets, None, *streams, None, spec, -1.0))
    opcheck(ops.head_backward.default, (e.hidden.detach(), e.weight.detach(), e.targets,
                                        b["advantages"], None, None))
    row = ops.policy_loss(logprobs.detach(), *streams, spec, -1.0)[2]
    opcheck(ops.finalize_metrics.default, ([row], spec))


def test_compiled_without_a_graph_break():
    leeway.correction("halved")(lambda tokens: leeway.Effect(torch.full_like(tokens.pi, 0.5), None,
                                                             {"n": tokens.mask.sum()}))
    e = Example()

    def step(hidden, weight, preset):
        logprobs, _ = leeway.token_logprobs(hidden, weight, e.targets)
        loss, metrics = leeway.policy_loss(logprobs, preset=preset, **e.batch)
        out = leeway.policy_head(hidden, weight, e.targets, preset=preset, **e.batch)
        return loss + out.loss, metrics["is_masked"], out.metrics["tokens"]

    for preset in ("icepop", "icepop+halved", leeway.Spec("ppo", eps_high=0.3)):
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        expected, got = (f(e.hidden, e.weight, preset) for f in (step, compiled))
        assert [float(x) for x in expected] == [float(x) for x in got]
        for a, b in zip(*(torch.autograd.grad(out[0], (e.hidden, e.weight))
                          for out in (expected, got))):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
