"""Every seed loss through every host: loss, gradient and metrics are the golden ones, in one batch and
in two accumulation steps, with garbage wherever a mask is 0. A row of the table in
docs/integrations.md is a preset here, a column a host."""
import json
import math
from types import SimpleNamespace

import pytest
import torch

import golden
import leeway
from leeway.integrations import prime_rl, slime
from prime_rl_stand_in import LossInputs, LossOutputs

pytest.importorskip("trl")
pytest.importorskip("verl")

TOKEN_MEAN, SAMPLE_MEAN = "token_mean", "sample_mean"
TOKENS = golden.FIXTURE["active_tokens"]
COUNTS = [sum(row) for row in golden.FIXTURE["masks"]]
# The preset, its keys, the case of its source, and how that divides.
SEEDS = {
    "icepop": ("icepop", {}, "prime/PR2401_icepop/seqA", TOKEN_MEAN),
    "ipo_kl": ("ipo_kl", {}, "prime/PR2423_ipo_kl_kept/seqA", TOKEN_MEAN),
    "dppo_tv": ("dppo_tv", {}, "prime/PR2434_dppo_tv_sym/seqA", TOKEN_MEAN),
    "cispo by a weight": ("reinforce+off_policy_is", {"ois_ratio_low": 0.0, "ois_ratio_high": 2.0},
                          "slime/reinforce+off_policy_is_PR2084/default", SAMPLE_MEAN),
    "decoupled ppo with caps": ("ppo+tis", {"eps_high": 0.28, "tis_cap": 2.0},
                                "slime/ppo+vanilla_tis/default", SAMPLE_MEAN),
}
DECOUPLED = "decoupled ppo with caps"


def parts(values):
    return list(torch.split(values, golden.LENGTHS))


def garbage(values, mask, what=math.nan):
    return torch.where(mask, values, torch.full_like(values, what))


def inputs():
    """pi with gradient, the other streams, and the mask; what is masked holds garbage."""
    pi, streams = golden.streams()
    mask = golden.mask()
    streams = {name: garbage(values, mask) for name, values in streams.items()}
    pi = garbage(pi.detach(), mask, 3.0).requires_grad_()
    return pi, streams, mask, garbage(golden.flat("adv_seq"), mask, math.inf)


def expected_metrics(case):
    """The metrics of the batch from the source's, which are lists of one number a sequence: means over
    tokens, over masked ones and over the others."""
    lists = case["metrics"]
    if "is_masked" not in lists:
        return {}
    masked = [share * count for share, count in zip(lists["is_masked"], COUNTS)]
    weights = {"masked_mismatch_kl": masked,
               "unmasked_mismatch_kl": [n - m for n, m in zip(COUNTS, masked)]}
    found = {}
    for name in ("mismatch_kl", "masked_mismatch_kl", "unmasked_mismatch_kl", "is_masked",
                 "is_masked_low", "is_masked_high"):
        over = weights.get(name, COUNTS)
        if name in lists and sum(over) > 0:
            found[name] = sum(x * w for x, w in zip(lists[name], over)) / sum(over)
    return found


def check(seed, loss, gradient, metrics, slope=None):
    """`gradient` is that of log-probabilities, or of what has them with this slope; `metrics` are those
    of the whole batch, which hosts that average over micro-batches do not have."""
    case = golden.CASES[SEEDS[seed][2]]
    if slope is not None:
        case = {**case, "grad": [(golden.gradient(case) * slope).tolist()]}
    golden.check(loss, gradient, case)
    if metrics is None:
        return
    wanted = expected_metrics(case)
    assert seed not in ("icepop", "ipo_kl", "dppo_tv") or len(wanted) >= 5
    for name, value in wanted.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-4, abs=1e-6), name


# Micro-batches of an accumulation window: all at once; two; and two with an empty one between.
WINDOWS = {"one": [[0, 1, 2]], "two": [[0], [1, 2]], "two and an empty one": [[0], [], [1, 2]]}
windows = pytest.mark.parametrize("window", list(WINDOWS))
seeds = pytest.mark.parametrize("seed", list(SEEDS))


def joined(metrics):
    return leeway.join_metrics(metrics)


@seeds
@pytest.mark.parametrize("padded", [False, True])
def test_the_package(seed, padded):
    preset, keys, name, division = SEEDS[seed]
    reduction = {TOKEN_MEAN: "token_mean", SAMPLE_MEAN: "seq_mean_token_mean"}[division]
    pi, streams, mask, advantages = inputs()
    wide = (lambda x, fill: golden.padded(x, fill)) if padded else (lambda x, fill: x)
    rest = {key: wide(value, math.nan) for key, value in streams.items()}
    more = {} if padded else {"cu_seqlens": golden.OFFSETS}
    loss, metrics = leeway.policy_loss(
        wide(pi, math.nan), advantages=wide(advantages, math.nan), mask=wide(mask, False),
        preset=leeway.Spec(preset, reduction=reduction, **keys), **rest, **more)
    loss.backward()
    check(seed, loss, pi.grad, metrics)


@seeds
def test_prime_rl(seed, monkeypatch):
    """One sequence at a time; a mean over samples is said by weights."""
    preset, keys, _, division = SEEDS[seed]
    pi, streams, mask, advantages = inputs()
    found = []
    real = prime_rl.policy_loss

    def recorded(*args, **kwargs):
        loss, metrics = real(*args, **kwargs)
        found.append(metrics)
        return loss, metrics

    monkeypatch.setattr(prime_rl, "policy_loss", recorded)
    total = pi.sum() * 0.0
    for k in range(3):
        weights = None
        if division == SAMPLE_MEAN:
            weights = torch.full((golden.LENGTHS[k],), TOKENS / (3 * COUNTS[k]))
        one = LossInputs(parts(pi)[k], parts(streams["rollout"])[k], None, parts(advantages)[k],
                         parts(mask)[k], weights)
        if seed == DECOUPLED:
            with pytest.raises(ValueError, match=r"ppo\+tis reads prox.*which prime-rl does not have"):
                prime_rl.loss(one, preset=preset, **keys)
            return
        total = total + prime_rl.loss(one, preset=preset, **keys).loss
    empty = LossInputs(torch.zeros(2, requires_grad=True), torch.full((2,), math.nan), None,
                       torch.ones(2), torch.zeros(2, dtype=torch.bool))
    nothing = prime_rl.loss(empty, preset=preset, **keys).loss
    nothing.backward()
    assert nothing.item() == 0.0 and not empty.trainer_logprobs.grad.any()
    loss = total / TOKENS
    loss.backward()
    check(seed, loss, pi.grad, joined(found[:3]))


@seeds
@windows
def test_slimes_custom_loss(seed, window, monkeypatch):
    preset, keys, _, division = SEEDS[seed]
    monkeypatch.setenv("LEEWAY_SPEC", json.dumps({"preset": preset, **keys}))
    monkeypatch.setattr(slime, "_current_log_probs", lambda args, batch, logits: logits)
    pi, streams, mask, advantages = inputs()
    loss, sums, scale = pi.sum() * 0.0, {}, 0.0
    for chosen in WINDOWS[window]:
        pick = lambda x: [parts(x)[k] for k in chosen] or [x[:0]]

        def reducer(values):
            """slime's: a sample counts 1/3, or a token 1/14, in whatever micro-batch it is."""
            out = values.sum() * 0.0
            lengths = [golden.LENGTHS[k] for k in chosen]
            for k, row, kept in zip(chosen, torch.split(values, lengths) if chosen else [], pick(mask)):
                divisor = TOKENS if division == TOKEN_MEAN else 3 * COUNTS[k]
                out = out + torch.where(kept, row, torch.zeros_like(row)).sum() / divisor
            return out

        batch = {"advantages": pick(advantages), "log_probs": pick(streams["prox"]),
                 "rollout_log_probs": pick(streams["rollout"]), "ref_log_probs": None}
        part, metrics = slime.loss(SimpleNamespace(), batch, pick(pi), reducer)
        loss = loss + part
        for key, value in metrics.items():
            sums[key] = sums.get(key, 0.0) + float(value)
    loss.backward()
    check(seed, loss, pi.grad, sums if window == "one" else None)


@seeds
def test_slimes_tis_function(seed, monkeypatch):
    preset, keys, name, division = SEEDS[seed]
    if division == TOKEN_MEAN:
        return  # a correction of slime's own losses: the other two
    case = golden.CASES[name]
    correction = preset.split("+")[1]
    own = {key: value for key, value in keys.items() if not key.startswith("eps")}
    monkeypatch.setenv("LEEWAY_SPEC", json.dumps({"correction": correction, **own}))
    pi, streams = golden.streams()
    mask, A = golden.mask(), golden.flat("adv_seq")
    pg_loss = -A * pi
    if seed == DECOUPLED:
        ratio = torch.exp(pi - streams["prox"])
        pg_loss = torch.maximum(-ratio * A, -ratio.clamp(0.8, 1.28) * A)
    weighted, masks, metrics = slime.tis(
        SimpleNamespace(), pg_loss=pg_loss, train_log_probs=parts(streams["prox"]),
        rollout_log_probs=parts(garbage(streams["rollout"], mask)),
        loss_masks=parts(mask.float()), cur_log_probs=parts(pi))

    def mean(values):
        return sum(torch.where(m, row, torch.zeros_like(row)).sum() / count
                   for row, m, count in zip(parts(values), parts(mask), COUNTS)) / 3

    loss = mean(weighted)
    loss.backward()
    golden.check(loss, pi.grad, case)
    for key in ("tis", "tis_abs", "tis_clipfrac"):
        assert torch.isfinite(metrics[key]).all()  # slime multiplies by the mask
        assert mean(metrics[key]).item() == pytest.approx(case["metrics"][key], rel=1e-4), key


@seeds
@windows
def test_verl(seed, window):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    import leeway.integrations.verl as integration

    preset, keys, _, division = SEEDS[seed]
    pi, streams, mask, advantages = inputs()
    mode = {TOKEN_MEAN: "token-mean", SAMPLE_MEAN: "seq-mean-token-mean"}[division]
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
                         loss_agg_mode=mode)
    object.__setattr__(config.policy_loss, "rollout_correction", {"bypass_mode": True})
    config.global_batch_info.update(dp_size=1, batch_num_tokens=TOKENS, global_batch_size=3)
    if seed == DECOUPLED:  # verl's own weights are the caps; with both policies it is refused
        name = "seed/ppo"
        integration.register("ppo", name, eps_high=keys["eps_high"])
        with pytest.raises(ValueError, match="prox and rollout"):
            integration.register(preset, "seed/refused", **keys)
    else:
        name = f"seed/{preset}"
        integration.register(preset, name, **keys)
    wide = lambda x, fill=math.nan: golden.padded(x, fill)
    weights = torch.exp(golden.flat("prox") - golden.flat("rollout")).clamp(max=2.0)
    loss, found = pi.sum() * 0.0, []
    whole_pi, whole_mask = wide(pi), wide(mask, False)
    for chosen in WINDOWS[window]:
        rows = chosen or [0]
        micro = whole_mask[rows] if chosen else torch.zeros_like(whole_mask[rows])
        old = streams["prox" if seed == DECOUPLED else "rollout"]
        more = {"rollout_is_weights": wide(weights, 1.0)[rows]} if seed == DECOUPLED else {}
        part, metrics = get_policy_loss_fn(name)(
            old_log_prob=wide(old)[rows], log_prob=whole_pi[rows], advantages=wide(advantages)[rows],
            response_mask=micro, loss_agg_mode=mode, config=config, **more)
        assert chosen or part.item() == 0.0
        loss = loss + part
        found.append({key.removeprefix("actor/leeway/"): value for key, value in metrics.items()})
    loss.backward()
    check(seed, loss, pi.grad, found[0] if window == "one" else None)


# ---------------------------------------------------------------------------------------------
# TRL: the real trainer and its output head; the layers below are replaced by hidden states whose
# log-probabilities are the golden ones.

TARGET, WORDS = 2, 28


class Hidden:
    """Hands out hidden states of the chosen sequences: the target's logit is `x`, the others' 0."""

    def __init__(self, x, width):
        self.x, self.width, self.rows = x, width, [0, 1, 2]

    def __call__(self, *args, **kwargs):
        from transformers.modeling_outputs import BaseModelOutputWithPast
        x = self.x[self.rows]
        states = torch.zeros(*x.shape, self.width)
        states = torch.cat([x.unsqueeze(-1), states[..., 1:]], -1)
        return BaseModelOutputWithPast(last_hidden_state=torch.cat([states, states[:, :1]], 1))


@seeds
@windows
def test_trl(seed, window, tmp_path):
    import test_trl as host

    preset, keys, _, division = SEEDS[seed]
    loss_type = {TOKEN_MEAN: "dapo", SAMPLE_MEAN: "grpo"}[division]
    one = host.trainer(tmp_path, spec=leeway.Spec(preset, **keys), loss_type=loss_type, temperature=1.0,
                       gradient_accumulation_steps=2)
    _, streams, mask, _ = inputs()
    pi = golden.padded(golden.flat("pi"), -1.0)
    mask = golden.padded(mask, False)
    # log p = x - log(e^x + 27), solved for x.
    p = pi.double().exp()
    x = torch.log((WORDS - 1) * p / (1 - p)).float()
    x = garbage(x, mask).requires_grad_()
    model = one.accelerator.unwrap_model(one.model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[TARGET, 0] = 1.0
    hidden = Hidden(x, model.lm_head.weight.shape[1])
    model.model.forward = hidden
    one.model.train()
    lengths = torch.tensor(golden.LENGTHS)
    completion = torch.arange(pi.shape[1]).unsqueeze(0) < lengths.unsqueeze(1)
    loss = torch.zeros(())
    # TRL divides the means over samples by the micro-batch's own size and by the number of steps, so a
    # window of micro-batches of other sizes is another mean: there each has one sequence.
    chunks = WINDOWS[window]
    if division == SAMPLE_MEAN and window != "one":
        chunks = [[0], [1], [2]] + ([[]] if "empty" in window else [])
    for chosen in chunks:
        rows = chosen or [0]
        hidden.rows = rows
        one.current_gradient_accumulation_steps = 2 if division == TOKEN_MEAN else \
            1 if window == "one" else 3
        tools = mask[rows] if chosen else torch.zeros_like(mask[rows])
        wide = lambda values: golden.padded(values, math.nan)[rows]
        part = one.compute_loss(one.model, {
            "prompt_ids": torch.full((len(rows), 1), 3), "prompt_mask": torch.ones(len(rows), 1).long(),
            "completion_ids": torch.full((len(rows), pi.shape[1]), TARGET),
            "completion_mask": completion[rows].long(), "tool_mask": tools.long(),
            "advantages": torch.tensor(golden.FIXTURE["adv_seq"])[rows],
            "num_items_in_batch": torch.tensor(float(TOKENS)),
            "old_per_token_logps": wide(streams["prox"]),
            "sampling_per_token_logps": wide(streams["rollout"])})
        part.backward()  # also of a micro-batch without a trained token
        assert chosen or part.item() == 0.0
        loss = loss + part.detach()
    flat = lambda wide: torch.cat([row[:n] for row, n in zip(wide, golden.LENGTHS)])
    assert not x.grad[~mask].any()
    metrics = {name.removeprefix("leeway/"): values[0]
               for name, values in one._metrics["train"].items()}
    check(seed, loss, flat(x.grad), metrics if window == "one" else None, flat(1 - p))
