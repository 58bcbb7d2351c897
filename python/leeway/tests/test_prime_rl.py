"""prime-rl's custom loss and fused head, with stand-ins of its published signatures."""
import sys
import types

import pytest
import torch

import golden
import leeway
from leeway.integrations import prime_rl
from prime_rl_stand_in import LossInputs, LossOutputs


def compute(advantages, ref=None, weights=None, **kwargs):
    """As the host does: sequence by sequence, the sum divided by the trained tokens of the batch."""
    pi, streams = golden.streams()
    parts = lambda x: torch.split(x, golden.LENGTHS)
    total, metrics = pi.sum() * 0.0, {}
    for k, logprobs in enumerate(parts(pi)):
        out = prime_rl.loss(LossInputs(logprobs, parts(streams["rollout"])[k],
                                       None if ref is None else parts(ref)[k], parts(advantages)[k],
                                       parts(golden.mask())[k],
                                       None if weights is None else parts(weights)[k]), **kwargs)
        total = total + out.loss
        for name, value in out.metrics.items():
            assert value.dim() == 0
            metrics.setdefault(name, []).append(value)
    loss = total / golden.FIXTURE["active_tokens"]
    loss.backward()
    return loss, pi.grad, {name: torch.stack(values) for name, values in metrics.items()}


@pytest.mark.parametrize("preset,name", [
    ("icepop", "prime/PR2401_icepop"), ("ipo_kl", "prime/PR2423_ipo_kl_kept"),
    ("dppo_tv", "prime/PR2434_dppo_tv_sym"), ("dppo_kl", "prime/default_dppo_kl")])
@pytest.mark.parametrize("advantages", ["seqA", "tokA"])
def test_seed_presets_have_prime_rls_numbers(preset, name, advantages):
    case = golden.CASES[f"{name}/{advantages}"]
    loss, gradient, metrics = compute(golden.flat({"seqA": "adv_seq", "tokA": "adv_tok"}[advantages]),
                                      preset=preset)
    golden.check(loss, gradient, case)
    # Metrics are lists, one number a sequence; names that both have mean the same.
    shared = [key for key in case["metrics"] if key in metrics]
    assert {"is_masked", "masked_mismatch_kl", "unmasked_mismatch_kl"} <= set(shared)
    for key in shared:
        torch.testing.assert_close(metrics[key].double(), torch.tensor(case["metrics"][key]).double(),
                                   rtol=1e-4, atol=1e-6, msg=lambda text: f"{key}: {text}")


def test_a_teacher_is_prime_rls_reference():
    case = golden.CASES["prime/PR2434_teacher"]
    config = case["config"]
    loss, gradient, _ = compute(golden.flat("adv_tok"), ref=golden.flat("teacher"), preset="dppo_tv",
                                adv_tau=config["adv_tau"], teacher_tau=config["teacher_tau"])
    golden.check(loss, gradient, case)


def test_empty_masks_and_weights():
    sequence = LossInputs(torch.zeros(3, requires_grad=True), torch.zeros(3), None, torch.ones(3),
                          torch.zeros(3, dtype=torch.bool))
    out = prime_rl.loss(sequence)
    out.loss.backward()
    assert out.loss.item() == 0.0 and not sequence.trainer_logprobs.grad.any()
    weights = torch.full((18,), 2.0)
    once, gradient, _ = compute(golden.flat("adv_tok"))
    twice, doubled, _ = compute(golden.flat("adv_tok"), weights=weights)
    torch.testing.assert_close(doubled, 2 * gradient)


@pytest.mark.parametrize("kwargs,words", [
    ({"preset": "m2po"}, "m2po cannot be exact one sequence at a time"),
    ({"preset": "verl/kl_cov"}, "use a native preset"),
    ({"preset": "ppo"}, 'ppo reads prox.*anchor = "rollout"'),
    ({"preset": "icepop", "reduction": "sum"}, "reduction"),
    ({"preset": "grpo", "anchor": "rollout", "ref_kl": 0.1}, "configure a reference model"),
    ({"icepop_ratio_hi": 2.0}, "icepop_ratio_high")])
def test_what_cannot_be_exact_is_refused_by_name(kwargs, words):
    with pytest.raises(ValueError, match=words):
        compute(golden.flat("adv_tok"), **kwargs)


def test_own_corrections_come_by_name():
    @leeway.correction("halved")
    def halved(tokens):
        return torch.full_like(tokens.pi, 0.5)

    _, whole, _ = compute(golden.flat("adv_tok"))
    _, half, _ = compute(golden.flat("adv_tok"), preset="icepop+halved")
    torch.testing.assert_close(half, 0.5 * whole)


class FusedOutputLinear(torch.nn.Linear):
    """The signature of the host's head; its numbers by plain PyTorch."""

    def forward(self, hidden_states, labels=None, temperature=None):
        logits = super().forward(hidden_states).float() / temperature.unsqueeze(-1)
        log_p = torch.log_softmax(logits, -1)
        return {"logprobs": log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1),
                "entropy": -(log_p.exp() * log_p).sum(-1)}


def test_the_patched_head_is_the_hosts(monkeypatch):
    module = types.ModuleType("prime_rl.trainer.models.layers.lm_head")
    module.FusedOutputLinear, module.PrimeLmOutput = FusedOutputLinear, dict
    parent = types.ModuleType("prime_rl.trainer.models.layers")
    parent.lm_head = module
    for name, entry in [("prime_rl", types.ModuleType("prime_rl")),
                        ("prime_rl.trainer", types.ModuleType("prime_rl.trainer")),
                        ("prime_rl.trainer.models", types.ModuleType("prime_rl.trainer.models")),
                        ("prime_rl.trainer.models.layers", parent), (module.__name__, module)]:
        monkeypatch.setitem(sys.modules, name, entry)
    torch.manual_seed(0)
    head = FusedOutputLinear(6, 11, bias=False)
    hidden, labels = torch.randn(1, 9, 6, requires_grad=True), torch.randint(11, (1, 9))
    temperature = torch.rand(1, 9) + 0.5

    def run():
        out = head(hidden, labels, temperature=temperature)
        out["logprobs"].sum().backward()
        grads = hidden.grad.clone(), head.weight.grad.clone()
        hidden.grad = head.weight.grad = None
        return (out["logprobs"], out["entropy"], *grads)

    theirs = run()
    undo = prime_rl.patch_head()
    ours = run()
    undo()
    for a, b in zip(theirs, ours):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert prime_rl.loss_and_head is prime_rl.loss
    assert FusedOutputLinear.forward.__module__ == "leeway.integrations.prime_rl"
