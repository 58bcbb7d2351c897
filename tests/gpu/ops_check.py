"""The operators on a device against float64 in plain torch, against the operators of the CPU and
against themselves.

  ops_check.py LIBRARY [--device cuda] [WORD ..]     the checks whose name holds a WORD, or all

The head is here, losses are in ops_loss_check.py and the rest of the contract in
ops_contract_check.py. Everything but memory and synchronisation is checked on `--device cpu` too.
"""

import argparse
import sys

import torch

import ops_contract_check
import ops_loss_check
import reference
from support import (Example, OPTIONS, by_element, by_norm, check, has_option, metrics_of,
                     policy_head, policy_loss, run_checks, same_bits, same_metrics, token_logprobs,
                     trained_head)

DEVICE = "cuda"
ICEPOP = {"preset": "icepop"}
# float32: products sum in another order. bf16: logits and their gradient are rounded to 8 bits.
GRADIENT_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2}


def on_cuda():
    return torch.device(DEVICE).type == "cuda"


# ------------------------------------------------------------------------------------------------
# The head


def expected_gradients(e, g, g_entropy=None):
    """Through the exact softmax, from given gradients of log-probabilities."""
    h = e.hidden.detach().cpu().double().requires_grad_()
    w = e.weight.detach().cpu().double().requires_grad_()
    used = torch.ones(e.tokens, dtype=torch.bool) if e.rows is None else torch.zeros(
        e.tokens, dtype=torch.bool).index_fill(0, e.rows.cpu(), True)
    used = used & ((g.cpu() != 0) if g_entropy is None else torch.ones_like(used))
    log_p = reference.log_softmax_of(
        h[used], w, None if e.temperature is None else e.temperature.cpu()[used])
    lp, entropy = reference.logprobs_and_entropy(log_p, e.targets.cpu()[used])
    total = (lp * g.cpu().double()[used]).sum()
    if g_entropy is not None:
        total = total + (entropy * g_entropy.cpu().double()[used]).sum()
    total.backward()
    return h.grad, w.grad


def head_case(e, spec, what, denominator=-1.0, **options):
    d = e.to(DEVICE)
    out = trained_head(d, spec, denominator, **options)
    loss, logprobs, entropy, metrics, d_hidden, d_weight = out
    tolerance = GRADIENT_TOLERANCE[e.hidden.dtype]
    check(d_hidden.dtype == e.hidden.dtype and d_weight.dtype == e.weight.dtype, f"{what}: dtypes")
    # The loss and its gradient at the operator's own log-probabilities: roundings of logits must
    # not move a token over a bound.
    pi = logprobs.cpu().double().requires_grad_()
    expected = reference.loss_of(spec, pi, e.batch(), None if denominator < 0 else denominator)
    expected.backward()
    size = float(pi.grad.abs().sum()) + abs(float(expected)) + 1e-9
    check(abs(float(loss) - float(expected)) <= 2e-5 * size, f"{what}: loss {loss} {expected}")
    of_hidden, of_weight = expected_gradients(e, pi.grad)
    by_norm(d_hidden, of_hidden, tolerance, f"{what}: d_hidden")
    by_norm(d_weight, of_weight, tolerance, f"{what}: d_weight")
    untouched = pi.grad == 0
    check(bool((d_hidden.cpu()[untouched] == 0).all()), f"{what}: a row with g = 0 has a gradient")
    return out


def heads_of_native_presets():
    cases = 0
    for spec in reference.SPECS:
        for variant in range(4):
            dtype = torch.bfloat16 if variant & 1 else torch.float32
            e = Example(variant + 1, dtype=dtype, temperature=bool(variant & 2),
                        lengths=(19, 1, 37, 0, 14, 26, 1))
            if variant in (1, 2):
                e.list_rows()
            if variant == 3:
                e.weigh()
            what = f"{spec} variant {variant}"
            denominator = 40.0 if variant == 2 else -1.0
            out = head_case(e, spec, what, denominator)
            # The same by the two operators it is made of. Rounded logits depend on the product's
            # shape, and with them decisions at bounds, unless they are asked not to.
            options = {"invariant": dtype == torch.bfloat16}
            if options["invariant"]:
                out = trained_head(e.to(DEVICE), spec, denominator, **options)
            d = e.to(DEVICE)
            logprobs, entropy = token_logprobs(d, **options)
            staged = policy_loss(d, logprobs, spec, denominator)
            staged[0].backward()
            by_element(out[1], logprobs, f"{what}: logprobs of two stages", of_largest=1e-6)
            by_element(out[2], entropy, f"{what}: entropy of two stages", of_largest=1e-6)
            tolerance = GRADIENT_TOLERANCE[dtype]
            by_norm(out[4], d.hidden.grad, tolerance, f"{what}: d_hidden of two stages")
            by_norm(out[5], d.weight.grad, tolerance, f"{what}: d_weight of two stages")
            same_metrics(metrics_of(out[3], spec), metrics_of(staged[2], spec), what)
            cases += 1
    return cases


def heads_beside_the_cpu():
    cases = 0
    for spec in reference.SPECS:
        e = Example(3, lengths=(33, 1, 20, 0, 10, 31, 1)).list_rows()
        mine, cpu = trained_head(e.to(DEVICE), spec), trained_head(e.to("cpu"), spec)
        for name, a, b in zip(("loss", "logprobs", "entropy"), mine, cpu):
            by_element(a, b, f"{spec} {name}", 1e-4, 1e-5)
        by_norm(mine[4], cpu[4], 1e-4, f"{spec} d_hidden")
        by_norm(mine[5], cpu[5], 1e-4, f"{spec} d_weight")
        cases += 1
    return cases


def vocabularies():
    """Every remainder of a vector's width, and sizes around a block of threads; log-probabilities,
    entropies and the way back from gradients of both."""
    cases = 0
    sizes = [*range(1, 41), 63, 64, 65, 127, 129, 255, 257, 1023, 1025, 2047, 2049, 8193, 50257,
             151936]
    for vocabulary in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            large = vocabulary > 10000
            e = Example(vocabulary, lengths=(13, 1, 8), vocabulary=vocabulary, dtype=dtype,
                        hidden_size=64 if large else 8 + vocabulary % 9, temperature=True)
            d = e.to(DEVICE)
            what = f"V={vocabulary} {dtype}"
            logprobs, entropy = token_logprobs(d)
            g = torch.cos(torch.arange(e.tokens).float())
            g_entropy = 0.3 * torch.sin(torch.arange(e.tokens).float())
            ((logprobs * g.to(DEVICE)).sum() + (entropy * g_entropy.to(DEVICE)).sum()).backward()
            log_p = reference.log_softmax_of(e.hidden, e.weight, e.temperature)
            lp, h = reference.logprobs_and_entropy(log_p, e.targets)
            exact = dtype == torch.float32
            by_element(logprobs, lp, f"{what} logprobs", *((2e-5, 1e-5) if exact else (0, 2e-2)))
            by_element(entropy, h, f"{what} entropy", *((5e-5, 2e-5) if exact else (0, 2e-2)))
            of_hidden, of_weight = expected_gradients(e, g, g_entropy)
            tolerance, floor = (5e-5, 1e-3) if exact else (3e-2, 1e-1)
            by_norm(d.hidden.grad, of_hidden, tolerance, f"{what} d_hidden", floor)
            by_norm(d.weight.grad, of_weight, tolerance, f"{what} d_weight", floor / 10)
            cases += 1
            if vocabulary in (7, 8, 40, 151936):
                head_case(e, ICEPOP, f"{what} head")
                cases += 1
    return cases


def head_backward_of_any_gradient():
    for dtype in (torch.float32, torch.bfloat16):
        e = Example(2, dtype=dtype).list_rows()
        d = e.to(DEVICE)
        g = torch.zeros(e.tokens).index_fill(0, e.rows[::2], 1.5)
        with torch.no_grad():
            d_hidden, d_weight = torch.ops.leeway.head_backward(
                d.hidden, d.weight, d.targets, g.to(DEVICE), d.rows, d.temperature)
        of_hidden, of_weight = expected_gradients(e, g)
        by_norm(d_hidden, of_hidden, GRADIENT_TOLERANCE[dtype], "d_hidden")
        by_norm(d_weight, of_weight, GRADIENT_TOLERANCE[dtype], "d_weight")
        check(bool((d_hidden.cpu()[g == 0] == 0).all()), "rows with g = 0")
    return 2


def strides():
    """Operands that are views: rows apart, and a transposed weight."""
    e = Example(4)
    plain = trained_head(e.to(DEVICE), ICEPOP)
    d = e.to(DEVICE)
    wide = torch.full((e.tokens, e.hidden.shape[1] + 3), float("nan"), device=DEVICE)
    wide[:, :-3] = d.hidden.detach()
    hidden = wide[:, :-3].requires_grad_()
    weight = d.weight.detach().t().contiguous().t().requires_grad_()
    d.hidden, d.weight = hidden, weight
    loss = policy_head(d, ICEPOP)[0]
    loss.backward()
    by_norm(hidden.grad, plain[4], 1e-5, "d_hidden")
    by_norm(weight.grad, plain[5], 1e-5, "d_weight")
    return 1


# ------------------------------------------------------------------------------------------------
# Tokens that take no part


def nothing_trained():
    cases = 0
    for spec in ({"preset": p} for p in reference.NATIVE):
        for dtype in (torch.float32, torch.bfloat16):
            for listed in (False, True):
                e = Example(5, dtype=dtype)
                e.mask[:] = False
                if listed:
                    e.list_rows()
                out = trained_head(e.to(DEVICE), spec)
                check(float(out[0]) == 0.0, f"{spec}: loss {out[0]}")
                check(not out[4].any() and not out[5].any(), f"{spec}: a gradient is not zero")
                cases += 1
    return cases


def one_token_each():
    cases = 0
    for spec in reference.SPECS:
        e = Example(6, lengths=(1,) * 33)
        head_case(e, spec, f"{spec}")
        cases += 1
    return cases


def nan_where_nothing_is_trained():
    """Hidden states and streams of masked tokens may hold anything."""
    cases = 0
    for spec in ({"preset": p} for p in (*reference.NATIVE, "ppo+tis", "reinforce+off_policy_is")):
        for dtype in (torch.float32, torch.bfloat16):
            for listed in (False, True):
                clean = Example(8, dtype=dtype)
                dirty = clean.to("cpu")
                clean.hidden[~clean.mask] = 0
                with torch.no_grad():
                    dirty.hidden[~dirty.mask] = float("nan")
                for name in ("advantages", "rollout", "prox", "ref", "teacher"):
                    getattr(dirty, name)[~dirty.mask] = float("nan")
                if listed:
                    clean.list_rows()
                    dirty.list_rows()
                a = trained_head(clean.to(DEVICE), spec)
                b = trained_head(dirty.to(DEVICE), spec)
                what = f"{spec} {dtype} listed {listed}"
                same_bits(a[0], b[0], f"{what} loss")
                rows = clean.mask.nonzero().squeeze(1).to(DEVICE)
                same_bits(a[1][rows], b[1][rows], f"{what} logprobs")
                same_bits(a[4], b[4], f"{what} d_hidden")
                same_bits(a[5], b[5], f"{what} d_weight")
                same_metrics(metrics_of(b[3], spec), metrics_of(a[3], spec), what)
                cases += 1
    return cases


def zero_gradients_are_exact():
    """Zero advantages and dropped tokens: not small, zero."""
    e = Example(9, noise=2.0)
    spec = {"preset": "icepop", "icepop_ratio_low": 0.9, "icepop_ratio_high": 1.1}
    for dtype in (torch.float32, torch.bfloat16):
        e.hidden, e.weight = e.hidden.to(dtype), e.weight.to(dtype)
        out = trained_head(e.to(DEVICE), spec)
        ratio = (out[1].cpu() - e.rollout).double().exp()
        dead = ~e.mask | (e.advantages == 0) | (ratio < 0.89) | (ratio > 1.11)
        check(int((dead & e.mask).sum()) > 3, "the example has dropped tokens")
        check(not out[4].cpu()[dead].any(), "d_hidden of a dropped token")
        e.advantages = torch.zeros_like(e.advantages)
        out = trained_head(e.to(DEVICE), spec)
        check(not out[4].any() and not out[5].any(), "all advantages are zero")
        e = Example(9, noise=2.0)
    return 4


def rows_that_are_listed():
    """Listing changes what is computed, not the result; tokens not listed have zeros."""
    cases = 0
    for dtype in (torch.float32, torch.bfloat16):
        e = Example(10, dtype=dtype)
        every = trained_head(e.to(DEVICE), ICEPOP, invariant=True)
        e.rows = torch.arange(e.tokens)
        listed = trained_head(e.to(DEVICE), ICEPOP, invariant=True)
        for index in (1, 4, 5):
            same_bits(listed[index], every[index], f"output {index} with all tokens listed")
        e.list_rows()
        some = trained_head(e.to(DEVICE), ICEPOP, invariant=True)
        rows = e.rows.to(DEVICE)
        if has_option("policy_head", "invariant"):
            same_bits(every[1][rows], some[1][rows], "logprobs")
        by_norm(some[4], every[4], 1e-5 if dtype == torch.float32 else 1e-2, "d_hidden")
        by_norm(some[5], every[5], 1e-5 if dtype == torch.float32 else 1e-2, "d_weight")
        others = ~e.mask
        for index in (1, 2, 4):
            check(not some[index].cpu()[others].any(), f"output {index} of a token not listed")
        cases += 1
    return cases


# ------------------------------------------------------------------------------------------------
# The same again


def twice_the_same_bits():
    cases = 0
    names = ("loss", "logprobs", "entropy", "metrics", "d_hidden", "d_weight")
    sizes = ((61, 24), (50257, 128)) if on_cuda() else ((61, 24),)
    for vocabulary, hidden in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            e = Example(11, lengths=(90, 1, 60, 103), vocabulary=vocabulary, hidden_size=hidden,
                        dtype=dtype).to(DEVICE)
            for spec in ({"preset": p} for p in (*reference.NATIVE, "ppo+tis")):
                first = trained_head(e, spec)
                for _ in range(2):
                    for name, a, b in zip(names, first, trained_head(e, spec)):
                        same_bits(a.nan_to_num(), b.nan_to_num(), f"{spec} {name}")
                cases += 1
    return cases


def invariant_logprobs():
    """A row's log-probability has the same bits whatever is computed beside it."""
    if not has_option("token_logprobs", "invariant"):
        check(not on_cuda(), "token_logprobs has no option `invariant`")
        return 0
    cases = 0
    sizes = ((61, 24), (50257, 256), (151936, 1024)) if on_cuda() else ((61, 24), (301, 40))
    for vocabulary, hidden in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            e = Example(12, lengths=(200, 57), vocabulary=vocabulary, hidden_size=hidden,
                        dtype=dtype, temperature=True).to(DEVICE)
            for extra in ({}, {"float32_logits": True}):
                with torch.no_grad():
                    whole, entropy = token_logprobs(e, invariant=True, **extra)
                    for chunk_bytes in (1, 3 * 4 * vocabulary, 100 * 4 * vocabulary, 1 << 31):
                        again = token_logprobs(e, invariant=True, chunk_bytes=chunk_bytes, **extra)
                        same_bits(whole, again[0], f"V={vocabulary} chunk {chunk_bytes}")
                        same_bits(entropy, again[1], f"V={vocabulary} chunk {chunk_bytes} entropy")
                        cases += 1
                    for begin, end in ((0, 1), (3, 5), (10, 27), (64, 128), (100, 257)):
                        part = e.to(DEVICE)
                        for name in ("hidden", "targets", "temperature"):
                            setattr(part, name, getattr(e, name).detach()[begin:end])
                        same_bits(whole[begin:end],
                                  token_logprobs(part, invariant=True, **extra)[0],
                                  f"V={vocabulary} rows {begin} to {end}")
                        cases += 1
    return cases


def the_same_bits_by_every_operator():
    """A log-probability recorded before an update equals the one the update computes, so that an
    unchanged policy has ratios of exactly 1."""
    cases = 0
    sizes = ((61, 24), (50257, 256)) if on_cuda() else ((61, 24),)
    for vocabulary, hidden in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            e = Example(16, lengths=(200, 57), vocabulary=vocabulary, hidden_size=hidden,
                        dtype=dtype, temperature=True).to(DEVICE)
            for options in ({}, {"float32_logits": True}, {"invariant": True}):
                with torch.no_grad():
                    whole = token_logprobs(e, **options)[0]
                    same_bits(whole, policy_head(e, ICEPOP, **options)[1],
                              f"V={vocabulary} {dtype} {options}: no_grad")
                for spec in (ICEPOP, {"preset": "gspo"}):
                    same_bits(whole, trained_head(e, spec, **options)[1],
                              f"V={vocabulary} {dtype} {options}: {spec} with gradients")
                    cases += 1
    return cases


def chunks():
    """The workspace changes memory, not the result: sizes of one row, some and all."""
    if not has_option("policy_head", "chunk_bytes"):
        check(not on_cuda(), "policy_head has no option `chunk_bytes`")
        return 0
    cases = 0
    for spec in (ICEPOP, {"preset": "gspo"}, {"preset": "icepop", "denominator": "kept"}):
        for dtype in (torch.float32, torch.bfloat16):
            e = Example(13, lengths=(90, 1, 60, 103), vocabulary=1003, dtype=dtype).list_rows()
            for chunk_bytes in (1, 5 * 4 * 1003, 64 * 4 * 1003, 1 << 30):
                for float32_logits in (False, True):
                    head_case(e, spec, f"{spec} {dtype} chunk {chunk_bytes}",
                              chunk_bytes=chunk_bytes, float32_logits=float32_logits)
                    cases += 1
    return cases


def float32_logits_are_closer():
    if not has_option("policy_head", "float32_logits"):
        check(not on_cuda(), "policy_head has no option `float32_logits`")
        return 0
    e = Example(14, vocabulary=5003, hidden_size=128, dtype=torch.bfloat16, scale=3.0)
    log_p = reference.log_softmax_of(e.hidden, e.weight)
    lp, entropy = reference.logprobs_and_entropy(log_p, e.targets)
    out = trained_head(e.to(DEVICE), ICEPOP, float32_logits=True)
    by_element(out[1], lp, "logprobs", 2e-5, 1e-5)
    by_element(out[2], entropy, "entropy", 2e-5, 1e-5)
    return 1


def options_are_there():
    for op in ("policy_head", "token_logprobs"):
        for name in OPTIONS:
            check(has_option(op, name) or not on_cuda(), f"{op} has no option {name}")
    return len(OPTIONS)


CHECKS = [options_are_there, heads_of_native_presets, heads_beside_the_cpu, vocabularies,
          head_backward_of_any_gradient, strides, nothing_trained, one_token_each,
          nan_where_nothing_is_trained, zero_gradients_are_exact, rows_that_are_listed,
          twice_the_same_bits, invariant_logprobs, the_same_bits_by_every_operator, chunks,
          float32_logits_are_closer]


def main():
    global DEVICE
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    torch.ops.load_library(arguments.library)
    DEVICE = arguments.device
    torch.backends.cuda.matmul.allow_tf32 = False
    checks = ops_loss_check.checks(DEVICE) + CHECKS + ops_contract_check.checks(DEVICE)
    sys.exit(run_checks(checks, arguments.words))


if __name__ == "__main__":
    main()
