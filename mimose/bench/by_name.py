"""A user's function, by its name on a command line."""

from __future__ import annotations

import importlib
import sys
import traceback
from pathlib import Path
from typing import Any


def called_by_name(path: str) -> Any:
    """Return what a function returns that takes nothing.

    Args:
        path: ``module:function``, as ``--model`` has it; the module is looked for from
            the current folder on.

    Raises:
        ValueError: There is no such function, or it failed: the message says where.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        msg = f"--model {path}: give it as module:function"
        raise ValueError(msg)
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` has it
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module_name), name)()
    except Exception as error:  # the user's code, whatever it does
        place = traceback.extract_tb(error.__traceback__)[-1]
        msg = f"--model {path}: {type(error).__name__}: {error}"
        if Path(place.filename).exists() and place.filename != __file__:
            msg += f" ({Path(place.filename).name}, line {place.lineno})"
        raise ValueError(msg) from error
