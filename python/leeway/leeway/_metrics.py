"""Metrics of a loss: a dict that is filled when it is first looked at, and joins exactly."""
from __future__ import annotations

from typing import Any, Iterable, Iterator, Sequence

import torch

from ._library import ops
from ._spec import Spec


class Metrics(dict):
    """Metric names to floats.

    On CUDA the numbers are fetched from the device when one of them is first looked at, so that a
    step does not wait for metrics nobody reads. `join_metrics` joins micro-batches and ranks from
    the sums behind the numbers: never averages of averages.
    """

    def __init__(self, spec: Spec, row: torch.Tensor, missing: Sequence[str],
                 own: dict[str, Any] | None = None) -> None:
        self._spec = spec
        self._rows = [row.detach()]
        self._missing = frozenset(missing)  # streams that the batch lacks
        self._own = own or {}               # of corrections written in Python
        names = [name for name, needs in spec.described.metrics if needs not in self._missing]
        super().__init__(dict.fromkeys([*names, *self._own]))
        self._ready = False

    def _fill(self) -> None:
        if self._ready:
            return
        self._ready = True
        values = ops.finalize_metrics(self._rows, self._spec.json).tolist()
        for (name, _), value in zip(self._spec.described.metrics, values):
            if dict.__contains__(self, name):
                dict.__setitem__(self, name, value)
        for name, value in self._own.items():
            dict.__setitem__(self, name, float(value))

    @property
    def row(self) -> torch.Tensor:
        """The sums, float64 on the loss's device: what ranks exchange to join their metrics."""
        return self._rows[0]

    def __getitem__(self, name: str) -> float:
        self._fill()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._fill()
        return super().get(name, default)

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def items(self):
        self._fill()
        return super().items()

    def values(self):
        self._fill()
        return super().values()

    def copy(self) -> dict[str, float]:
        return dict(self.items())

    def __eq__(self, other: object) -> bool:
        return self.copy() == other

    def __reduce__(self):
        return dict, (self.copy(),)

    def __repr__(self) -> str:
        self._fill()
        return super().__repr__()


def join_metrics(parts: Iterable[Metrics]) -> dict[str, float]:
    """The metrics of a whole batch from those of its parts, which have one spec.

    Metrics of corrections written in Python are averaged: only their names are known here.
    """
    if not isinstance(parts, Iterable):
        raise TypeError(f"parts must be a list of metrics, got {type(parts).__name__}")
    parts = list(parts)
    if not parts:
        raise ValueError("join_metrics: there are no parts")
    for k, part in enumerate(parts):
        if not isinstance(part, Metrics):
            raise TypeError(f"parts[{k}] must be what policy_loss or policy_head return, "
                            f"got {type(part).__name__}")
        if part._spec != parts[0]._spec:
            raise ValueError(f"parts[{k}] are metrics of {part._spec}, parts[0] of {parts[0]._spec}")
    rows = [row for part in parts for row in part._rows]
    first = parts[0]
    joined = Metrics(first._spec, rows[0], first._missing)
    joined._rows = rows
    numbers = joined.copy()
    for name in first._own:
        numbers[name] = sum(float(part._own[name]) for part in parts) / len(parts)
    return numbers
