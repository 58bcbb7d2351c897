"""slime's custom TIS function and custom loss, with stand-ins of its published signatures."""
import json
from types import SimpleNamespace

import pytest
import torch

import golden
import leeway
from leeway.integrations import slime

ARGS = SimpleNamespace()


def split(values):
    return list(torch.split(values, golden.LENGTHS))


def sample_mean(values, masks=None):
    """slime's default reducer: the mean over samples of each one's mean over its original mask."""
    original = split(golden.mask())
    masks = original if masks is None else masks
    return sum((x * m).sum() / max(int(o.sum()), 1)
               for x, m, o in zip(torch.split(values, golden.LENGTHS), masks, original)) / 3


def run(monkeypatch, base, config, keys, with_current):
    monkeypatch.setenv("LEEWAY_SPEC", json.dumps(keys))
    pi, streams = golden.streams()
    A = golden.flat("adv_seq")
    if base == "ppo":
        ratio = torch.exp(pi - streams["prox"])
        low, high = 1 - config["eps_clip"], 1 + config["eps_clip_high"]
        pg_loss = torch.maximum(-ratio * A, -ratio.clamp(low, high) * A)
    else:
        pg_loss = -A * pi
    more = {"cur_log_probs": split(pi)} if with_current else {}
    weighted, masks, metrics = slime.tis(
        ARGS, pg_loss=pg_loss, train_log_probs=split(streams["prox"]),
        rollout_log_probs=split(streams["rollout"]), loss_masks=split(golden.mask().float()),
        total_lengths=golden.LENGTHS, response_lengths=golden.LENGTHS, **more)
    loss = sample_mean(weighted, masks)
    loss.backward()
    return loss, pi.grad, metrics


# The two-sided variant of tis has a lower bound, which Leeway's tis does not have.
@pytest.mark.parametrize("name,base,correction,variant", [
    ("slime/ppo+vanilla_tis", "ppo", "tis", "default"),
    *((name, base, correction, variant) for variant in ("default", "two_sided")
      for name, base, correction in [
          ("slime/ppo+icepop", "ppo", "icepop_tis"),
          ("slime/ppo+off_policy_is_PR2084", "ppo", "off_policy_is"),
          ("slime/reinforce+off_policy_is_PR2084", "reinforce", "off_policy_is")])])
def test_corrections_have_slimes_numbers(monkeypatch, name, base, correction, variant):
    case = golden.CASES[f"{name}/{variant}"]
    config = case["config"]
    low, high = config["tis_clip_low"], config["tis_clip"]
    keys = {"tis": {"tis_cap": high}, "icepop_tis": {"tis_ratio_low": low, "tis_ratio_high": high},
            "off_policy_is": {"ois_ratio_low": low, "ois_ratio_high": high}}[correction]
    loss, gradient, metrics = run(monkeypatch, base, config, {"correction": correction, **keys}, True)
    golden.check(loss, gradient, case)
    assert set(metrics) >= {"tis", "tis_abs", "tis_clipfrac"}


def test_without_current_log_probabilities_the_corrections_of_prox_remain(monkeypatch):
    case = golden.CASES["slime/ppo+vanilla_tis/default"]
    keys = {"correction": "tis", "tis_cap": case["config"]["tis_clip"]}
    loss, gradient, _ = run(monkeypatch, "ppo", case["config"], keys, False)
    golden.check(loss, gradient, case)
    with pytest.raises(ValueError, match="off_policy_is.*no cur_log_probs"):
        run(monkeypatch, "reinforce", {}, {"correction": "off_policy_is"}, False)
    with pytest.raises(ValueError, match="names a preset"):
        run(monkeypatch, "reinforce", {}, {"preset": "icepop"}, True)
    with pytest.raises(ValueError, match="there is no correction tiss; did you mean tis"):
        run(monkeypatch, "reinforce", {}, {"correction": "tiss"}, True)


def test_rollouts_without_log_probabilities_are_refused(monkeypatch):
    monkeypatch.setenv("LEEWAY_SPEC", "{}")
    for missing in (None, []):
        with pytest.raises(ValueError, match="slime passes no rollout_log_probs"):
            slime.tis(ARGS, pg_loss=torch.zeros(2), train_log_probs=[torch.zeros(2)],
                      rollout_log_probs=missing, loss_masks=[torch.ones(2)])


def test_a_correction_of_ones_own_is_the_seeds_cispo(monkeypatch):
    @leeway.correction("mine", keys={"mine_high": 2.0})
    def mine(tokens, mine_high):
        return torch.exp(tokens.pi - tokens.rollout).clamp(max=mine_high)

    case = golden.CASES["slime/reinforce+off_policy_is_PR2084/default"]
    keys = {"correction": "mine", "mine_high": case["config"]["tis_clip"]}
    loss, gradient, _ = run(monkeypatch, "reinforce", {}, keys, True)
    golden.check(loss, gradient, case)


def test_a_mask_of_ones_own_goes_back_as_loss_masks(monkeypatch):
    @leeway.correction("few")
    def few(tokens):
        return leeway.Effect(mask=tokens.rollout > -1.0)

    loss, gradient, _ = run(monkeypatch, "reinforce", {}, {"correction": "few"}, True)
    keep = golden.flat("rollout") > -1.0
    assert not gradient[~keep].any() and gradient[keep & golden.mask()].any()


@pytest.mark.parametrize("case,keys", [
    ("slime/ppo/sample_mean", {"preset": "ppo"}), ("slime/gspo/sample_mean", {
        "preset": "gspo", "gradient": "through_mean", "log_cap": 1000.0}),
    ("slime/reinforce+off_policy_is_PR2084/default", {"preset": "off_policy_is"})])
def test_the_custom_loss_has_slimes_numbers(monkeypatch, case, keys):
    case = golden.CASES[case]
    config = case["config"]
    if keys["preset"] in ("ppo", "gspo"):
        keys = {**keys, "eps_low": config["eps_clip"], "eps_high": config["eps_clip_high"]}
    else:
        keys = {**keys, "ois_ratio_low": config["tis_clip_low"], "ois_ratio_high": config["tis_clip"]}
    monkeypatch.setenv("LEEWAY_SPEC", json.dumps(keys))
    pi, streams = golden.streams()
    monkeypatch.setattr(slime, "_current_log_probs", lambda args, batch, logits: split(logits))
    batch = {"advantages": split(golden.flat("adv_seq")), "log_probs": split(streams["prox"]),
             "rollout_log_probs": split(streams["rollout"]), "ref_log_probs": None}
    loss, metrics = slime.loss(ARGS, batch, pi, sample_mean)
    loss.backward()
    golden.check(loss, pi.grad, case)
    assert metrics["loss"].item() == loss.item() and "mismatch_kl" in metrics


def test_the_custom_loss_refuses_what_micro_batches_change(monkeypatch):
    for keys, words in [({"preset": "m2po"}, "m2po cannot be exact in slime's micro-batches"),
                        ({"preset": "ppo", "reduction": "sum"}, "slime's reducer")]:
        monkeypatch.setenv("LEEWAY_SPEC", json.dumps(keys))
        with pytest.raises(ValueError, match=words):
            slime.loss(ARGS, {}, None, None)
