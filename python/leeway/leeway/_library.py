"""Finds libleeway_ops.so, refuses it for another PyTorch than it was built for, and loads it."""
from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import torch

_MARK = re.compile(rb"leeway_ops built for torch (\S+) (\S+)\n")
_NAME = "libleeway_ops.so"


def _candidates() -> list[Path]:
    named = os.environ.get("LEEWAY_OPS")
    if named:
        return [Path(named)]
    here = Path(__file__).absolute().parent
    # Beside the package, as installed; or in the build folder that has this package in python/.
    return [here / _NAME, here.parent.parent / _NAME]


def find_library() -> Path:
    """The library that `import leeway` loads."""
    tried = _candidates()
    for path in tried:
        if path.is_file():
            return path
    raise ImportError(
        f"leeway: there is no {_NAME} at {' or '.join(str(path) for path in tried)}; install the "
        "package with `pip install ./python/leeway --no-build-isolation`, or name a library that "
        "`make build` made: LEEWAY_OPS=build/libleeway_ops.so")


def built_for(path: Path) -> tuple[str, str]:
    """The version of PyTorch that a library works with, and "cpu" or "cuda"."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = _MARK.search(data)
        if found is None:
            raise ImportError(f"leeway: {path} is not a {_NAME} of this version; build it again")
        return found.group(1).decode(), found.group(2).decode()


def check_library(path: Path, torch_version: str, torch_cuda: str | None) -> None:
    """Raises ImportError if the library does not work with this PyTorch."""
    version, devices = built_for(path)
    here = torch_version.split("+")[0]
    if version.split("+")[0] != here:
        raise ImportError(
            f"leeway: {path} was built for torch {version}, this is torch {torch_version}: install "
            "the package again (pip install ./python/leeway --no-build-isolation), or that torch")
    if devices == "cuda" and torch_cuda is None:
        raise ImportError(
            f"leeway: {path} was built for torch {version} with CUDA, this is torch {torch_version} "
            "without: install the package again")


def load() -> None:
    """Loads the operators once; afterwards they are torch.ops.leeway."""
    path = find_library()
    check_library(path, torch.__version__, torch.version.cuda)
    torch.ops.load_library(str(path))


load()
ops = torch.ops.leeway
