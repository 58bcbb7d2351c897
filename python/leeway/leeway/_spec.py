"""Losses by name and keys, checked by the same catalog as the TOML tables of the program."""
from __future__ import annotations

import functools
import json
import sys
from typing import Any, Mapping, NamedTuple, Union

import torch

from ._library import ops

Key = Union[float, str, bool, None]

_LARGEST = sys.float_info.max

# Rises when a correction is added: what was known of a spec is asked for again.
_generation = 0


def catalog_changed() -> None:
    global _generation
    _generation += 1
    _described.cache_clear()


class Described(NamedTuple):
    """What the catalog says of a spec."""
    settings: Mapping[str, str]     # every key with its effective value
    inert: tuple[str, ...]          # keys of a foreign preset that have no effect
    warnings: tuple[str, ...]
    reads: tuple[str, ...]          # streams: pi, prox, rollout, ref, teacher
    callers: tuple[str, ...]        # corrections written in Python
    reduction: str
    fixed_length: float
    count_empty: bool
    looks_past_mask: bool
    one_pass: bool                  # the head needs three products, not four
    whole_batch: str                # why parts of a batch do not add up to it; "" if they do
    metrics: tuple[tuple[str, str], ...]  # name, and the stream it needs ("" for none)


def _message(error: BaseException) -> str:
    return str(error).split("\nException raised from")[0].removeprefix("spec_json: ")


@functools.lru_cache(maxsize=512)
def _described(text: str) -> Described:
    try:
        said = json.loads(ops._describe(text))
    except (RuntimeError, ValueError) as error:
        raise ValueError(_message(error)) from None
    return Described(
        settings=said["settings"], inert=tuple(said["inert"]), warnings=tuple(said["warnings"]),
        reads=tuple(said["reads"]), callers=tuple(said["callers"]), reduction=said["reduction"],
        fixed_length=said["fixed_length"], count_empty=said["count_empty"],
        looks_past_mask=said["looks_past_mask"], one_pass=said["one_pass"],
        whole_batch=said["whole_batch"],
        metrics=tuple((metric["name"], metric["needs"]) for metric in said["metrics"]))


def _check_keys(preset: Any, keys: Mapping[str, Any]) -> None:
    if not isinstance(preset, str):
        raise TypeError(f"preset must be text or a leeway.Spec, got {type(preset).__name__}")
    for key, value in keys.items():
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise TypeError(f"{key} must be a number, text or a truth value, "
                            f"got {type(value).__name__}")
        if isinstance(value, (int, float)) and not -_LARGEST <= value <= _LARGEST and value == value \
                and abs(value) != float("inf"):
            raise ValueError(f"{key} = {str(value)[:20]}..: is too large")


class Spec:
    """A loss: a preset or BASE+CORRECTION[+CORRECTION], and its keys.

    >>> leeway.Spec("icepop", icepop_ratio_high=2.0)
    >>> leeway.Spec("grpo+tis", tis_cap=2.0, anchor="prox")

    An unknown, foreign, contradictory or inert key raises ValueError with the program's message.
    Specs are values: equal ones compare equal, and they may be used as keys of a dict.
    """
    json: str             # as the operators take it
    preset: str
    given: tuple[tuple[str, Key], ...]  # the keys, in the order of their names
    described: Described

    def __init__(self, preset: str = "icepop", **keys: Key) -> None:
        _check_keys(preset, keys)
        text = json.dumps({"preset": preset, **keys})
        object.__setattr__(self, "json", text)
        object.__setattr__(self, "preset", preset)
        object.__setattr__(self, "given", tuple(sorted(keys.items())))
        object.__setattr__(self, "described", _described(text))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a Spec does not change; make another one")

    def __reduce__(self):
        return _from_parts, (self.preset, dict(self.given))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Spec) and self.json == other.json

    def __hash__(self) -> int:
        return hash(self.json)

    def __repr__(self) -> str:
        keys = "".join(f", {key}={value!r}" for key, value in self.given)
        return f"leeway.Spec({self.preset!r}{keys})"

    @property
    def keys(self) -> dict[str, Key]:
        """The keys that were given."""
        return dict(self.given)

    @property
    def settings(self) -> dict[str, str]:
        """Every key with its effective value, as text."""
        return dict(self.described.settings)

    @property
    def reads(self) -> tuple[str, ...]:
        """The streams of log-probabilities that this loss reads."""
        return self.described.reads

    @property
    def inert(self) -> tuple[str, ...]:
        """Keys of a foreign preset that have no effect; native presets refuse such keys."""
        return self.described.inert

    def explain(self) -> str:
        """The objective in symbols, what is dropped, where gradient flows, the denominator."""
        return ops._explain(self.json)

    def with_keys(self, **keys: Key) -> "Spec":
        """The same loss with other values of these keys."""
        return Spec(self.preset, **{**self.keys, **keys})


def _from_parts(preset: str, keys: dict[str, Key]) -> Spec:
    return Spec(preset, **keys)


@functools.lru_cache(maxsize=512)
def _cached_spec(preset: str, keys: tuple[tuple[str, Key], ...], generation: int) -> Spec:
    return Spec(preset, **dict(keys))


@torch.compiler.assume_constant_result
def _spec_from_parts(preset: str, keys: tuple[tuple[str, Key], ...]) -> Spec:
    return _cached_spec(preset, keys, _generation)


def as_spec(preset: "str | Spec", keys: Mapping[str, Key]) -> Spec:
    """A spec from what a function was given: a name with keys, or a spec without."""
    if isinstance(preset, Spec):
        if keys:
            raise TypeError(f"{', '.join(keys)}: keys come with a preset's name; a Spec has its own "
                            "(use spec.with_keys)")
        return preset
    _check_keys(preset, keys)
    return _spec_from_parts(preset, tuple(sorted(keys.items())))


class Preset(NamedTuple):
    """A name that `preset` takes."""
    name: str
    kind: str       # "preset", "correction" (used as BASE+name) or "foreign" (another code base's)
    summary: str
    origin: str
    keys: dict[str, str]  # keys with their defaults, without those that every preset has


def presets() -> list[Preset]:
    """Every preset and correction, own ones included."""
    return [Preset(**entry) for entry in json.loads(ops._catalog())]


def explain(preset: "str | Spec" = "icepop", **keys: Key) -> str:
    """What a loss really computes, as `leeway loss explain` prints it."""
    return as_spec(preset, keys).explain()
