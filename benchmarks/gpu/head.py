"""The policy head on a GPU: hidden states to loss and gradients, beside what others do.

  head.py LIBRARY [--output FILE] [--quick] [--hidden 4096,1024]

V = 151936, 16384 tokens, bf16, IcePop. docs/performance.md tells the method.
"""

import argparse
import json
import sys

import torch

from common import GIB, Contender, context, load_ops, measure, options_of, table, write
from head_schemes import logprob_schemes, sequence_chunks

VOCABULARY = 151936
ICEPOP = {"preset": "icepop"}
LOW, HIGH = 0.2, 5.0
FLOOR_ROWS = (2048, 4096, 16384)
CHUNK_ROWS = 2048  # for the recomputing baseline
METHOD = ("forward and backward, one process, contenders by turns; medians of the rounds after 2 "
          "warm-ups, CUDA events; floor: the three products, in chunks, outputs allocated before, "
          "random data; memory: the allocator's peak beyond inputs and gradients; errors: 1024 "
          "rows against float64, norm of the difference over norm")
# Design targets.
TARGETS = [("over floor, all tokens", "ours", "over_floor", {4096: 1.05, 1024: 1.15}),
           ("over the full floor, 40 % trainable", "ours, 40 % trainable", "over_floor",
            {4096: 0.45, 1024: 0.45}),
           ("over floor, gspo", "ours, gspo", "over_floor", {4096: 1.4, 1024: 1.4}),
           ("over floor, geo_mask", "ours, geo_mask", "over_floor", {4096: 1.4, 1024: 1.4}),
           ("GiB beyond gradients", "ours", "extra_gib", {4096: 1.0, 1024: 1.0}),
           ("error of d_hidden", "ours", "d_hidden_error", {4096: 3e-3, 1024: 3e-3}),
           ("error of d_weight", "ours", "d_weight_error", {4096: 3e-3, 1024: 3e-3})]


class Problem:
    """Hidden states, weight and streams of n tokens; targets are sampled from the model."""

    def __init__(self, tokens, hidden_size, seed=1):
        torch.manual_seed(seed)
        self.tokens, self.hidden_size = tokens, hidden_size
        bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
        self.hidden = torch.randn(tokens, hidden_size, **bf16)
        self.weight = torch.randn(VOCABULARY, hidden_size, **bf16) * (2.0 / hidden_size**0.5)
        self.targets = torch.empty(tokens, dtype=torch.int64, device="cuda")
        for begin in range(0, tokens, 2048):
            logits = (self.hidden[begin:begin + 2048] @ self.weight.t()).float()
            logits -= torch.empty_like(logits).exponential_().log_()  # Gumbel noise
            self.targets[begin:begin + 2048] = logits.argmax(-1)
        del logits
        self.cu_seqlens = torch.arange(0, tokens + 1, tokens // 16, device="cuda")
        self.mask = torch.ones(tokens, dtype=torch.bool, device="cuda")
        self.rows = None
        self.advantages = torch.randn(tokens, device="cuda")
        self.hidden.requires_grad_()
        self.weight.requires_grad_()
        with torch.no_grad():
            logprobs = self.token_logprobs()
        self.rollout = logprobs + 0.05 * torch.randn(tokens, device="cuda")
        self.prox = logprobs + 0.02 * torch.randn(tokens, device="cuda")

    def part(self, tokens):
        """The first tokens alone, on leaves of their own."""
        other = object.__new__(Problem)
        other.__dict__.update(self.__dict__)
        other.tokens = tokens
        for name in ("hidden", "targets", "mask", "advantages", "rollout", "prox"):
            setattr(other, name, getattr(self, name).detach()[:tokens])
        other.cu_seqlens = torch.arange(0, tokens + 1, tokens // 16, device="cuda")
        other.hidden = other.hidden.clone().requires_grad_()
        other.weight = self.weight.detach().requires_grad_()
        return other

    def train(self, share):
        """The same tokens, of which a share is trained and listed."""
        other = object.__new__(Problem)
        other.__dict__.update(self.__dict__)
        other.mask = torch.rand(self.tokens, device="cuda") < share
        other.rows = other.mask.nonzero().squeeze(1)
        return other

    def clear(self):
        self.hidden.grad = self.weight.grad = None

    def token_logprobs(self, **options):
        return torch.ops.leeway.token_logprobs(self.hidden, self.weight, self.targets, self.rows,
                                               None, **options)[0]

    def ours(self, spec=ICEPOP, **options):
        prox = self.prox if spec["preset"] not in ("icepop", "geo_mask") else None
        out = torch.ops.leeway.policy_head(
            self.hidden, self.weight, self.targets, self.rows, self.cu_seqlens, self.mask,
            self.advantages, self.rollout, prox, None, None, None, None, None, json.dumps(spec),
            float(self.tokens), **options)
        out[0].backward()
        return out[1]

    def loss_of(self, logprobs):
        return icepop(logprobs, self.advantages, self.rollout, self.mask) / self.tokens


def icepop(logprobs, advantages, rollout, mask):
    """As trainers write it; the sum over tokens."""
    ratio = torch.exp(logprobs - rollout)
    keep = (ratio >= LOW) & (ratio <= HIGH) & mask
    return -torch.where(keep, advantages * ratio, 0.0).sum()


# ------------------------------------------------------------------------------------------------
# Baselines. Unlike ours, none of them computes entropies or metrics.


def materialised_logprobs(hidden, weight, targets):
    logits = hidden @ weight.t()
    return torch.log_softmax(logits.float(), -1).gather(1, targets[:, None]).squeeze(1)


class RecomputingHead(torch.autograd.Function):
    """Log-probabilities chunk by chunk; backward computes each chunk's logits again. Four products
    over every token, and memory for one chunk."""

    @staticmethod
    def forward(context, hidden, weight, targets):
        logprobs, normalisers = [], []
        for h, t in zip(hidden.split(CHUNK_ROWS), targets.split(CHUNK_ROWS)):
            logits = (h @ weight.t()).float()
            normaliser = torch.logsumexp(logits, -1)
            logprobs.append(logits.gather(1, t[:, None]).squeeze(1) - normaliser)
            normalisers.append(normaliser)
        context.save_for_backward(hidden, weight, targets, torch.cat(normalisers))
        return torch.cat(logprobs)

    @staticmethod
    def backward(context, g):
        hidden, weight, targets, normalisers = context.saved_tensors
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for begin in range(0, len(g), CHUNK_ROWS):
            part = slice(begin, begin + CHUNK_ROWS)
            gradient = (hidden[part] @ weight.t()).float()
            gradient.sub_(normalisers[part, None]).exp_().mul_(-g[part, None])
            gradient.scatter_add_(1, targets[part, None], g[part, None])
            gradient = gradient.to(hidden.dtype)
            torch.mm(gradient, weight, out=d_hidden[part])
            d_weight.addmm_(gradient.t(), hidden[part])
        return d_hidden, d_weight, None


class Floor:
    """The three products and nothing else. Its logits are a constant, as large as ours."""

    def __init__(self, problem, rows):
        self.hidden, self.weight = problem.hidden.detach(), problem.weight.detach()
        self.rows = rows
        self.d_hidden, self.d_weight = torch.empty_like(self.hidden), torch.zeros_like(self.weight)

    def run(self):
        logits = torch.empty(self.rows, VOCABULARY, dtype=torch.bfloat16, device="cuda")
        for begin in range(0, len(self.hidden), self.rows):
            h = self.hidden[begin:begin + self.rows]
            z = logits[:len(h)]
            torch.mm(h, self.weight.t(), out=z)
            torch.mm(z, self.weight, out=self.d_hidden[begin:begin + self.rows])
            self.d_weight.addmm_(z.t(), h, beta=0.5, alpha=1e-3)  # stays finite over many rounds


def one_product(problem, rows=4096):
    logits = torch.empty(rows, VOCABULARY, dtype=torch.bfloat16, device="cuda")
    for h in problem.hidden.detach().split(rows):
        torch.mm(h, problem.weight.detach().t(), out=logits[:len(h)])


def backward_of(problem, logprobs_of):
    def run():
        problem.loss_of(logprobs_of(problem.hidden, problem.weight, problem.targets)).backward()
    return run


def backward_of_sequences(problem):
    """Liger's scheme, which has the loss inside."""
    bounds = problem.cu_seqlens.tolist()
    sequences = [slice(begin, end) for begin, end in zip(bounds, bounds[1:])]
    gradients = sequence_chunks(problem.hidden.detach(), problem.weight.detach(), sequences,
                                lambda *streams: icepop(*streams) / problem.tokens)

    def run():
        _, problem.hidden.grad, problem.weight.grad = gradients(
            problem.targets, problem.advantages, problem.rollout, problem.mask)
    return run


# ------------------------------------------------------------------------------------------------


def contenders_of(problem, compiled, sweep):
    """(name, group, run, reset). Options that the library lacks are left out."""
    clear = problem.clear
    list_ = [(f"floor, {rows} rows", "floor", Floor(problem, rows).run, None)
             for rows in FLOOR_ROWS]
    list_ += [("logits materialised", "others", backward_of(problem, materialised_logprobs), clear),
              ("the same, torch.compile", "others", compiled(problem), clear),
              ("chunked, logits recomputed", "others",
               backward_of(problem, RecomputingHead.apply), clear)]
    list_ += [(name, "others", backward_of(problem, scheme), clear)
              for name, scheme in logprob_schemes().items()]
    list_ += [("Liger's fused GRPO, re-implemented, torch.compile", "others",
               backward_of_sequences(problem), clear),
              ("ours", "ours", problem.ours, clear)]
    some = problem.train(0.4)
    list_.append(("ours, 40 % trainable", "ours", some.ours, clear))
    variants = {"float32 logits": {"float32_logits": True}, "invariant": {"invariant": True},
                "float32 dW": {"float32_weight_gradient": True}}
    if sweep:
        variants.update({f"workspace {mib} MiB": {"chunk_bytes": mib << 20}
                         for mib in (160, 320, 640, 1280)})
    for name, options in variants.items():
        if options_of("policy_head", **options) is not None:
            list_.append((f"ours, {name}", "ours",
                          lambda options=options: problem.ours(**options), clear))
    for preset in ("gspo", "geo_mask"):
        list_.append((f"ours, {preset}", "ours",
                      lambda preset=preset: problem.ours({"preset": preset}), clear))

    @torch.no_grad()
    def logprobs():
        problem.token_logprobs()

    list_ += [("one product", "forward", lambda: one_product(problem), None),
              ("ours, logprobs and entropy, no_grad", "forward", logprobs, None)]
    return list_


def errors_of(problem, rows=1024):
    """Beside float64, of the first rows: {contender: {what: error}}."""
    part = problem.part(rows)
    h = part.hidden.detach().double().requires_grad_()
    w = part.weight.detach().double().requires_grad_()
    exact = torch.log_softmax(h @ w.t(), -1).gather(1, part.targets[:, None]).squeeze(1)
    part.loss_of(exact).backward()
    relative = lambda a, b: float((a.double() - b).norm() / b.norm())
    found = {}
    runs = {"logits materialised": lambda: _plain(part, materialised_logprobs),
            "chunked, logits recomputed": lambda: _plain(part, RecomputingHead.apply),
            **{name: lambda scheme=scheme: _plain(part, scheme)
               for name, scheme in logprob_schemes().items()},
            "ours": part.ours}
    for name in ("float32_logits", "invariant"):
        if options_of("policy_head", **{name: True}) is not None:
            runs["ours, " + name.replace("_", " ")] = lambda name=name: part.ours(**{name: True})
    for name, run in runs.items():
        try:
            part.clear()
            logprobs = run()
            found[name] = {
                "d_hidden_error": relative(part.hidden.grad, h.grad),
                "d_weight_error": relative(part.weight.grad, w.grad),
                "logprob_error": float((logprobs.double() - exact.detach()).abs().mean()),
                "logprob_error_max": float((logprobs.double() - exact.detach()).abs().max())}
        except Exception as error:
            print(f"  errors of {name}: {error}", flush=True)
    return found


def _plain(part, logprobs_of):
    logprobs = logprobs_of(part.hidden, part.weight, part.targets)
    part.loss_of(logprobs).backward()
    return logprobs.detach()


def measure_size(hidden_size, tokens, rounds, with_compile):
    """Rows of the table for one hidden size, the fastest floor among them."""
    problem = Problem(tokens, hidden_size)
    gradient_bytes = 2 * (problem.hidden.numel() + problem.weight.numel())

    def compiled(of):
        whole = torch.compile(
            lambda h, w, t: of.loss_of(materialised_logprobs(h, w, t)), dynamic=False)
        return lambda: whole(of.hidden, of.weight, of.targets).backward()

    listed = [c for c in contenders_of(problem, compiled, sweep=True)
              if with_compile or "torch.compile" not in c[0]]
    contenders = [Contender(name, run, reset) for name, _, run, reset in listed]
    measure(contenders, rounds)
    errors = errors_of(problem)
    floor = min(c.median() for (_, group, _, _), c in zip(listed, contenders) if group == "floor")
    product = next(c.median() for c in contenders if c.name == "one product")
    rows = []
    for (name, group, _, reset), c in zip(listed, contenders):
        row = {"hidden_size": hidden_size, "name": name, "group": group, "failure": c.failure}
        if not c.failure:
            extra = c.peak_bytes - (gradient_bytes if reset else 0)
            row.update(milliseconds=c.median(), spread=c.spread(), extra_gib=extra / GIB,
                       over_floor=c.median() / (product if group == "forward" else floor))
        row.update(errors.get(name, {}))
        rows.append(row)
    return rows


def targets_of(rows):
    found = []
    for what, name, key, limits in TARGETS:
        for row in rows:
            if row["name"] == name and row["hidden_size"] in limits and key in row:
                limit = limits[row["hidden_size"]]
                found.append({"hidden_size": row["hidden_size"], "what": what, "limit": limit,
                              "measured": row[key], "met": row[key] <= limit})
    return found


COLUMNS = [("name", "", "s"), ("milliseconds", "ms", ".2f"), ("over_floor", "x floor", ".3f"),
           ("extra_gib", "GiB", ".2f"), ("spread", "spread", ".2%"),
           ("d_hidden_error", "err dh", ".1e"), ("d_weight_error", "err dW", ".1e"),
           ("logprob_error", "err logp", ".1e")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("--output", default="gpu_head.json")
    parser.add_argument("--hidden", default="4096,1024")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="without torch.compile, three rounds")
    arguments = parser.parse_args()
    load_ops(arguments.library)
    results = {"context": context(METHOD), "vocabulary": VOCABULARY, "tokens": arguments.tokens,
               "rows": []}
    texts = []
    for hidden_size in map(int, arguments.hidden.split(",")):
        rows = measure_size(hidden_size, arguments.tokens,
                            3 if arguments.quick else arguments.rounds, not arguments.quick)
        results["rows"] += rows
        results["targets"] = targets_of(results["rows"])
        write(arguments.output, results)  # keep partial results in case the next size fails
        texts.append(table(f"head, H={hidden_size}, {arguments.tokens} tokens, V={VOCABULARY}, "
                           f"bf16, IcePop; no_grad rows over one product", COLUMNS, rows))
        torch.cuda.empty_cache()
    for target in results["targets"]:
        texts.append(f"  {'met   ' if target['met'] else 'MISSED'} H={target['hidden_size']} "
                     f"{target['what']}: {target['measured']:.3g}, at most {target['limit']:g}")
    print("\n".join(texts))
    sys.exit(1 if any(row["failure"] for row in results["rows"]) else 0)


if __name__ == "__main__":
    main()
