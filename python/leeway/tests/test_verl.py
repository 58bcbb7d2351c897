"""Losses `leeway/<preset>` in verl's own registry, beside verl's own losses, with verl from PyPI."""
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("verl")
from verl.trainer.ppo.core_algos import get_policy_loss_fn  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

import leeway  # noqa: E402
import leeway.integrations.verl as integration  # noqa: E402

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm",
         "seq-mean-token-mean"]


def config(mode="token-mean", bypass=False, **info):
    made = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1,
                       loss_agg_mode=mode, clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28,
                       clip_ratio_c=1e6)
    if bypass:
        object.__setattr__(made.policy_loss, "rollout_correction", {"bypass_mode": True})
    made.global_batch_info.update(info)
    return made


def batch(sequences=4, width=7, seed=3):
    generator = torch.Generator().manual_seed(seed)
    rand = lambda: torch.randn(sequences, width, generator=generator)
    old = -1.5 + 0.4 * rand()
    lengths = torch.tensor([7, 3, 5, 0] * (sequences // 4 + 1))[:sequences]
    mask = torch.arange(width).unsqueeze(0) < lengths.unsqueeze(1)
    return dict(old_log_prob=old, advantages=rand(), response_mask=mask), old + 0.25 * rand()


def run(name, inputs, log_prob, made, **more):
    log_prob = log_prob.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(log_prob=log_prob, loss_agg_mode=made.loss_agg_mode,
                                             config=made, **inputs, **more)
    loss.backward()
    return loss.item(), log_prob.grad, metrics


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", [{}, {"dp_size": 2, "batch_num_tokens": 41, "global_batch_size": 9,
                                       "loss_scale_factor": 11}])
def test_a_clipped_loss_is_verls_under_each_of_its_aggregations(mode, info, monkeypatch):
    monkeypatch.setenv("LEEWAY_SPEC", '{"eps_high": 0.28}')
    integration.register("ppo", "fresh/ppo")
    inputs, log_prob = batch()
    theirs = run("vanilla", inputs, log_prob, config(mode, **info))
    ours = run("fresh/ppo", inputs, log_prob, config(mode, **info))
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-7)


def test_verls_own_weights_multiply_the_policy_term():
    inputs, log_prob = batch()
    weights = torch.rand(log_prob.shape) * 2
    theirs = run("vanilla", inputs, log_prob, config(), rollout_is_weights=weights)
    integration.register("ppo", "weighted/ppo", eps_high=0.28)
    ours = run("weighted/ppo", inputs, log_prob, config(), rollout_is_weights=weights)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-7)


def test_verls_own_presets_compute_beside_the_integration():
    """The weights that verl hands over are a correction of another name than the one in its presets."""
    import golden
    case = golden.CASES["verl/vanilla+IS/tok_tis"]
    keys = {key: value for key, value in case["config"].items() if not isinstance(value, (list, dict))}
    pi, streams = golden.streams()
    loss, _ = leeway.policy_loss(pi, advantages=golden.advantages(case), mask=golden.mask(),
                                 cu_seqlens=golden.OFFSETS,
                                 preset=leeway.Spec("verl/vanilla+IS", **keys), **streams)
    loss.backward()
    golden.check(loss, pi.grad, case)


def test_losses_of_the_rollouts_need_bypass_mode():
    inputs, log_prob = batch()
    with pytest.raises(ValueError, match="leeway/icepop.*bypass_mode=true"):
        run("leeway/icepop", inputs, log_prob, config())
    loss, gradient, metrics = run("leeway/icepop", inputs, log_prob, config(bypass=True))
    x = log_prob - inputs["old_log_prob"]
    keep = inputs["response_mask"] & (x.exp() >= 0.2) & (x.exp() <= 5.0)
    expected = (-x.exp() * inputs["advantages"] * keep) / inputs["response_mask"].sum()
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
    assert loss == pytest.approx(expected.sum().item(), rel=1e-5)
    assert metrics["actor/leeway/tokens"] == inputs["response_mask"].sum()


def test_what_verl_cannot_hand_over_is_refused_by_name(monkeypatch):
    inputs, log_prob = batch()
    with pytest.raises(ValueError, match="leeway/grpo.tis.*prox and rollout"):
        run("leeway/grpo+tis", inputs, log_prob, config())
    with pytest.raises(ValueError, match="leeway/m2po.*micro-batches"):
        run("leeway/m2po", inputs, log_prob, config())
    for keys, words in [({"ref_kl": 0.1}, "ref log-probabilities"), ({"reduction": "sum"}, "loss_agg_mode"),
                        ({"eps_lo": 0.1}, "did you mean eps_low")]:
        with pytest.raises(ValueError, match=words):
            integration.register("grpo", "bad", **keys)
    monkeypatch.setenv("LEEWAY_SPEC", '{"preset": "ppo", "eps_high": 0.28}')
    assert run("leeway/spec", inputs, log_prob, config())[0] == pytest.approx(
        run("vanilla", inputs, log_prob, config())[0], rel=1e-5)


def test_an_empty_micro_batch_has_a_backward():
    inputs, log_prob = batch()
    inputs["response_mask"] = torch.zeros_like(inputs["response_mask"])
    loss, gradient, _ = run("leeway/ppo", inputs, log_prob, config(batch_num_tokens=10))
    assert loss == 0.0 and not gradient.any()


def test_own_corrections_come_by_name():
    @leeway.correction("halved")
    def halved(tokens):
        return torch.full_like(tokens.pi, 0.5)

    integration.register("icepop+halved")
    inputs, log_prob = batch()
    whole = run("leeway/icepop", inputs, log_prob, config(bypass=True))
    half = run("leeway/icepop+halved", inputs, log_prob, config(bypass=True))
    torch.testing.assert_close(half[1], 0.5 * whole[1])


def test_verl_finds_the_losses_by_its_entry_point(tmp_path):
    info = tmp_path / "leeway-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: leeway\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\nleeway = leeway.integrations.verl\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", "from verl.trainer.ppo.core_algos import get_policy_loss_fn\n"
         "print(get_policy_loss_fn('leeway/icepop').__module__)"],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("leeway.integrations.verl"), done.stderr


def _rank(rank, port, modes, out):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    inputs, _ = batch(8)
    mask = inputs["response_mask"]
    info = {"dp_size": 2, "batch_num_tokens": int(mask.sum()),
            "global_batch_size": int(mask.any(1).sum()), "loss_scale_factor": 7}
    part = {name: value[4 * rank:4 * rank + 4] for name, value in inputs.items()}
    gradients = []
    for mode in modes:
        model = torch.nn.parallel.DistributedDataParallel(_Line())
        # Two micro-batches; gradients are averaged over ranks by the last one's backward.
        for k in range(2):
            micro = {name: value[2 * k:2 * k + 2] for name, value in part.items()}
            loss, _ = get_policy_loss_fn("leeway/ppo")(
                log_prob=model(micro["old_log_prob"]), loss_agg_mode=mode, config=config(mode, **info),
                **micro)
            if k == 0:
                with model.no_sync():
                    loss.backward()
            else:
                loss.backward()
        gradients.append(model.module.weight.grad)
    if rank == 0:
        torch.save(gradients, out)
    dist.barrier()
    # Without the group's destructor: it holds the interpreter's lock while it waits for a thread of its
    # own, which may need that lock to let go of the last sum.
    os._exit(0)


class _Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.9, -0.1]))

    def forward(self, x):
        return x * self.weight[0] + self.weight[1]


def test_two_ranks_have_the_gradient_of_one(tmp_path, unused_port):
    inputs, _ = batch(8)
    out = tmp_path / "gradients.pt"
    modes = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"]
    mp.spawn(_rank, (unused_port, modes, str(out)), nprocs=2)
    for mode, gradient in zip(modes, torch.load(out)):
        model = _Line()
        loss, _ = get_policy_loss_fn("leeway/ppo")(log_prob=model(inputs["old_log_prob"]),
                                                   loss_agg_mode=mode, config=config(mode), **inputs)
        loss.backward()
        torch.testing.assert_close(gradient, model.weight.grad, rtol=1e-5, atol=1e-7)
