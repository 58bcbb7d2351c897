"""scikit-build-core, with the C++ sources of the repository in the sdist (as native/)."""
import shutil
from pathlib import Path

from scikit_build_core.build import *  # noqa: F401,F403
from scikit_build_core.build import build_sdist as _build_sdist

_NEEDED = ["CMakeLists.txt", "LICENSE", "cmake", "include", "src/base", "src/core", "src/cuda",
           "src/data", "src/kernels", "src/torch"]


def build_sdist(sdist_directory, config_settings=None):
    here = Path.cwd()
    root, native = here.parents[1], here / "native"
    if native.exists():  # a sdist itself
        return _build_sdist(sdist_directory, config_settings)
    missing = [name for name in _NEEDED if not (root / name).exists()]
    if missing:
        raise SystemExit(
            f"leeway: {root} lacks {missing[0]}: this folder has no C++ sources of its own. Build the "
            "sdist where it lies in a checkout of Leeway (python/leeway)")
    try:
        for name in _NEEDED:
            source, target = root / name, native / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("*_test.cpp"))
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        return _build_sdist(sdist_directory, config_settings)
    finally:
        shutil.rmtree(native, ignore_errors=True)
