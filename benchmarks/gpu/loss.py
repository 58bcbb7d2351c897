"""The loss alone on a GPU: a million tokens in 512 sequences of uneven length; loss, gradient and
metrics from given log-probabilities.

  loss.py LIBRARY [--output FILE]
"""

import argparse
import json
import sys

import torch

from common import context, in_a_row, load_ops, table, write

TOKENS, SEQUENCES = 1 << 20, 512
LOW, HIGH = 0.2, 5.0
METHOD = ("20 calls in a row, median of 5 such rows after 3 warm-up calls; device: CUDA events "
          "around the row, wall: the host's clock around it and a synchronisation at its end; all "
          "data fit the L2 cache, for everyone")
READS_ROLLOUT_ALONE = ("icepop", "ipo_kl", "dppo_tv", "dppo_kl", "reinforce", "is", "cispo", "kpop",
                       "geo_mask", "seq_mis")
SPECS = [{"preset": p} for p in (
    "icepop", "ipo_kl", "dppo_tv", "dppo_kl", "reinforce", "is", "ppo", "grpo", "dapo", "gspo",
    "cispo", "cispo_mask", "dro", "sapo", "kpop", "geo_mask", "seq_mis", "m2po", "ppo+tis",
    "ppo+icepop_tis", "ppo+off_policy_is", "verl/kl_cov")]
SPECS.append({"preset": "icepop", "reduction": "seq_mean_token_mean"})


class Data:
    def __init__(self):
        torch.manual_seed(1)
        shares = torch.rand(SEQUENCES) ** 2 + 0.05
        lengths = (shares / shares.sum() * TOKENS).long()
        lengths[-1] += TOKENS - lengths.sum()
        self.cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).cuda()
        self.ends = self.cu_seqlens.tolist()
        self.logprobs = (-1.5 * torch.rand(TOKENS, device="cuda") ** 2 - 1e-3).requires_grad_()
        near = lambda spread: (self.logprobs.detach()
                               + spread * torch.randn(TOKENS, device="cuda")).clamp_max(-1e-4)
        self.rollout, self.prox = near(0.1), near(0.05)
        self.advantages = torch.randn(TOKENS, device="cuda")
        self.mask = torch.rand(TOKENS, device="cuda") < 0.7

    def ours(self, spec):
        prox = None if spec["preset"] in READS_ROLLOUT_ALONE else self.prox
        text = json.dumps(spec)

        def run():
            with torch.no_grad():
                return torch.ops.leeway.policy_loss(
                    self.logprobs, self.cu_seqlens, self.mask, self.advantages, self.rollout, prox,
                    None, None, None, None, text, -1.0)
        return run


def icepop(logprobs, rollout, advantages, mask, count):
    """The plain formula and the six metrics that a trainer logs of it."""
    log_ratio = logprobs - rollout
    ratio = torch.exp(log_ratio)
    low, high = ratio < LOW, ratio > HIGH
    keep = ~(low | high) & mask
    loss = -torch.where(keep, advantages * ratio, 0.0).sum() / count
    with torch.no_grad():
        kl = ratio - log_ratio - 1
        mean = lambda x: torch.where(mask, x, 0.0).sum() / count
        metrics = (mean(kl), mean((low | high).float()), mean(low.float()), mean(high.float()),
                   torch.where(mask & ~keep, kl, 0.0).sum(), torch.where(keep, kl, 0.0).sum())
    return loss, metrics


def gradient_of(data, logprobs, loss):
    return torch.autograd.grad(loss, logprobs)[0]


def by_sequence(data):
    def run():
        count = data.mask.sum()
        losses, metrics = [], []
        for begin, end in zip(data.ends, data.ends[1:]):
            part = slice(begin, end)
            loss, of_sequence = icepop(data.logprobs[part], data.rollout[part],
                                       data.advantages[part], data.mask[part], count)
            losses.append(loss)
            metrics.append(torch.stack(of_sequence))
        total = torch.stack(losses).sum()
        torch.stack(metrics).sum(0)
        return total, gradient_of(data, data.logprobs, total)
    return run


def flat(data, function):
    def run():
        loss, _ = function(data.logprobs, data.rollout, data.advantages, data.mask,
                           data.mask.sum())
        return loss, gradient_of(data, data.logprobs, loss)
    return run


def copy_floor():
    """A copy that reads and writes as many bytes as the loss must: 13 in and 4 out per token."""
    source = torch.empty(TOKENS * 17 // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--output", default="gpu_loss.json")
    arguments = parser.parse_args()
    load_ops(arguments.library)
    data = Data()
    compiled = torch.compile(icepop, dynamic=False)
    runs = [("copy of the same bytes", copy_floor(), 20),
            ("ours, icepop", data.ours({"preset": "icepop"}), 20),
            ("torch, by sequence", by_sequence(data), 2),
            ("torch, flat", flat(data, icepop), 20),
            ("torch.compile, flat", flat(data, compiled), 20)]
    runs += [("ours, " + ", ".join(spec.values()), data.ours(spec), 20) for spec in SPECS[1:]]

    # Check that both compute the same, or their times could not be compared.
    g = data.ours({"preset": "icepop"})()[1]
    plain_g = flat(data, icepop)()[1]
    difference = float((g - plain_g).norm() / plain_g.norm())
    if not difference < 1e-4:
        print(f"  THE GRADIENTS DIFFER by {difference:.3g} of their norm", flush=True)

    rows = []
    for name, run, calls in runs:
        row = {"name": name}
        try:
            row["device_ms"], row["wall_ms"] = in_a_row(run, calls)
        except Exception as error:
            row["failure"] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"  {name}: {row['failure']}", flush=True)
        rows.append(row)
    icepop_ms = next(r for r in rows if r["name"] == "ours, icepop").get("device_ms", float("nan"))
    for row in rows:
        if "device_ms" in row:
            row["beside_icepop"] = row["device_ms"] / icepop_ms
    write(arguments.output, {"context": context(METHOD), "tokens": TOKENS, "sequences": SEQUENCES,
                             "difference_of_gradients": difference, "rows": rows})
    print(table(f"loss, gradient and metrics of {TOKENS} tokens in {SEQUENCES} sequences",
                [("name", "", "s"), ("device_ms", "GPU ms", ".3f"), ("wall_ms", "wall ms", ".3f"),
                 ("beside_icepop", "x ours", ".2f")], rows))
    sys.exit(0 if difference < 1e-4 and not any("failure" in row for row in rows) else 1)


if __name__ == "__main__":
    main()
