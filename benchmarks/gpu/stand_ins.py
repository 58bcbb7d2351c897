"""Modules that TRL imports and a step of its trainer hardly uses, for a machine without them.

TRL imports `datasets` and `pyarrow` (150 MB) for rows of prompts and for type checks, and `pandas` for
tables of completions that it logs. Where they are not installed, importing this module puts small ones in
their place: enough to make a trainer and to call its compute_loss, not to train. `used` names them.
"""

import importlib.machinery
import importlib.util
import sys
import types

used = []


class Dataset:
    """Rows in memory."""

    def __init__(self, columns):
        self.columns, self.cache_files = columns, []

    @classmethod
    def from_dict(cls, columns):
        return cls(columns)

    @property
    def column_names(self):
        return list(self.columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, i):
        return {name: values[i] for name, values in self.columns.items()}


def _put(name, **members):
    try:
        if importlib.util.find_spec(name) is not None:
            return
    except ValueError:  # loaded without a spec: there already
        return
    except ModuleNotFoundError:  # a part of a module that is a stand-in
        pass
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__version__ = "0"
    for member, value in members.items():
        setattr(module, member, value)
    sys.modules[name] = module
    used.append(name)


_put("datasets", Dataset=Dataset, **{name: type(name, (), {}) for name in
                                     ("IterableDataset", "DatasetDict", "IterableDatasetDict")})
_put("pandas", DataFrame=type("DataFrame", (), {}))
_put("pyarrow", **{name: type(name, (), {}) for name in ("Array", "ChunkedArray", "Table")})
if "pyarrow" in used:
    for part in ("compute", "types"):
        _put(f"pyarrow.{part}")
        setattr(sys.modules["pyarrow"], part, sys.modules[f"pyarrow.{part}"])
