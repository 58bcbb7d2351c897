"""Corrections of one's own: REINFORCE with a clipped current/rollout weight is CISPO."""
import math

import pytest
import torch

import golden
import leeway
from leeway._correction import Tokens, show_what_is_not_finite


@leeway.correction("mine", keys={"mine_high": 5.0}, ranges={"mine_high": (0.0, None)},
                   formula="min(pi/rollout, mine_high)")
def mine(tokens, mine_high):
    """a clipped current/rollout weight"""
    ratio = torch.exp(tokens.pi - tokens.rollout)
    return leeway.Effect(ratio.clamp(max=mine_high),
                         metrics={"clipped": (ratio > mine_high)[tokens.mask].float().mean()})


@leeway.correction("rare", keys={"rare_floor": 0.01, "rare_from": ("rollout", "prox")},
                   reads=("rollout",))
def rare(tokens, rare_floor, rare_from):
    stream = tokens.rollout if rare_from == "rollout" else tokens.prox
    return leeway.Effect(mask=stream >= math.log(rare_floor))


def batch():
    pi, streams = golden.streams()
    return pi, dict(advantages=golden.flat("adv_tok"), mask=golden.mask(), cu_seqlens=golden.OFFSETS,
                    **streams)


@pytest.mark.parametrize("high", [1.2, 5.0])
def test_reinforce_with_a_clipped_weight_is_cispo(high):
    pi, rest = batch()
    loss, metrics = leeway.policy_loss(pi, preset="reinforce+mine", mine_high=high, **rest)
    expected, theirs = leeway.policy_loss(pi, preset="cispo", ratio_high=high, **rest)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for a, b in zip(torch.autograd.grad(loss, pi), torch.autograd.grad(expected, pi)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    assert metrics["mismatch_kl"] == theirs["mismatch_kl"]
    ratio = torch.exp(pi - rest["rollout"])[rest["mask"]]
    assert metrics["mine/clipped"] == pytest.approx((ratio > high).float().mean().item())
    built_in, _ = leeway.policy_loss(pi, preset="off_policy_is", ois_ratio_high=high, **rest)
    assert built_in.item() == pytest.approx(loss.item(), rel=1e-6)


def test_a_mask_takes_policy_and_penalty_and_leaves_the_denominator():
    pi, rest = batch()
    loss, metrics = leeway.policy_loss(pi, preset="ipo_kl+rare", rare_floor=0.4, **rest)
    keep = rest["rollout"] >= math.log(0.4)
    gradient, = torch.autograd.grad(loss, pi)
    assert not gradient[~keep].any()
    plain, _ = leeway.policy_loss(pi, preset="ipo_kl", **rest)
    whole, = torch.autograd.grad(plain, pi)
    torch.testing.assert_close(gradient[keep], whole[keep])
    assert metrics["tokens"] == rest["mask"].sum()


def test_the_head_computes_them_between_its_two_stages():
    torch.manual_seed(1)
    hidden, weight = torch.randn(18, 5, requires_grad=True), torch.randn(9, 5, requires_grad=True)
    targets = torch.randint(9, (18,))
    _, rest = batch()
    own = leeway.policy_head(hidden, weight, targets, preset="reinforce+mine", mine_high=1.5, **rest)
    cispo = leeway.policy_head(hidden, weight, targets, preset="cispo", ratio_high=1.5, **rest)
    for a, b in zip(torch.autograd.grad(own.loss, (hidden, weight)),
                    torch.autograd.grad(cispo.loss, (hidden, weight))):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_two_of_them_and_a_built_in_one_stand_together():
    pi, rest = batch()
    both, _ = leeway.policy_loss(pi, preset="reinforce+mine+rare", rare_floor=0.4, **rest)
    keep = rest["rollout"] >= math.log(0.4)
    one, _ = leeway.policy_loss(pi, preset="reinforce+mine", **{**rest, "mask": rest["mask"] & keep},
                                denominator=float(rest["mask"].sum()))
    assert both.item() == pytest.approx(one.item(), rel=1e-6)
    mixed, _ = leeway.policy_loss(pi, preset="ppo+tis+rare", rare_floor=0.4, **rest)
    assert mixed.item() == mixed.item()


def test_explain_and_strict_keys_know_it():
    text = leeway.explain("icepop+mine", mine_high=2.0)
    assert "mine = min(pi/rollout, mine_high), detached" in text and "mine_high = 2" in text
    assert {"mine", "rare"} <= {p.name for p in leeway.presets() if p.kind == "correction"}
    for keys, words in [({"mine_hig": 1.0}, "did you mean mine_high"), ({"mine_high": -1.0}, "at least 0"),
                        ({"rare_floor": 0.1}, r"belongs to \+rare"), ({"mine_high": "off"}, "a number")]:
        with pytest.raises(ValueError, match=words):
            leeway.Spec("icepop+mine", **keys)
    with pytest.raises(ValueError, match="one of rollout, prox"):
        leeway.Spec("icepop+rare", rare_from="ref")
    with pytest.raises(ValueError, match="icepop: a preset has this name"):
        leeway.correction("icepop")(lambda tokens: None)
    with pytest.raises(ValueError, match="belongs to tis"):
        leeway.correction("other", keys={"tis_cap": 1.0})(lambda tokens: None)
    assert "other" not in {p.name for p in leeway.presets()}


def test_what_it_returns_is_checked():
    pi, rest = batch()
    for out, kind, words in [(3, TypeError, "must return weights or a leeway.Effect"),
                             (torch.ones(3), ValueError, "its weights must be"),
                             (leeway.Effect(mask=[1]), TypeError, "its mask must be a tensor")]:
        leeway.correction("wrong")(lambda tokens: out)
        with pytest.raises(kind, match=f"correction wrong: .*{words}"):
            leeway.policy_loss(pi, preset="icepop+wrong", **rest)


def test_weights_must_be_finite():
    pi, rest = batch()
    leeway.correction("wrong")(lambda tokens: torch.full((18,), math.inf))
    if pi.device.type == "cpu":
        with pytest.raises(ValueError, match="correction wrong: .*must be finite"):
            leeway.policy_loss(pi, preset="icepop+wrong", **rest)
    else:  # a look at the values would wait for the device
        assert torch.isnan(leeway.policy_loss(pi, preset="icepop+wrong", **rest)[0])


def test_tokens_that_are_not_finite_get_weights_that_are_nan():
    rollout = torch.tensor([-1.0, math.nan, math.inf, -1.0, math.nan])
    tokens = Tokens(pi=torch.zeros(5), prox=None, rollout=rollout, ref=None, teacher=None,
                    advantages=torch.ones(5), mask=torch.tensor([True, True, True, True, False]),
                    versions=None, cu_seqlens=torch.tensor([0, 5]), rollout_ids=None)
    given = torch.tensor([2.0, 2.0, 2.0, math.inf, 2.0])
    weights, mask = show_what_is_not_finite(given, torch.zeros(5, dtype=torch.bool), tokens, ["rollout"])
    bad = torch.tensor([False, True, True, True, False])
    assert torch.isnan(weights).tolist() == bad.tolist() and weights[~bad].tolist() == [2.0, 2.0]
    assert mask.tolist() == bad.tolist()  # what is not finite is not dropped
    weights, mask = show_what_is_not_finite(None, None, tokens, ["rollout"])
    assert torch.isnan(weights).tolist() == [False, True, True, False, False] and mask is None


def test_compare_shows_it_beside_built_in_ones():
    sequences = [{"pi": row, "rollout": other, "advantages": a, "mask": m} for row, other, a, m in
                 zip(golden.FIXTURE["pi"], golden.FIXTURE["rollout"], golden.FIXTURE["adv_seq"],
                     golden.FIXTURE["masks"])]
    leeway.correction("beside")(lambda tokens: torch.full_like(tokens.pi, 7.0))
    out = leeway.compare({"sequences": sequences},
                         ["off_policy_is", leeway.Spec("reinforce+mine", mine_high=2.0), "icepop"])
    rows = out["presets"]
    assert [row["preset"] for row in rows] == ["off_policy_is", "reinforce+mine", "icepop"]
    assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-6)
    assert rows[1]["grad_norm"] == pytest.approx(rows[0]["grad_norm"], rel=1e-6)
    # Whichever was registered first, each has its own weights.
    rows = leeway.compare({"sequences": sequences}, ["reinforce", "reinforce+beside", "reinforce+mine",
                                                     "reinforce+mine+beside"])["presets"]
    for seven_fold, single in ((rows[1], rows[0]), (rows[3], rows[2])):
        assert seven_fold["loss"] == pytest.approx(7.0 * single["loss"], rel=1e-6)
