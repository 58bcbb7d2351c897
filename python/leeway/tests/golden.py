"""The golden file of tests/data: its fixture as tensors, and its cases."""
import json
import os
from pathlib import Path

import torch

PATH = Path(os.environ.get("LEEWAY_GOLDENS",
                           Path(__file__).resolve().parents[3] / "tests/data/losses_golden.json"))
DATA = json.loads(PATH.read_text())
FIXTURE = DATA["fixture"]
LENGTHS = FIXTURE["lens"]
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
CASES = {case["name"]: case for case in DATA["cases"]}


def flat(name):
    if name == "adv_seq":
        return torch.cat([torch.full((length,), float(value))
                          for length, value in zip(LENGTHS, FIXTURE["adv_seq"])])
    return torch.tensor([x for row in FIXTURE[name] for x in row], dtype=torch.float32)


def mask():
    return torch.tensor([x for row in FIXTURE["masks"] for x in row]) != 0


def streams():
    """pi with gradient, and the rest by its argument's name."""
    pi = flat("pi").requires_grad_()
    return pi, {name: flat(name) for name in ("rollout", "prox", "ref", "teacher")}


def advantages(case):
    name = case.get("config", {}).get("adv", "")
    token = name.startswith("adv_tok") or case["name"].endswith("/tokA")
    return flat("adv_tok" if token else "adv_seq")


def padded(values, fill=0.0):
    """[S, longest] of a flat stream."""
    rows = torch.split(values, LENGTHS)
    out = torch.full((len(rows), max(LENGTHS)), fill, dtype=values.dtype)
    for k, row in enumerate(rows):
        out[k, :len(row)] = row
    return out


def gradient(case):
    return torch.tensor([x for row in case["grad"] for x in row])


def check(loss, grad, case, factor=1.0):
    """Loss and gradient within float32's rounding of the fixture: 2e-5 of the largest number."""
    expected = gradient(case)
    assert abs(loss.item() * factor - case["loss"]) <= 2e-5 * max(1.0, abs(case["loss"])), case["name"]
    worst = (grad * factor - expected).abs().max().item()
    assert worst <= 2e-5 * max(1.0, expected.abs().max().item()), f"{case['name']}: {worst}"
