"""What the checks of the operators share: the operators as plain functions, examples, comparisons
and a runner that goes on after a failure."""

import json
import time
import traceback

import torch

import reference

# The keyword-only options of the head's operators.
OPTIONS = ("chunk_bytes", "invariant", "float32_logits")


def json_of(spec):
    return spec if isinstance(spec, str) else json.dumps(spec)


def has_option(op, name):
    """Whether an operator takes an option. One that it lacks is left out of calls."""
    return any(a.name == name for a in getattr(torch.ops.leeway, op).default._schema.arguments)


def _options_of(op, options):
    return {k: v for k, v in options.items() if has_option(op, k)}


class Example:
    """Made on the CPU from a seed, the same for every device; then moved. Targets are sampled from
    the model, so that probabilities are of every size. Some sequences are empty, of one token, or
    without a trained one."""

    def __init__(self, seed=1, lengths=(9, 1, 17, 0, 4, 6, 1), hidden_size=24, vocabulary=61,
                 dtype=torch.float32, temperature=False, scale=2.0, trained=0.75, noise=0.5):
        generator = torch.Generator().manual_seed(seed)
        randn = lambda *shape: torch.randn(*shape, generator=generator)
        rand = lambda *shape: torch.rand(*shape, generator=generator)
        n = sum(lengths)
        self.tokens, self.device = n, torch.device("cpu")
        self.hidden = randn(n, hidden_size).to(dtype)
        self.weight = (randn(vocabulary, hidden_size) * (scale / hidden_size**0.5)).to(dtype)
        self.cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        self.mask = rand(n) < trained
        if len(lengths) > 5:  # one sequence without a trained token
            self.mask[int(self.cu_seqlens[4]):int(self.cu_seqlens[5])] = False
        self.advantages = torch.where(rand(n) < 0.2, torch.zeros(n), randn(n))
        self.temperature = 0.5 + rand(n) if temperature else None
        log_p = reference.log_softmax_of(self.hidden, self.weight, self.temperature)
        self.targets = torch.multinomial(log_p.exp().float(), 1, generator=generator).squeeze(1)
        pi = log_p.gather(1, self.targets[:, None]).squeeze(1)
        near = lambda spread: torch.minimum((pi + spread * randn(n)).float(),
                                            torch.tensor(-1e-3))
        self.rollout, self.prox = near(noise), near(0.4 * noise)
        self.ref, self.teacher = near(0.6 * noise), near(0.6 * noise)
        self.rows = self.weights = self.versions = None

    def list_rows(self):
        self.rows = self.mask.nonzero().squeeze(1)
        return self

    def weigh(self, seed=5):
        generator = torch.Generator().manual_seed(seed)
        self.weights = torch.rand(self.tokens, generator=generator) + 0.5
        self.weights[torch.rand(self.tokens, generator=generator) < 0.2] = 0.0
        self.versions = torch.randint(3, 9, (self.tokens,), generator=generator,
                                      dtype=torch.int32)
        return self

    def to(self, device):
        """A copy whose hidden states and weight are leaves that want gradients."""
        other = object.__new__(Example)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                value = value.detach().to(device, copy=True)
            other.__dict__[name] = value
        other.device = torch.device(device)
        other.hidden.requires_grad_()
        other.weight.requires_grad_()
        return other

    def batch(self):
        return reference.Batch(self.cu_seqlens, self.mask, self.advantages, self.rollout,
                               self.prox, self.ref, self.teacher, self.weights)

    def streams(self):
        return (self.cu_seqlens, self.mask, self.advantages, self.rollout, self.prox, self.ref,
                self.teacher, self.weights, self.versions)


def token_logprobs(e, **options):
    return torch.ops.leeway.token_logprobs(e.hidden, e.weight, e.targets, e.rows, e.temperature,
                                           **_options_of("token_logprobs", options))


def policy_loss(e, logprobs, spec, denominator=-1.0):
    return torch.ops.leeway.policy_loss(logprobs, *e.streams(), json_of(spec), denominator)


def policy_head(e, spec, denominator=-1.0, **options):
    return torch.ops.leeway.policy_head(e.hidden, e.weight, e.targets, e.rows, *e.streams(),
                                        e.temperature, json_of(spec), denominator,
                                        **_options_of("policy_head", options))


def trained_head(e, spec, denominator=-1.0, **options):
    """policy_head with backward, on leaves of its own: (loss, logprobs, entropy, metrics, d_hidden,
    d_weight)."""
    e = e.to(e.device)
    out = policy_head(e, spec, denominator, **options)
    out[0].backward()
    return tuple(t.detach() for t in out) + (e.hidden.grad, e.weight.grad)


def metrics_of(row, spec):
    text = json_of(spec)
    values = torch.ops.leeway.finalize_metrics([row], text)
    return dict(zip(torch.ops.leeway.metric_names(text), values.tolist()))


# ------------------------------------------------------------------------------------------------
# Comparisons. All of them name what is compared.


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def same_bits(a, b, what):
    check(a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {b.shape}")
    a, b = a.detach().cpu().contiguous(), b.detach().cpu().contiguous()
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differ = int((a.view(whole) != b.view(whole)).sum()) if a.dim() else int(a.item() != b.item())
    check(differ == 0, f"{what}: {differ} of {a.numel()} differ in bits")


def by_norm(got, expected, tolerance, what, floor=1e-6):
    """The norm of the difference beside the norm of what is expected."""
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    check(got.shape == expected.shape, f"{what}: {tuple(got.shape)}, {tuple(expected.shape)}")
    error = float((got - expected).norm())
    scale = float(expected.norm()) + floor * max(1, got.numel()) ** 0.5
    check(error <= tolerance * scale, f"{what}: off by {error / scale:.3g}, allowed {tolerance:g}")


def by_element(got, expected, what, relative=1e-5, of_largest=2e-6, exceptions=0):
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    check(got.shape == expected.shape, f"{what}: {tuple(got.shape)}, {tuple(expected.shape)}")
    if got.numel() == 0:
        return
    allowed = relative * expected.abs() + of_largest * expected.abs().max() + 1e-12
    wrong = ~((got - expected).abs() <= allowed)
    count = int(wrong.sum())
    if count > exceptions:
        at = int(wrong.reshape(-1).nonzero()[0])
        raise AssertionError(f"{what}: {count} of {got.numel()}, first at {at}: "
                             f"{float(got.reshape(-1)[at])}, {float(expected.reshape(-1)[at])}")


def same_metrics(got, expected, what, relative=2e-5):
    for name, value in expected.items():
        mine = got[name]
        if value != value or mine != mine:
            check(value != value and mine != mine, f"{what}: {name}: {mine}, {value}")
            continue
        check(abs(mine - value) <= relative * abs(value) + 2e-6, f"{what}: {name}: {mine}, {value}")


def refused(call, *words):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        text = str(error)
        for word in words:
            check(word in text, f'"{word}" is not in: {text}')
        return
    raise AssertionError("was not refused")


# ------------------------------------------------------------------------------------------------


def run_checks(checks, wanted):
    """Runs functions by name; each returns how many cases it saw. Returns an exit code."""
    failed, cases = [], 0
    for function in checks:
        name = function.__name__
        if wanted and not any(w in name for w in wanted):
            continue
        begin = time.time()
        try:
            count = function()
            cases += count
            print(f"ok      {name}: {count} cases, {time.time() - begin:.1f} s", flush=True)
        except Exception as error:  # the next check may tell more about the same fault
            failed.append(name)
            print(f"FAILED  {name}: {error}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc()
    print(f"{cases} cases, {len(failed)} checks failed{': ' if failed else ''}"
          f"{', '.join(failed)}", flush=True)
    return 1 if failed else 0
