"""What the operators promise beside numbers: who gets a gradient and when, memory, streams, no
synchronisation, and refusals. Run by ops_check.py."""

import torch

import reference
from support import (Example, by_element, by_norm, check, metrics_of, policy_head, policy_loss,
                     refused, same_bits, same_metrics, token_logprobs, trained_head)

ICEPOP = {"preset": "icepop"}


def checks(device):
    """The checks for a device; those that ask CUDA itself only there."""
    cuda = torch.device(device).type == "cuda"

    def no_grad_makes_no_gradient():
        e = Example(1).to(device)
        with_grad = policy_head(e, ICEPOP)
        check(with_grad[0].requires_grad, "the loss is differentiable")
        check(not any(t.requires_grad for t in with_grad[1:]), "nothing else is")
        with torch.no_grad():
            out = policy_head(e, ICEPOP)
            check(out[0].grad_fn is None and not out[0].requires_grad, "a graph under no_grad")
        for name, a, b in zip(("loss", "logprobs", "entropy"), out, with_grad):
            by_element(a, b, f"{name} without gradients")
        if not cuda:
            return 1
        # A weight whose gradient would be far larger than the workspace that is allowed.
        large = Example(1, lengths=(40,), vocabulary=151936, hidden_size=64,
                        dtype=torch.bfloat16).to(device)
        large.weight = torch.zeros(151936, 1024, dtype=torch.bfloat16, device=device)
        large.hidden = torch.zeros(40, 1024, dtype=torch.bfloat16, device=device)
        large.weight.requires_grad_()
        large.hidden.requires_grad_()
        options = {"chunk_bytes": 8 << 20}
        weight_bytes = large.weight.numel() * 2
        used = {}
        for name, call in {"head": lambda: policy_head(large, ICEPOP, **options),
                           "logprobs": lambda: token_logprobs(large, **options)}.items():
            with torch.no_grad():
                call()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                call()
                used[name] = torch.cuda.max_memory_allocated() - before
        check(all(v < weight_bytes / 4 for v in used.values()),
              f"memory under no_grad: {used}, the weight has {weight_bytes}")
        return 3

    def gradients_that_are_wanted():
        cases = 0
        both = trained_head(Example(2).to(device), ICEPOP)
        for hidden in (False, True):
            e = Example(2).to(device)
            e.hidden.requires_grad_(hidden)
            e.weight.requires_grad_(not hidden)
            policy_head(e, ICEPOP)[0].backward()
            check((e.hidden.grad is not None) == hidden, "d_hidden")
            check((e.weight.grad is not None) != hidden, "d_weight")
            same_bits(e.hidden.grad if hidden else e.weight.grad, both[4 if hidden else 5],
                      "one gradient alone")
            cases += 1
        return cases

    def gradients_scale():
        one = trained_head(Example(3).to(device), ICEPOP)
        for factor in (3.0, 0.0):
            e = Example(3).to(device)
            (policy_head(e, ICEPOP)[0] * factor).backward()
            by_norm(e.hidden.grad, factor * one[4], 1e-6, "d_hidden")
            by_norm(e.weight.grad, factor * one[5], 1e-6, "d_weight")
        return 2

    def second_backward_is_refused():
        e = Example(4).to(device)
        loss = policy_head(e, ICEPOP)[0]
        loss.backward(retain_graph=True)
        first = e.weight.grad.clone()
        refused(lambda: loss.backward(retain_graph=True), "second backward")
        same_bits(first, e.weight.grad, "the gradient after the refusal")
        fresh = policy_head(e, ICEPOP)[0]
        refused(lambda: torch.autograd.grad(fresh, e.weight, create_graph=True),
                "second derivative")
        return 2

    def tied_weight():
        e = Example(5).to(device)
        inputs = e.targets.roll(1)
        w = e.weight.detach().cpu().double().requires_grad_()
        h = torch.tanh(w[inputs.cpu()])
        log_p = reference.log_softmax_of(h, w)
        pi = log_p.gather(1, e.targets.cpu()[:, None]).squeeze(1)
        reference.loss_of(ICEPOP, pi, e.batch()).backward()
        e.hidden = torch.tanh(e.weight[inputs])
        policy_head(e, ICEPOP)[0].backward()
        by_norm(e.weight.grad, w.grad, 2e-5, "the sum of both uses")
        return 1

    def micro_batches_add_up():
        cases = 0
        for spec in ({"preset": "icepop"}, {"preset": "gspo"}, {"preset": "grpo+tis"}):
            lengths = (19, 1, 37, 5)
            whole = Example(6, lengths=lengths).to(device)
            total = float(whole.mask.sum())
            expected = trained_head(whole, spec)
            loss, rows, d_hidden = 0.0, [], []
            d_weight = torch.zeros_like(whole.weight)
            for first, last in ((0, 2), (2, 4)):
                begin, end = int(whole.cu_seqlens[first]), int(whole.cu_seqlens[last])
                part = whole.to(device)
                for name, value in vars(part).items():
                    if isinstance(value, torch.Tensor) and value.shape[:1] == (sum(lengths),):
                        setattr(part, name, value.detach()[begin:end])
                part.cu_seqlens = whole.cu_seqlens[first:last + 1] - begin
                part.tokens = end - begin
                out = trained_head(part, spec, total)
                loss += float(out[0])
                rows.append(out[3])
                d_hidden.append(out[4])
                d_weight += out[5]
            check(abs(loss - float(expected[0])) < 1e-5, f"{spec}: loss")
            by_norm(torch.cat(d_hidden), expected[4], 2e-5, f"{spec}: d_hidden")
            by_norm(d_weight, expected[5], 2e-5, f"{spec}: d_weight")
            text = '{"preset": "%s"}' % spec["preset"]
            values = torch.ops.leeway.finalize_metrics(rows, text).tolist()
            names = torch.ops.leeway.metric_names(text)
            same_metrics(dict(zip(names, values)), metrics_of(expected[3], spec), str(spec))
            cases += 1
        return cases

    def wrong_arguments_are_refused():
        def changed(**changes):
            e = Example(7).to(device)
            for name, value in changes.items():
                setattr(e, name, value(e))
            return lambda: policy_head(e, ICEPOP)

        refused(changed(hidden=lambda e: e.hidden.double()), "float32 or bfloat16")
        refused(changed(weight=lambda e: e.weight.bfloat16()), "dtype")
        refused(changed(weight=lambda e: e.weight[:, 1:]), "hidden size")
        refused(changed(mask=lambda e: e.mask[1:]), "mask")
        refused(changed(advantages=lambda e: e.advantages.double()), "advantages", "float32")
        refused(changed(targets=lambda e: e.targets.int()), "targets", "int64")
        refused(lambda: policy_head(Example(7).to(device), {"preset": "nosuch"}), "nosuch")
        if cuda:
            refused(changed(mask=lambda e: e.mask.cpu()))
            refused(changed(weight=lambda e: e.weight.detach().cpu()))
        return 9 if cuda else 7

    def another_stream():
        expected = trained_head(Example(8, lengths=(300, 212)).to(device), ICEPOP)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            e = Example(8, lengths=(300, 212)).to(device)
            for _ in range(3):
                got = trained_head(e, ICEPOP)
        stream.synchronize()
        for a, b in zip(got, expected):
            same_bits(a.nan_to_num(), b.nan_to_num(), "on another stream")
        return 1

    def nothing_synchronises():
        """torch itself reports waits of the host; the operators have none, with every preset."""
        cases = 0
        for listed in (False, True):
            e = Example(9, dtype=torch.bfloat16, temperature=True)
            e = (e.list_rows() if listed else e).to(device)
            logprobs = token_logprobs(e)[0].detach().requires_grad_()
            for spec in reference.SPECS:
                policy_head(e, spec)[0].backward()  # what is made on first use is made now
                policy_loss(e, logprobs, spec)
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    policy_head(e, spec)[0].backward()
                    policy_loss(e, logprobs, spec)[0].backward()
                    token_logprobs(e)[0].sum().backward()
                    with torch.no_grad():
                        policy_head(e, spec)
                        token_logprobs(e)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                cases += 1
        return cases

    def launches_run_ahead():
        """The host is done long before the device: waits that torch does not see would show."""
        import time
        e = Example(10, lengths=(8,), vocabulary=61).to(device)
        e.weight = torch.randn(151936, 2048, dtype=torch.bfloat16, device=device,
                               requires_grad=True)
        e.hidden = torch.randn(8, 2048, dtype=torch.bfloat16, device=device, requires_grad=True)
        busy = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
        policy_head(e, ICEPOP)[0].backward()
        torch.cuda.synchronize()
        for _ in range(100):
            busy @ busy  # a good 100 ms of work to queue behind
        begin = time.perf_counter()
        policy_head(e, ICEPOP)[0].backward()
        host = time.perf_counter() - begin
        torch.cuda.synchronize()
        whole = time.perf_counter() - begin
        check(host < 0.5 * whole, f"the host waited: {host * 1e3:.1f} of {whole * 1e3:.1f} ms")
        return 1

    def more_logits_than_32_bits():
        """One chunk of more than 2^31 logits; its last rows are as those of a small call."""
        n, vocabulary, hidden = 16384, 151936, 64
        torch.manual_seed(1)
        cases = 0
        for dtype, float32_logits in ((torch.bfloat16, False), (torch.bfloat16, True),
                                      (torch.float32, False)):
            e = Example(11, lengths=(4, 4)).to(device)
            e.tokens = n
            e.hidden = torch.randn(n, hidden, device=device).to(dtype).requires_grad_()
            e.weight = (torch.randn(vocabulary, hidden, device=device) / 8).to(
                dtype).requires_grad_()
            e.targets = torch.randint(vocabulary, (n,), device=device)
            e.cu_seqlens = torch.tensor([0, n // 2, n], device=device)
            e.mask = torch.ones(n, dtype=torch.bool, device=device)
            e.advantages = torch.randn(n, device=device)
            e.ref = e.teacher = e.prox = None
            e.rollout = torch.full((n,), -12.0, device=device)
            spec = {"preset": "reinforce"}
            out = trained_head(e, spec, 100.0, chunk_bytes=1 << 34, float32_logits=float32_logits)
            last = slice(n - 64, n)
            log_p = reference.log_softmax_of(e.hidden.detach()[last], e.weight.detach())
            lp, entropy = reference.logprobs_and_entropy(log_p, e.targets[last])
            tight = dtype == torch.float32 or float32_logits
            # A rounded logit of size 8 is off by up to 0.016.
            by_element(out[1][last], lp, f"{dtype} logprobs", 2e-5 if tight else 2e-3, 2e-6)
            one_hot = torch.nn.functional.one_hot(e.targets[last], vocabulary).double()
            g = -e.advantages[last].double() / 100.0
            expected = (g[:, None] * (one_hot - log_p.exp())) @ e.weight.detach().double()
            by_norm(out[4][last], expected, 2e-5 if dtype == torch.float32 else 1e-2,
                    f"{dtype} d_hidden")
            small = trained_head(e, spec, 100.0, chunk_bytes=1 << 29,
                                 float32_logits=float32_logits)
            # dW in bf16 is rounded after every chunk.
            by_norm(out[5], small[5], 1e-4 if dtype == torch.float32 else 1e-2,
                    f"{dtype} d_weight of one chunk and of many")
            del out, small, log_p, one_hot
            torch.cuda.empty_cache()
            cases += 1
        return cases

    def memory_is_given_back():
        e = Example(12, dtype=torch.bfloat16).to(device)
        trained_head(e, ICEPOP)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for spec in reference.SPECS:
            trained_head(e, spec)
        torch.cuda.synchronize()
        grown = torch.cuda.memory_allocated() - before
        check(grown == 0, f"{grown} bytes stay allocated")
        return len(reference.SPECS)

    on_every_device = [no_grad_makes_no_gradient, gradients_that_are_wanted, gradients_scale,
                       second_backward_is_refused, tied_weight, micro_batches_add_up,
                       wrong_arguments_are_refused]
    on_cuda = [another_stream, nothing_synchronises, launches_run_ahead, more_logits_than_32_bits,
               memory_is_given_back]
    return on_every_device + (on_cuda if cuda else [])
