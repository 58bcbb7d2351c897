"""Corrections written in Python, by name: computed between log-probabilities and loss."""
from __future__ import annotations

import contextlib
import inspect
import json
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from . import _spec
from ._batch import Batch, text_of
from ._library import ops

STREAMS = ("pi", "prox", "rollout", "ref", "teacher")

# Corrections inside presets of other code bases; the operators know corrections by their names.
_TAKEN = ("mis", "rejection_sampling", "rollout_is", "vanilla_tis", "vespo", "vllm_is_ratio")


@dataclass(frozen=True)
class Tokens:
    """A packed batch as a correction sees it: N tokens in S sequences, float32, without gradient.

    Streams that the batch lacks are None. Masked positions may hold anything: look at `mask` before
    using a value.
    """
    pi: Tensor                   # [N], the policy's current log-probabilities
    prox: Optional[Tensor]
    rollout: Optional[Tensor]
    ref: Optional[Tensor]
    teacher: Optional[Tensor]
    advantages: Tensor           # [N]
    mask: Tensor                 # bool [N], trained tokens
    versions: Optional[Tensor]   # int64 [N]
    cu_seqlens: Tensor           # int64 [S + 1]
    rollout_ids: Optional[Tensor]  # int64 [S]

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, int64 [S]."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @property
    def sequence(self) -> Tensor:
        """The sequence of each token, int64 [N]."""
        places = torch.arange(self.pi.shape[0], device=self.pi.device)
        # Over all offsets: compiled for a GPU, a search over a slice reads from its storage's begin.
        return torch.searchsorted(self.cu_seqlens, places, right=True) - 1

    def sequence_sum(self, values: Tensor) -> Tensor:
        """The sum of `values` [N] over the trained tokens of each token's sequence, [N]."""
        place = self.sequence
        sums = values.new_zeros(self.cu_seqlens.shape[0] - 1)
        sums = sums.index_add(0, place, torch.where(self.mask, values, torch.zeros_like(values)))
        return sums[place]

    def sequence_mean(self, values: Tensor) -> Tensor:
        """The mean of `values` [N] over the trained tokens of each token's sequence, [N]."""
        return self.sequence_sum(values) / self.sequence_sum(torch.ones_like(values)).clamp(min=1.0)


class Effect(NamedTuple):
    """What a correction returns. Weights multiply the policy term alone. Where `mask` is False a token
    loses its policy term and its penalties; denominators stay."""
    weights: Optional[Tensor] = None  # float32 [N]
    mask: Optional[Tensor] = None     # bool [N]
    metrics: Mapping[str, Any] = {}   # named numbers, shown as CORRECTION/NAME


@dataclass(frozen=True)
class _Known:
    function: Callable[..., Any]
    keys: Mapping[str, Any]
    reads: tuple[str, ...]
    summary: str
    formula: str
    ranges: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


_known: dict[str, _Known] = {}


def _announce(corrections: Mapping[str, _Known]) -> None:
    listed = []
    for name, known in corrections.items():
        keys = []
        for key, default in known.keys.items():
            low, high = known.ranges.get(key, (None, None))
            keys.append({"name": key, "meaning": "", "low": low, "high": high,
                         "default": list(default) if isinstance(default, tuple) else default})
        listed.append({"name": name, "formula": known.formula, "summary": known.summary,
                       "reads": list(known.reads), "keys": keys})
    try:
        ops._set_corrections(json.dumps(listed))
    except (RuntimeError, ValueError) as error:
        raise ValueError(_spec._message(error)) from None


@contextlib.contextmanager
def only_known(names: Sequence[str]) -> Iterator[None]:
    """While it lasts the operators know none but these own corrections, in this order."""
    _announce({name: _known[name] for name in names})
    try:
        yield
    finally:
        _announce(_known)


def _check_defaults(name: str, keys: Mapping[Any, Any], ranges: Mapping[Any, Any]) -> None:
    for key, default in keys.items():
        words = isinstance(default, tuple) and len(default) > 0 and \
            all(isinstance(word, str) for word in default)
        number = isinstance(default, (int, float)) and not isinstance(default, bool) and \
            math.isfinite(default)
        if not isinstance(key, str) or not (words or number or default == "off"):
            raise ValueError(f"correction {name}: key {key!r} = {default!r}: a default is a finite number, "
                             '"off" or a tuple of words')
    for key, bounds in ranges.items():
        if key not in keys:
            raise ValueError(f"correction {name}: a range of {key!r}, which is no key of it")
        if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
            raise ValueError(f"correction {name}: the range of {key} must be (lowest, highest), with None "
                             f"for none, got {bounds!r}")
        low, high = (-math.inf if bounds[0] is None else bounds[0],
                     math.inf if bounds[1] is None else bounds[1])
        default = keys[key]
        if not low <= high or (isinstance(default, (int, float)) and not low <= default <= high):
            raise ValueError(f"correction {name}: {key} = {default!r} is not in its range {bounds!r}")


def correction(name: str, keys: Mapping[str, Any] | None = None, *,
               reads: Sequence[str] = ("rollout",), formula: str = "",
               ranges: Mapping[str, tuple[Any, Any]] | None = None):
    """Registers a function as the correction `name`, usable as `BASE+name` in this process.

    >>> @leeway.correction("rare", keys={"rare_floor": 0.01})
    ... def rare(tokens, rare_floor):
    ...     return leeway.Effect(mask=tokens.rollout >= math.log(rare_floor))
    >>> leeway.policy_loss(..., preset="icepop+rare", rare_floor=0.05)

    `keys` have defaults: a number; "off", for a number or "off"; or a tuple of words, the first being
    the default. They are checked as those of built-in corrections are, with `ranges` (lowest, highest;
    None for none) for numbers. `reads` are the streams of log-probabilities it needs besides the
    current ones; a batch without them is refused.

    The function gets a `leeway.Tokens` and its keys by name, and returns a `leeway.Effect`, or weights
    alone. It runs without gradient, between log-probabilities and loss, on the batch's device.
    Registering a name again replaces it.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"correction {name!r}: a name is letters, digits and underscores")
    if name in _TAKEN:
        raise ValueError(f"correction {name}: a preset of another code base has it under this name; "
                         "choose another one")
    if isinstance(reads, str) or not isinstance(reads, Sequence):
        raise TypeError(f"correction {name}: reads must be a list of streams, e.g. (\"rollout\",), got "
                        f"{reads!r}")
    for stream in reads:
        if stream not in STREAMS:
            raise ValueError(f"correction {name}: there is no stream {stream!r}; there are "
                             f"{', '.join(STREAMS)}")
    if not isinstance(keys or {}, Mapping) or not isinstance(ranges or {}, Mapping):
        raise TypeError(f"correction {name}: keys and ranges are dicts")
    own = dict(keys or {})
    _check_defaults(name, own, dict(ranges or {}))

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(function):
            raise TypeError(f"correction {name}: must be a function, got {type(function).__name__}")
        summary = (inspect.getdoc(function) or "a function of this process").splitlines()[0]
        entry = _Known(function, own, tuple(reads), summary,
                       formula or f"{name}({', '.join(('pi', *reads))})", dict(ranges or {}))
        changed = {**_known, name: entry}
        _announce(changed)
        _known.update(changed)
        _spec.catalog_changed()
        return function

    return register


def _key_values(spec: "_spec.Spec", known: _Known) -> dict[str, Any]:
    values = {key: default[0] if isinstance(default, tuple) else default
              for key, default in known.keys.items()}
    for key, value in spec.given:
        if key in values and value is not None:
            values[key] = value
    return values


def _checked(name: str, value: Any, what: str, tokens: Tokens) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"correction {name}: its {what} must be a tensor, got {type(value).__name__}")
    if value.shape != tokens.pi.shape or value.device != tokens.pi.device:
        raise ValueError(f"correction {name}: its {what} must be [{tokens.pi.shape[0]}] on "
                         f"{tokens.pi.device}, one for each token, got {text_of(value)} on "
                         f"{value.device}")
    if value.is_complex():
        raise ValueError(f"correction {name}: its {what} must be real, got {text_of(value)}")
    return value


def show_what_is_not_finite(weights: Optional[Tensor], mask: Optional[Tensor], tokens: Tokens,
                            reads: Sequence[str]) -> tuple[Tensor, Optional[Tensor]]:
    """Weights of NaN, kept by the mask, where a trained token has a weight, or a number that corrections
    read, that is not finite: a bound or a mask of theirs would hide it. Waits for nothing."""
    weights = torch.ones_like(tokens.pi) if weights is None else weights
    total = weights
    for stream in reads:
        total = total + getattr(tokens, stream)
    bad = tokens.mask & ~torch.isfinite(total)
    return torch.where(bad, torch.nan, weights), None if mask is None else mask | bad


def apply_corrections(spec: "_spec.Spec", logprobs: Tensor, batch: Batch
                      ) -> tuple[Optional[Tensor], Optional[Tensor], dict[str, Any]]:
    """Weights, mask and metrics of the spec's own corrections, joined; all None without one."""
    names = spec.described.callers
    if not names:
        return None, None, {}
    tokens = Tokens(pi=logprobs.detach(), prox=batch.prox, rollout=batch.rollout, ref=batch.ref,
                    teacher=batch.teacher, advantages=batch.advantages, mask=batch.mask,
                    versions=batch.versions, cu_seqlens=batch.cu_seqlens,
                    rollout_ids=batch.rollout_ids)
    weights: Optional[Tensor] = None
    mask: Optional[Tensor] = None
    metrics: dict[str, Any] = {}
    for name in names:
        known = _known[name]
        given = [getattr(tokens, field) for field in ("pi", "prox", "rollout", "ref", "teacher",
                                                      "advantages", "mask")]
        before = [] if torch.compiler.is_compiling() else \
            [value._version for value in given if value is not None]
        with torch.no_grad():
            out = known.function(tokens, **_key_values(spec, known))
        if before and before != [value._version for value in given if value is not None]:
            raise ValueError(f"correction {name}: it changes its tensors in place, and they are the "
                             "caller's: compute new ones")
        effect = Effect(weights=out) if isinstance(out, Tensor) else out
        if not isinstance(effect, tuple) or len(effect) > 3:
            raise TypeError(f"correction {name}: must return weights or a leeway.Effect, "
                            f"got {type(out).__name__}")
        effect = Effect(*effect)
        if effect.weights is not None:
            own = _checked(name, effect.weights, "weights", tokens).detach().to(torch.float32)
            own = torch.where(tokens.mask, own, torch.ones_like(own))
            if not torch.compiler.is_compiling() and own.device.type == "cpu" and \
                    not bool(torch.isfinite(own).all()):
                place = int((~torch.isfinite(own)).nonzero()[0])
                raise ValueError(f"correction {name}: the weight of token {place} is "
                                 f"{float(own[place])}: must be finite")
            weights = own if weights is None else weights * own
        if effect.mask is not None:
            keep = _checked(name, effect.mask, "mask", tokens)
            keep = keep if keep.dtype == torch.bool else keep != 0
            mask = keep if mask is None else mask & keep
        if not isinstance(effect.metrics, Mapping):
            raise TypeError(f"correction {name}: its metrics must be a dict of numbers, got "
                            f"{type(effect.metrics).__name__}")
        for metric, value in effect.metrics.items():
            single = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))
            if not single:
                raise ValueError(f"correction {name}: its metric {metric} must be one number, got "
                                 f"{text_of(value) if isinstance(value, Tensor) else value!r}")
            metrics[f"{name}/{metric}"] = value.detach() if isinstance(value, Tensor) else value
    if weights is None and mask is None:
        weights = torch.ones_like(tokens.pi)
    if logprobs.device.type != "cpu":  # where the operator looks at values itself
        reads = {stream for name in names for stream in _known[name].reads}
        weights, mask = show_what_is_not_finite(weights, mask, tokens, sorted(reads))
    return weights, mask, metrics
