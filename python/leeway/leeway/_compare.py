"""What each preset does to a batch, side by side."""
from __future__ import annotations

import json
from typing import Any, Mapping, Optional, Sequence, Union

import torch

from ._batch import pack
from ._correction import apply_corrections, only_known
from ._library import ops
from ._spec import Spec, _message, as_spec

_STREAMS = ("pi", "prox", "rollout", "ref", "teacher")


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _packed(batch: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
    """The current log-probabilities and the rest of a batch, packed."""
    sequences = batch["sequences"]
    lengths = [len(sequence["pi"]) for sequence in sequences]

    def joined(name: str, default: float) -> Optional[torch.Tensor]:
        if not any(name in sequence for sequence in sequences):
            return None
        values: list[float] = []
        for sequence, length in zip(sequences, lengths):
            part = sequence.get(name, default)
            part = part if isinstance(part, list) else [part] * length
            values.extend(float("nan") if x is None else float(x) for x in part)
        return torch.tensor(values, dtype=torch.float32)

    offsets = torch.tensor([0, *lengths]).cumsum(0)
    pi = joined("pi", 0.0)
    mask = joined("mask", 1.0)
    rest = pack(pi.shape, pi, "pi", rollout=joined("rollout", 0.0), advantages=joined("advantages", 0.0),
                mask=None if mask is None else mask != 0, prox=joined("prox", 0.0),
                ref=joined("ref", 0.0), teacher=joined("teacher", 0.0), cu_seqlens=offsets,
                weights=joined("weights", 1.0), rollout_ids=None, versions=None)
    return pi, rest


def compare(batch: Mapping[str, Any], presets: Optional[Sequence[Union[str, Spec]]] = None, *,
            target_masked: Optional[float] = None) -> dict[str, Any]:
    """What presets would do to a batch, as `leeway loss compare --json` prints it.

    `batch` is {"sequences": [{"pi", "rollout", "advantages", "mask"?, "prox"?, ..}, ..]}: lists or
    tensors of log-probabilities of the taken tokens, one sequence each. Without `presets` every native
    one is shown. With `target_masked` (0.005) the thresholds that mask this share are found, too.
    """
    if not isinstance(batch, Mapping) or "sequences" not in batch:
        raise ValueError('compare: a batch is {"sequences": [{"pi", "rollout", "advantages"}, ..]}')
    if isinstance(presets, (str, Spec)) or not isinstance(presets, (Sequence, type(None))):
        raise TypeError(f"presets must be a list of names and leeway.Specs, got "
                        f"{type(presets).__name__}")
    if target_masked is not None:
        if isinstance(target_masked, bool) or not isinstance(target_masked, (int, float)):
            raise TypeError(f"target_masked must be a number, got {type(target_masked).__name__}")
        if not 0.0 <= target_masked < 1.0:
            raise ValueError(f"target_masked = {target_masked}: must be a share, below 1")
    plain = _plain(batch)
    try:
        text = json.dumps(plain)
    except (TypeError, ValueError) as error:
        raise TypeError(f"batch: must hold lists, tensors and numbers: {error}") from None
    specs = [as_spec(preset, {}) for preset in presets or ()]
    built_in = [spec for spec in specs if not spec.described.callers]

    def ask(wanted: Sequence[Spec], **more: Any) -> dict[str, Any]:
        request = {"requests": [{"preset": spec.preset, "settings": spec.keys} for spec in wanted],
                   "target_masked": target_masked, **more}
        try:
            return json.loads(ops._compare(text, json.dumps(request)))
        except (RuntimeError, ValueError) as error:
            raise ValueError(_message(error)) from None

    if len(built_in) == len(specs):
        return ask(specs)
    rows: dict[Spec, Any] = {}
    answer: dict[str, Any] = {}
    if built_in:
        answer = ask(built_in)
        rows.update(zip(built_in, answer["presets"]))
    else:
        ask([Spec("reinforce")])  # refuses a batch that is none
    pi, rest = _packed(plain)
    for spec in specs:
        if not spec.described.callers:
            continue
        for stream in spec.reads:
            if stream != "pi" and getattr(rest, stream) is None:
                raise ValueError(f"preset {spec.preset} reads the stream \"{stream}\", which the batch "
                                 "does not have")
        weights, mask, _ = apply_corrections(spec, pi, rest)
        # The operator gives the weights, which are those of all of them, to the first that it knows.
        with only_known(spec.described.callers):
            answer = ask([spec], weights=_plain(weights), mask=None if mask is None else
                         [int(keep) for keep in mask.tolist()])
        rows[spec] = answer["presets"][0]
    answer["presets"] = [rows[spec] for spec in specs]
    return answer
