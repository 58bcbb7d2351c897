"""The native presets in plain torch, in float64 and by autograd: what the operators are held to.

Independent of the library: every formula is written out here from docs/losses.md. Values and
bounds are rounded to float32 before they are compared, as docs/numerics.md says.
"""

import torch

# key: default, for the keys that formulas below read
_DEFAULTS = {
    "icepop_ratio_low": 0.2, "icepop_ratio_high": 5.0, "icepop_rollout_min_ratio": "off",
    "ipo_ratio_low": 0.2, "ipo_ratio_high": 5.0, "kl_tau": 1e-3,
    "dppo_diff_low": 0.2, "dppo_diff_high": 0.2, "log_clamp": "off",
    "eps_low": 0.2, "eps_high": 0.2, "dual_clip": "off", "ref_kl": 0.0,
    "log_cap": 10.0, "gradient": "straight_through",
    "ratio_low": 0.0, "ratio_high": 5.0, "dro_beta": 0.05, "tau_pos": 1.0, "tau_neg": 1.05,
    "kpop_threshold": 0.1, "geo_ratio_low": 0.99, "geo_ratio_high": 1.01, "seq_ratio_high": 3.0,
    "m2_threshold": 0.04, "tis_cap": 5.0, "tis_level": "token",
    "tis_ratio_low": 0.5, "tis_ratio_high": 2.0, "ois_ratio_low": 0.0, "ois_ratio_high": 2.0,
    "adv_tau": 1.0, "teacher_tau": 0.0, "reduction": "token_mean", "fixed_length": "off",
    "denominator": "original",
}
_PRESET_DEFAULTS = {"dapo": {"eps_high": 0.28}, "cispo_mask": {"eps_high": 0.28}}
_ANCHORED_TO_ROLLOUT = ("cispo",)

NATIVE = ("icepop", "ipo_kl", "dppo_tv", "dppo_kl", "reinforce", "is", "ppo", "grpo", "dapo",
          "gspo", "cispo", "cispo_mask", "dro", "sapo", "kpop", "geo_mask", "seq_mis", "m2po")

# Every native preset, every correction, and each key that changes a formula.
SPECS = [{"preset": p} for p in NATIVE] + [
    {"preset": "icepop", "icepop_ratio_low": 0.5, "icepop_ratio_high": 2.0},
    {"preset": "icepop", "icepop_rollout_min_ratio": 0.4},
    {"preset": "icepop", "adv_tau": 0.5, "teacher_tau": 0.3},
    {"preset": "is", "log_clamp": 0.5},
    {"preset": "ppo", "dual_clip": 1.5},
    {"preset": "ppo", "anchor": "rollout"},
    {"preset": "grpo", "ref_kl": 0.1},
    {"preset": "gspo", "gradient": "through_mean"},
    {"preset": "gspo", "log_cap": 0.05},
    {"preset": "gspo", "anchor": "rollout"},
    {"preset": "cispo", "eps_low": 0.3, "eps_high": 0.3},
    {"preset": "cispo", "anchor": "prox"},
    {"preset": "dro", "anchor": "rollout"},
    {"preset": "sapo", "anchor": "rollout"},
    {"preset": "geo_mask", "geo_ratio_low": 0.8, "geo_ratio_high": 1.2},
    {"preset": "ppo+tis"}, {"preset": "ppo+icepop_tis"}, {"preset": "ppo+off_policy_is"},
    {"preset": "reinforce+off_policy_is"}, {"preset": "gspo+tis"}, {"preset": "m2po+tis"},
    {"preset": "grpo+tis", "tis_level": "geometric"},
    {"preset": "grpo+tis", "tis_level": "sequence", "tis_cap": 2.0},
    {"preset": "icepop", "denominator": "kept"}, {"preset": "geo_mask", "denominator": "kept"},
    {"preset": "m2po", "denominator": "kept"}, {"preset": "ppo+icepop_tis", "denominator": "kept"},
] + [
    {"preset": p, "reduction": r, **({"fixed_length": 50} if r == "fixed_length" else {})}
    for p in ("icepop", "gspo")
    for r in ("seq_mean_token_mean", "seq_mean_token_sum", "fixed_length", "sum")
] + [{"preset": "icepop", "reduction": "seq_mean_token_mean", "denominator": "kept"}]


def above(value, bound):
    return value.detach().float() > torch.tensor(float(bound), dtype=torch.float32)


def below(value, bound):
    return value.detach().float() < torch.tensor(float(bound), dtype=torch.float32)


def limit(value, low, high):
    """As clamp: exact where it limits, the gradient passes where it does not."""
    value = torch.where(above(value, high), torch.full_like(value, high), value)
    return torch.where(below(value, low), torch.full_like(value, low), value)


def k3(x):
    return torch.expm1(x) - x


def binary_kl(a, b):
    """KL over {taken token, any other} from log-probabilities below 0."""
    def rest(x):
        return torch.where(x > -0.6931471805599453, torch.log(-torch.expm1(x)),
                           torch.log1p(-torch.exp(x)))
    return a.exp() * (a - b) - torch.expm1(a) * (rest(a) - rest(b))


class Batch:
    """Streams as float64 with 0 where a token is not trained, whatever stands there."""

    def __init__(self, cu_seqlens, mask, advantages, rollout, prox=None, ref=None, teacher=None,
                 weights=None):
        cu = cu_seqlens.long().cpu()
        self.mask = mask.bool().cpu()
        self.weights = None
        if weights is not None:
            self.mask = self.mask & (weights.cpu() != 0)
            self.weights = self._clean(weights)
        self.sequences = len(cu) - 1
        self.sequence = torch.repeat_interleave(torch.arange(self.sequences), cu[1:] - cu[:-1])
        self.advantages = self._clean(advantages)
        self.rollout = self._clean(rollout)
        self.prox, self.ref, self.teacher = (
            None if t is None else self._clean(t) for t in (prox, ref, teacher))

    def _clean(self, t):
        return torch.where(self.mask, t.detach().cpu().double(),
                           torch.zeros((), dtype=torch.float64))

    def sums(self, values, which=None):
        """Per sequence, over `which` tokens (the trained ones)."""
        which = self.mask if which is None else which
        values = torch.where(which, values, torch.zeros((), dtype=torch.float64))
        return torch.zeros(self.sequences, dtype=torch.float64).index_add(0, self.sequence, values)

    def counts(self, which=None):
        which = self.mask if which is None else which
        return self.sums(torch.ones(len(which), dtype=torch.float64), which)

    def mean(self, values):
        """Each token's sequence mean."""
        return (self.sums(values) / self.counts().clamp_min(1))[self.sequence]


def loss_of(spec, pi, batch, denominator=None):
    """The loss of log-probabilities `pi` (float64 [N] on the CPU), differentiable in them."""
    base, *corrections = spec["preset"].split("+")
    settings = {**_DEFAULTS, **_PRESET_DEFAULTS.get(base, {}), **spec}
    get = settings.__getitem__
    on = lambda key: get(key) != "off"
    zero = torch.zeros((), dtype=torch.float64)
    pi = torch.where(batch.mask, pi, zero)
    raw = batch.advantages
    A = get("adv_tau") * raw
    if get("teacher_tau"):
        A = A + get("teacher_tau") * (batch.teacher - pi.detach())
    anchor = settings.get("anchor", "rollout" if base in _ANCHORED_TO_ROLLOUT else "prox")
    anchored = batch.rollout if anchor == "rollout" else batch.prox
    by_rollout = pi - batch.rollout
    nobody = torch.zeros(len(pi), dtype=torch.bool)
    dropped, penalty_dropped, penalty = nobody, nobody, torch.zeros_like(pi)

    def outside(value, low, high):
        return above(value, high) | below(value, low)

    def clipped(r):
        loss = torch.maximum(-A * r, -A * limit(r, 1 - get("eps_low"), 1 + get("eps_high")))
        if on("dual_clip"):
            loss = torch.where(A < 0, torch.minimum(loss, -A * get("dual_clip")), loss)
        return loss

    if base in ("icepop", "ipo_kl"):
        name = base[:3] if base == "ipo_kl" else base
        r = by_rollout.exp()
        policy = -A * r
        dropped = outside(r, get(name + "_ratio_low"), get(name + "_ratio_high"))
        if base == "ipo_kl":
            penalty = torch.where(dropped, zero, get("kl_tau") * by_rollout.square())
        elif on("icepop_rollout_min_ratio"):
            least = torch.full((batch.sequences,), float("inf"), dtype=torch.float64)
            x = torch.where(batch.mask, by_rollout.detach(), torch.full_like(pi, float("inf")))
            least = least.scatter_reduce(0, batch.sequence, x, "amin")
            dropped = dropped | below(least.exp()[batch.sequence], get("icepop_rollout_min_ratio"))
    elif base in ("dppo_tv", "dppo_kl"):
        policy = -A * by_rollout.exp()
        moved = pi.exp() - batch.rollout.exp()
        high, low = above(moved, get("dppo_diff_high")), below(moved, -get("dppo_diff_low"))
        if base == "dppo_tv":
            dropped = high | low
        else:
            dropped = (high & (raw > 0)) | (low & (raw <= 0))
            penalty = get("kl_tau") * by_rollout.square()
    elif base == "reinforce":
        policy = -A * pi
    elif base == "is":
        x = by_rollout
        if on("log_clamp"):
            x = x.clamp(-get("log_clamp"), get("log_clamp"))
        policy = -A * x.exp()
    elif base in ("ppo", "grpo", "dapo", "m2po"):
        policy = clipped((pi - anchored).exp())
        if get("ref_kl"):
            penalty = get("ref_kl") * k3(batch.ref - pi)
        if base == "m2po":
            dropped = penalty_dropped = batch.mask & ~_m2po_keeps(batch, get("m2_threshold"))
    elif base == "gspo":
        x = pi - anchored
        mean = batch.mean(x)
        if get("gradient") == "straight_through":
            mean = mean.detach() + x - x.detach()
        policy = clipped(mean.clamp(max=get("log_cap")).exp())
    elif base == "cispo":
        low, high = get("ratio_low"), get("ratio_high")
        if "eps_low" in spec:
            low, high = 1 - get("eps_low"), 1 + get("eps_high")
        policy = -A * limit((pi - anchored).exp(), low, high).detach() * pi
    elif base == "cispo_mask":
        r = (pi - batch.prox).exp()
        policy = -A * r
        dropped = (above(r, 1 + get("eps_high")) & (raw > 0)) | (
            below(r, 1 - get("eps_low")) & (raw < 0))
    elif base == "dro":
        policy = -A * pi
        penalty = 0.5 * get("dro_beta") * (pi - anchored).square()
    elif base == "sapo":
        tau = torch.where(raw > 0, torch.tensor(get("tau_pos"), dtype=torch.float64),
                          torch.tensor(get("tau_neg"), dtype=torch.float64))
        policy = -A * (4 / tau) * torch.sigmoid(tau * ((pi - anchored).exp() - 1))
    elif base == "kpop":
        policy = -A * by_rollout.exp()
        kl = torch.maximum(binary_kl(pi.detach(), batch.rollout),
                           binary_kl(batch.rollout, pi.detach()))
        dropped = above(kl, get("kpop_threshold"))
    elif base == "geo_mask":
        policy = -A * by_rollout.exp()
        dropped = outside(batch.mean(by_rollout).exp(), get("geo_ratio_low"), get("geo_ratio_high"))
    elif base == "seq_mis":
        policy = -A * by_rollout.exp()
        dropped = above(batch.sums(by_rollout)[batch.sequence].exp(), get("seq_ratio_high"))
    else:
        raise ValueError(base)

    weight = torch.ones_like(pi)
    for correction in corrections:
        if correction == "off_policy_is":
            weight = weight * limit(by_rollout.detach().exp(), get("ois_ratio_low"),
                                    get("ois_ratio_high"))
            continue
        x = batch.prox - batch.rollout
        if correction == "icepop_tis":
            r = x.exp()
            weight = torch.where(outside(r, get("tis_ratio_low"), get("tis_ratio_high")), zero,
                                 weight * r)
            continue
        if get("tis_level") == "geometric":
            x = batch.mean(x)
        elif get("tis_level") == "sequence":
            x = batch.sums(x)[batch.sequence]
        weight = weight * limit(x.exp(), 0.0, get("tis_cap"))

    counted = batch.mask
    if get("denominator") == "kept":
        counted = batch.mask & ~dropped & (weight != 0)
    token_loss = torch.where(dropped, zero, weight * policy) + torch.where(
        penalty_dropped, zero, penalty)
    if batch.weights is not None:
        token_loss = token_loss * batch.weights
    return _reduced(get, batch, token_loss, counted, denominator)


def _m2po_keeps(batch, threshold):
    moments = (batch.rollout - batch.prox).square()
    places = batch.mask.nonzero().squeeze(1)
    order = places[torch.argsort(moments[places])]
    means = moments[order].cumsum(0) / torch.arange(1, len(order) + 1)
    kept = max(1, int((means < threshold).sum()))
    keeps = torch.zeros_like(batch.mask)
    keeps[order[:kept]] = True
    return keeps


def _reduced(get, batch, token_loss, counted, denominator):
    per_sequence = batch.counts(counted)
    sequences = float((per_sequence > 0).sum())
    own = {"token_mean": float(counted.sum()), "seq_mean_token_mean": sequences,
           "seq_mean_token_sum": sequences, "sum": 1.0}
    if get("reduction") == "fixed_length":
        own["fixed_length"] = sequences * get("fixed_length")
    if denominator is None:
        denominator = own[get("reduction")]
    by_sequence = batch.sums(token_loss)
    if get("reduction") == "seq_mean_token_mean":
        by_sequence = by_sequence / per_sequence.clamp_min(1)
    return by_sequence.sum() / max(1.0, denominator)


def log_softmax_of(hidden, weight, temperature=None):
    """[N, V] in float64, differentiable."""
    logits = hidden.double() @ weight.double().t()
    if temperature is not None:
        logits = logits / temperature.to(logits.device).double().reshape(-1, 1)
    return torch.log_softmax(logits, -1)


def logprobs_and_entropy(log_p, targets):
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)
