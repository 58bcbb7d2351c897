"""What a trainer that keeps its loop gets on a GPU: the pair token_logprobs + policy_loss beside the
schemes of its own, and a step of a decoder with the head in its place.

  LEEWAY_OPS=build-gpu/libleeway_ops.so PYTHONPATH=python/leeway hosts.py [--output FILE] [--hidden 4096]

V = 151936, 16384 tokens, bf16, IcePop. docs/performance.md tells the method.
"""

import argparse
import sys

import torch

import leeway
from common import GIB, Contender, context, measure, table, write
from head import VOCABULARY, Floor, Problem, RecomputingHead, backward_of, materialised_logprobs
from leeway.integrations._output_head import head_as, output_head

METHOD = ("forward and backward, one process, contenders by turns, each right after an untimed run of "
          "the three products, so that the clock is the same for all; medians of the rounds after 2 "
          "warm-ups, CUDA events; floor: the three products alone; memory: the allocator's peak beyond "
          "inputs, the contenders' gradients included")
VOCABULARY_CHUNK, CHUNK_ROWS = 8192, 2048


class VocabularyChunkedHead(torch.autograd.Function):
    """Log-probabilities and entropies in chunks of rows and of vocabulary, with an online softmax;
    backward computes the logits again. Four products in many small parts."""

    @staticmethod
    def forward(context, hidden, weight, targets):
        rows = hidden.shape[0]
        logprobs, normaliser = (torch.empty(rows, device=hidden.device) for _ in range(2))
        for begin in range(0, rows, CHUNK_ROWS):
            part = slice(begin, begin + CHUNK_ROWS)
            h, t = hidden[part], targets[part]
            largest = torch.full((len(h),), -torch.inf, device=h.device)
            total, weighted, target = (torch.zeros(len(h), device=h.device) for _ in range(3))
            for first in range(0, weight.shape[0], VOCABULARY_CHUNK):
                logits = (h @ weight[first:first + VOCABULARY_CHUNK].t()).float()
                higher = torch.maximum(largest, logits.amax(-1))
                shrink, powers = torch.exp(largest - higher), torch.exp(logits - higher[:, None])
                total = total * shrink + powers.sum(-1)
                weighted = weighted * shrink + (powers * logits).sum(-1)
                largest = higher
                place = t - first
                inside = (place >= 0) & (place < logits.shape[1])
                found = logits.gather(1, place.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
                target = torch.where(inside, found, target)
            normaliser[part] = largest + total.log()
            logprobs[part] = target - normaliser[part]
        context.save_for_backward(hidden, weight, targets, normaliser)
        return logprobs

    @staticmethod
    def backward(context, g):
        hidden, weight, targets, normaliser = context.saved_tensors
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for begin in range(0, len(g), CHUNK_ROWS):
            part = slice(begin, begin + CHUNK_ROWS)
            for first in range(0, weight.shape[0], VOCABULARY_CHUNK):
                w = weight[first:first + VOCABULARY_CHUNK]
                gradient = torch.exp((hidden[part] @ w.t()).float() - normaliser[part, None])
                gradient *= -g[part, None]
                place = targets[part] - first
                inside = (place >= 0) & (place < len(w))
                gradient.scatter_add_(1, place.clamp(0, len(w) - 1)[:, None],
                                      (g[part] * inside)[:, None])
                gradient = gradient.to(hidden.dtype)
                d_hidden[part].addmm_(gradient, w)
                d_weight[first:first + VOCABULARY_CHUNK].addmm_(gradient.t(), hidden[part])
        return d_hidden, d_weight, None


def streams_of(problem):
    return dict(rollout=problem.rollout, advantages=problem.advantages, mask=problem.mask,
                cu_seqlens=problem.cu_seqlens, denominator=float(problem.tokens))


def pair(problem, preset="icepop"):
    def run():
        logprobs, _ = leeway.token_logprobs(problem.hidden, problem.weight, problem.targets)
        loss, _ = leeway.policy_loss(logprobs, preset=preset, **streams_of(problem))
        loss.backward()
    return run


def one_pass(problem):
    def run():
        leeway.policy_head(problem.hidden, problem.weight, problem.targets,
                           **streams_of(problem)).loss.backward()
    return run


def heads(hidden_size, rounds):
    problem = Problem(16384, hidden_size)
    leeway.correction("clipped")(lambda tokens: torch.exp(tokens.pi - tokens.rollout).clamp(max=5.0))
    products = Floor(problem, 4096).run

    def reset():
        problem.clear()
        products()

    floor = Contender("floor: three products", products, reset)
    contenders = [
        floor,
        Contender("leeway.policy_head", one_pass(problem), reset),
        Contender("leeway.token_logprobs + policy_loss", pair(problem), reset),
        Contender("the same, with a correction in Python", pair(problem, "reinforce+clipped"),
                  reset),
        Contender("logits materialised", backward_of(problem, materialised_logprobs), reset),
        Contender("recomputed in chunks of rows", backward_of(problem, RecomputingHead.apply),
                  reset),
        Contender("recomputed in chunks of rows and vocabulary",
                  backward_of(problem, VocabularyChunkedHead.apply), reset)]
    measure(contenders, rounds)
    rows = [{"name": c.name, "hidden": hidden_size, "ms": c.median(), "spread": c.spread(),
             "over_floor": c.median() / floor.median(), "extra_gib": c.peak_bytes / GIB,
             "failure": c.failure} for c in contenders]
    return rows


def step(rounds, sequences=16, prompt=128, completion=896):
    """A GRPO step of a random decoder of 0.6 B parameters: forward, loss, backward."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=3072,
                         num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
                         head_dim=128, tie_word_embeddings=True)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable()
    model.train()
    ids = torch.randint(VOCABULARY, (sequences, prompt + completion), device="cuda")
    targets = ids[:, prompt:]
    advantages = torch.randn(sequences, device="cuda")
    mask = torch.ones(sequences, completion, dtype=torch.bool, device="cuda")
    rollout = torch.full((sequences, completion), -12.0, device="cuda")
    head = output_head(model)

    def clear():
        model.zero_grad(set_to_none=True)

    def ours():
        out = {}

        def compute(hidden, weight):
            out["loss"] = leeway.policy_head(hidden[:, :-1], weight, targets, rollout=rollout,
                                             advantages=advantages, mask=mask).loss
            return out["loss"].reshape(1, 1, 1)

        with head_as(head, compute):
            model(input_ids=ids, logits_to_keep=completion + 1, use_cache=False)
        out["loss"].backward()

    def materialised():
        logits = model(input_ids=ids, logits_to_keep=completion + 1, use_cache=False).logits[:, :-1]
        logprobs = torch.stack([torch.log_softmax(row.float(), -1).gather(1, taken[:, None]).squeeze(1)
                                for row, taken in zip(logits, targets)])
        ratio = torch.exp(logprobs - rollout)
        keep = (ratio >= 0.2) & (ratio <= 5.0) & mask
        loss = -torch.where(keep, ratio * advantages[:, None], 0.0).sum() / mask.sum()
        loss.backward()

    def trunk():
        with head_as(head, lambda hidden, weight: hidden):
            hidden = model(input_ids=ids, logits_to_keep=completion + 1, use_cache=False).logits
        hidden.float().sum().backward()

    contenders = [Contender("step: leeway.policy_head", ours, clear),
                  Contender("step: logits materialised", materialised, clear),
                  Contender("step: the layers alone", trunk, clear)]
    measure(contenders, rounds)
    return [{"name": c.name, "tokens": sequences * completion, "ms": c.median(), "spread": c.spread(),
             "peak_gib": c.peak_bytes / GIB, "failure": c.failure} for c in contenders]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    parser.add_argument("--hidden", default="4096,1024")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    results = [context(METHOD)]
    for hidden_size in args.hidden.split(","):
        rows = heads(int(hidden_size), args.rounds)
        results += rows
        print(table(f"hidden size {hidden_size}",
                    [("name", "", ""), ("ms", "ms", ".1f"), ("over_floor", "over floor", ".2f"),
                     ("extra_gib", "GiB", ".2f")], rows), flush=True)
        torch.cuda.empty_cache()
    rows = step(args.rounds)
    results += rows
    print(table("a step of a 0.6 B decoder",
                [("name", "", ""), ("ms", "ms", ".1f"), ("peak_gib", "GiB", ".2f")], rows), flush=True)
    if args.output:
        write(args.output, results)
    sys.exit(1 if any(row.get("failure") for row in results) else 0)


if __name__ == "__main__":
    main()
