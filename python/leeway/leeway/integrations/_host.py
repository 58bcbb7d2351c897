"""What the adapters share: specs that a host can compute exactly."""
from __future__ import annotations

import json
import os
from typing import Any, Mapping, Sequence

from .._spec import Spec


def keys_of_environment(variable: str = "LEEWAY_SPEC") -> dict[str, Any]:
    """The keys in LEEWAY_SPEC: a JSON object, or the path of a .json or .toml file with one (in TOML
    also the table [trainer.loss])."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return {}
    if not text.startswith("{"):
        if text.endswith(".toml"):
            import tomllib
            with open(text, "rb") as file:
                keys = tomllib.load(file)
            return dict(keys.get("trainer", {}).get("loss", keys))
        with open(text, encoding="utf-8") as file:
            text = file.read()
    try:
        keys = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{variable}: is not JSON: {error}") from None
    if not isinstance(keys, dict):
        raise ValueError(f"{variable}: must be a JSON object, e.g. {{\"icepop_ratio_high\": 2.0}}")
    return keys


def host_spec(name: str, preset: str, keys: Mapping[str, Any], reduction: str, decides: str,
              lacks: Mapping[str, str], parts: str) -> Spec:
    """The spec with the host's reduction. Refuses, by `name`, keys that the host `decides`, streams that
    it `lacks` (with the remedy), and losses that its `parts` of a batch do not add up to."""
    for key in ("reduction", "fixed_length"):
        if key in keys:
            raise ValueError(f"{name}: {key} = {keys[key]}: {decides}")
    if "/" in preset:
        raise ValueError(f"{name}: preset {preset} has its code base's own reduction; {decides}: use a "
                         "native preset")
    spec = Spec(preset, **keys)
    if spec.described.whole_batch:
        raise ValueError(f"{name}: preset {preset} cannot be exact {parts}: "
                         f"{spec.described.whole_batch}")
    for stream, remedy in lacks.items():
        if stream in spec.reads:
            raise ValueError(f"{name}: preset {preset} reads {stream} log-probabilities, {remedy}")
    return spec.with_keys(reduction=reduction)


def without_nan(metrics: Mapping[str, float], left_out: Sequence[str] = ("version_min", "version_max")
                ) -> dict[str, float]:
    """Metrics with 0 where there was no such token, as hosts that average them expect."""
    return {name: value if value == value else 0.0 for name, value in metrics.items()
            if name not in left_out}
