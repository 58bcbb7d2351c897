"""The loss operator on a device against float64 in plain torch and against the CPU's. Run by
ops_check.py."""

import torch

import reference
from support import Example, by_element, check, metrics_of, policy_loss, same_metrics

DEVICE = "cuda"
FOREIGN = """
prime/default_dppo_kl prime/ipo prime/PR2401_icepop prime/PR2401_icepop_tight
prime/PR2401_first_rollout_min prime/PR2423_ipo_kl_kept prime/PR2423_ipo_kl_kept_tight
prime/PR2434_dppo_tv_sym prime/PR2434_teacher prime/ref_kl prime/ce slime/ppo slime/ppo_dual
slime/gspo slime/cispo slime/cispo_canonical slime/ppo+vanilla_tis slime/ppo+icepop
slime/ppo+off_policy_is_PR2084 slime/reinforce+off_policy_is_PR2084
slime/reinforce+off_policy_is_eps_from_1 slime/ppo+mis cookbook/grpo cookbook/dapo cookbook/gspo
cookbook/cispo cookbook/dro cookbook/is cookbook/reinforce cookbook/igpo cookbook_PR169/grpo
cookbook_PR169/dapo cookbook_PR169/gspo cookbook_PR169/cispo verl/vanilla verl/dppo_tv verl/dppo_kl
verl/gspo verl/sapo verl/gpg verl/geo_mean verl/dro verl/cispo verl/kl_cov verl/vanilla+IS
verl/vanilla+RS areal/ppo areal/ppo_cclip areal/gspo areal/ppo+RS areal/cispo areal/cispo+RS_clamp
areal/sapo areal/m2po+ppo liger/grpo liger/bnpo liger/dr_grpo liger/dapo liger/cispo liger/sapo
liger/luspo liger/vespo tinker/importance_sampling tinker/ppo tinker/cispo tinker/dro""".split()


def loss_case(e, logprobs, spec, denominator, what, exceptions=0):
    """policy_loss on the device beside the reference and the CPU's."""
    d = e.to(DEVICE)
    loss, g, metrics = policy_loss(d, logprobs.to(DEVICE), spec, denominator)
    cpu_loss, cpu_g, cpu_metrics = policy_loss(e, logprobs, spec, denominator)
    size = float(cpu_g.double().abs().sum()) + abs(float(cpu_loss)) + 1e-9
    by_element(g, cpu_g, f"{what}: g beside the CPU's", exceptions=exceptions)
    check(abs(float(loss) - float(cpu_loss)) <= 2e-5 * size, f"{what}: {loss} {cpu_loss}")
    same_metrics(metrics_of(metrics, spec), metrics_of(cpu_metrics, spec), what,
                 2e-5 if exceptions == 0 else 2e-3)
    return loss, g, size


def losses_of_native_presets():
    cases = 0
    for spec in reference.SPECS:
        for seed in range(3):
            e = Example(seed + 1, lengths=(130, 1, 177, 0, 40, 329, 1, 264, 8, 3, 2, 2, 3, 40),
                        vocabulary=7)
            if seed == 1:
                e.weigh()
            denominator = 123.0 if seed == 2 else -1.0
            generator = torch.Generator().manual_seed(seed)
            logprobs = torch.minimum(e.prox + 0.3 * torch.randn(e.tokens, generator=generator),
                                     torch.tensor(-1e-3))
            what = f"{spec} seed {seed}"
            loss, g, size = loss_case(e, logprobs, spec, denominator, what)
            pi = logprobs.double().requires_grad_()
            expected = reference.loss_of(spec, pi, e.batch(),
                                         None if denominator < 0 else denominator)
            expected.backward()
            by_element(g, pi.grad, f"{what}: g beside float64")
            check(abs(float(loss) - float(expected)) <= 2e-5 * size, f"{what}: loss")
            cases += 1
    return cases


def losses_of_other_code_bases():
    """Four of them have a correction that is a function of the host."""
    for preset in FOREIGN:
        e = Example(7, lengths=(30, 1, 77, 40, 129, 2, 64), trained=0.9)
        logprobs = torch.minimum(e.prox + 0.3 * torch.sin(torch.arange(e.tokens).float()),
                                 torch.tensor(-1e-3))
        loss_case(e, logprobs, {"preset": preset}, -1.0, preset)
    return len(FOREIGN)


def losses_of_large_batches():
    """A million tokens, cut in ways that fill and starve blocks of threads. The exponentials of two
    devices may differ in the last bit, and with them a few decisions at a bound."""
    cases = 0
    n = 1 << 20
    generator = torch.Generator().manual_seed(3)
    cuts = {"one sequence": [n], "one token each": [1] * n,
            "uneven": torch.randint(1, 4096, (512,), generator=generator).tolist()}
    for name, lengths in cuts.items():
        e = Example(1, lengths=(4, 4), hidden_size=2, vocabulary=4)
        n = sum(lengths)
        randn = lambda: torch.randn(n, generator=generator)
        logprobs = (-1.0 + 0.5 * randn()).clamp_max(-1e-3)
        near = lambda s: (logprobs + s * randn()).clamp_max(-1e-3)
        e.tokens, e.cu_seqlens = n, torch.tensor([0, *lengths]).cumsum(0)
        e.mask, e.advantages = torch.rand(n, generator=generator) < 0.7, randn()
        e.rollout, e.prox, e.ref, e.teacher = near(0.2), near(0.1), near(0.1), near(0.1)
        e.hidden = e.weight = torch.zeros(1, 1)
        for preset in ("icepop", "gspo", "geo_mask", "m2po", "ppo+tis", "dppo_kl", "verl/kl_cov"):
            for reduction in ({}, {"reduction": "seq_mean_token_mean"}):
                if reduction and preset != "icepop":
                    continue
                loss_case(e, logprobs, {"preset": preset, **reduction}, -1.0, f"{name} {preset}",
                          exceptions=10)
                cases += 1
    return cases


def checks(device):
    global DEVICE
    DEVICE = device
    return [losses_of_native_presets, losses_of_other_code_bases, losses_of_large_batches]
