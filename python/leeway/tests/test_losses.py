"""policy_loss: golden numbers, shapes, micro-batches, masks."""
import math

import pytest
import torch

import golden
import leeway

# Settings that name the fixture's streams or the source's conventions; the rest are keys.
NATIVE = [  # a native preset with keys, and the golden case that it is
    ("icepop", {}, "prime/PR2401_icepop/seqA"),
    ("icepop", {}, "prime/PR2401_icepop/tokA"),
    ("icepop", {"icepop_ratio_low": 0.8, "icepop_ratio_high": 1.25}, "prime/PR2401_icepop_tight/tokA"),
    ("ipo_kl", {}, "prime/PR2423_ipo_kl_kept/seqA"),
    ("ipo_kl", {}, "prime/PR2423_ipo_kl_kept/tokA"),
    ("dppo_tv", {}, "prime/PR2434_dppo_tv_sym/seqA"),
    ("dppo_tv", {}, "prime/PR2434_dppo_tv_sym/tokA"),
    ("dppo_kl", {}, "prime/default_dppo_kl/tokA"),
    ("off_policy_is", {"reduction": "seq_mean_token_mean"},
     "slime/reinforce+off_policy_is_PR2084/default"),
]


def cases():
    return [name for name, case in golden.CASES.items() if "loss" in case and "grad" in case]


def foreign(case):
    config = {key: value for key, value in case.get("config", {}).items()
              if isinstance(value, (bool, int, float, str)) or value is None}
    return "/".join(case["name"].split("/")[:2]), config


@pytest.mark.parametrize("name", cases())
def test_presets_of_other_code_bases_have_their_numbers(name):
    case = golden.CASES[name]
    preset, keys = foreign(case)
    pi, streams = golden.streams()
    loss, _ = leeway.policy_loss(pi, advantages=golden.advantages(case), mask=golden.mask(),
                                 cu_seqlens=golden.OFFSETS, preset=leeway.Spec(preset, **keys), **streams)
    loss.backward()
    golden.check(loss, pi.grad, case)


@pytest.mark.parametrize("preset,keys,name", NATIVE)
def test_native_presets_have_their_sources_numbers_packed_and_padded(preset, keys, name):
    case = golden.CASES[name]
    config = case["config"]
    for key in ("icepop_ratio_low", "icepop_ratio_high"):
        if key in keys:
            keys = {**keys, key: config[key]}
    if preset == "off_policy_is":
        keys = {**keys, "ois_ratio_low": config["tis_clip_low"], "ois_ratio_high": config["tis_clip"]}
    pi, streams = golden.streams()
    loss, _ = leeway.policy_loss(pi, advantages=golden.advantages(case), mask=golden.mask(),
                                 cu_seqlens=golden.OFFSETS, preset=preset, **streams, **keys)
    loss.backward()
    golden.check(loss, pi.grad, case)
    # Padding holds garbage: it is masked.
    wide = golden.padded(golden.flat("pi"), math.nan).requires_grad_()
    loss, _ = leeway.policy_loss(
        wide, advantages=golden.padded(golden.advantages(case), math.inf),
        mask=golden.padded(golden.mask(), False), preset=preset,
        **{key: golden.padded(value, math.nan) for key, value in streams.items()}, **keys)
    loss.backward()
    assert torch.equal(wide.grad[~golden.padded(golden.mask(), False)], torch.zeros(len(
        wide.grad[~golden.padded(golden.mask(), False)])))
    grad = torch.cat([row[:length] for row, length in zip(wide.grad, golden.LENGTHS)])
    golden.check(loss, grad, case)


def example(seed=1):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    rand = lambda: torch.randn(31, generator=generator)
    prox = -1.5 + 0.3 * rand()
    return dict(logprobs=(prox + 0.2 * rand()).requires_grad_(), rollout=prox + 0.3 * rand(),
                prox=prox, ref=prox + 0.2 * rand(), teacher=prox + 0.2 * rand(), advantages=rand(),
                mask=torch.rand(31, generator=generator) < 0.8,
                cu_seqlens=torch.tensor([0, 9, 10, 27, 31]))


@pytest.mark.parametrize("reduction", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum",
                                       "fixed_length", "sum"])
def test_micro_batches_add_up(reduction):
    more = {"fixed_length": 20} if reduction == "fixed_length" else {}
    e = example()
    logprobs = e.pop("logprobs")
    whole, metrics = leeway.policy_loss(logprobs, **e, reduction=reduction, **more)
    gradient, = torch.autograd.grad(whole, logprobs)
    offsets = e.pop("cu_seqlens")
    total = leeway.denominator(e["mask"], cu_seqlens=offsets, reduction=reduction, **more)
    parts, summed, grads = [], 0.0, torch.zeros_like(gradient)
    for first, last in ((0, 2), (2, 4)):
        a, b = int(offsets[first]), int(offsets[last])
        piece = {key: value[a:b] for key, value in e.items()}
        for denominator in (total, float(total)):  # a tensor and a number are one thing
            loss, of_part = leeway.policy_loss(logprobs[a:b], **piece, reduction=reduction,
                                               cu_seqlens=offsets[first:last + 1] - a,
                                               denominator=denominator, **more)
        summed += loss.item()
        grads += torch.autograd.grad(loss, logprobs)[0]
        parts.append(of_part)
    assert summed == pytest.approx(whole.item(), rel=1e-5, abs=1e-7)
    torch.testing.assert_close(grads, gradient, rtol=1e-5, atol=1e-8)
    joined = leeway.join_metrics(parts)
    assert joined.keys() == metrics.keys()
    for name, value in metrics.items():
        assert joined[name] == pytest.approx(value, rel=1e-6, nan_ok=True), name


def test_samples_of_one_rollout_count_once():
    e = example()
    e["rollout_ids"] = torch.tensor([5, 5, 2, 5])
    logprobs = e.pop("logprobs")
    loss, _ = leeway.policy_loss(logprobs, **e, preset="reinforce",
                                 reduction="seq_mean_token_mean")
    place = torch.searchsorted(e["cu_seqlens"][1:], torch.arange(31), right=True)
    unit = (place == 2).long()
    expected = 0.0
    for k in range(2):
        here = e["mask"] & (unit == k)
        expected += -(e["advantages"] * logprobs)[here].sum().item() / int(here.sum())
    assert loss.item() == pytest.approx(expected / 2, rel=1e-5)
    assert leeway.denominator(e["mask"], cu_seqlens=e["cu_seqlens"], rollout_ids=e["rollout_ids"],
                              reduction="seq_mean_token_mean") == 2


def test_weights_and_one_advantage_for_each_sequence():
    e = example()
    logprobs = e.pop("logprobs")
    e["advantages"] = torch.tensor([1.0, -1.0, 0.5, 2.0])
    e["weights"] = torch.rand(31)
    e["weights"][3] = 0.0
    loss, metrics = leeway.policy_loss(logprobs, **e, preset="reinforce")
    each = torch.repeat_interleave(e["advantages"], e["cu_seqlens"].diff())
    part = e["mask"] & (e["weights"] != 0)
    expected = -(each * logprobs * e["weights"])[part].sum() / part.sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["tokens"] == part.sum()


def test_nothing_to_train_has_zero_loss_and_gradient():
    e = example()
    e["mask"] = torch.zeros(31, dtype=torch.bool)
    logprobs = e.pop("logprobs")
    loss, metrics = leeway.policy_loss(logprobs, **e)
    loss.backward()
    assert loss.item() == 0.0 and not logprobs.grad.any() and metrics["tokens"] == 0
    empty = torch.zeros(2, 0, requires_grad=True)
    loss, _ = leeway.policy_loss(empty, rollout=torch.zeros(2, 0), advantages=torch.zeros(2))
    loss.backward()
    assert loss.item() == 0.0


def test_no_gradient_under_no_grad_and_prox_may_be_the_current_policy():
    e = example()
    with torch.no_grad():
        loss, _ = leeway.policy_loss(e["logprobs"], **{k: v for k, v in e.items() if k != "logprobs"})
    assert not loss.requires_grad
    logprobs = e.pop("logprobs")
    e["prox"] = "current"
    loss, _ = leeway.policy_loss(logprobs, **e, preset="ppo")
    loss.backward()
    expected = torch.where(e["mask"], -e["advantages"] / e["mask"].sum(), torch.zeros(31))
    torch.testing.assert_close(logprobs.grad, expected)


def test_a_loss_may_lack_the_rollouts_it_does_not_read():
    e = example()
    logprobs = e.pop("logprobs")
    with_them, all_metrics = leeway.policy_loss(logprobs, **e, preset="ppo")
    e["rollout"] = None
    without, metrics = leeway.policy_loss(logprobs, **e, preset="ppo")
    assert with_them.item() == without.item()
    assert "mismatch_kl" in all_metrics and "mismatch_kl" not in metrics
    with pytest.raises(ValueError, match='icepop reads the stream "rollout".*rollout='):
        leeway.policy_loss(logprobs, **e)


def test_specs_are_the_programs():
    spec = leeway.Spec("grpo+tis", tis_cap=3.0)
    assert spec.settings["tis_cap"] == "3" and spec.reads == ("pi", "prox", "rollout")
    assert spec == leeway.Spec("grpo+tis", tis_cap=3.0) and spec != leeway.Spec("grpo+tis")
    assert "min(prox/rollout, 3)" in spec.explain() == leeway.explain("grpo+tis", tis_cap=3.0)
    assert leeway.Spec("verl/vanilla", clip_ratio_c=3.0, nonsense=1).inert
    names = {preset.name: preset.kind for preset in leeway.presets()}
    assert names["icepop"] == "preset" and names["tis"] == "correction" and names["verl/vanilla"]
    import copy
    import pickle
    assert pickle.loads(pickle.dumps(spec)) == spec == copy.deepcopy(spec)


def test_compare_is_the_programs():
    batch = {"sequences": [{"pi": row, "rollout": other, "advantages": a, "mask": m}
                           for row, other, a, m in zip(golden.FIXTURE["pi"], golden.FIXTURE["rollout"],
                                                       golden.FIXTURE["adv_seq"],
                                                       golden.FIXTURE["masks"])]}
    out = leeway.compare(batch, ["icepop", leeway.Spec("dppo_tv", dppo_diff_low=0.1)],
                         target_masked=0.1)
    assert [row["label"] for row in out["presets"]] == ["icepop", "dppo_tv:dppo_diff_low=0.1"]
    assert out["tokens"] == 14 and 0 < out["presets"][0]["kept_share"] < 1
    assert len(leeway.compare(batch)["presets"]) > 10
    with pytest.raises(ValueError, match="there is no preset icepp"):
        leeway.compare(batch, ["icepp"])
