"""Loads the model and its sample from a function by name, or from a saved file."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mimose.bench.usage import UsageError
from mimose.bench.zoo import called_by_name

_SUFFIX = ".advise.pt"


def make(source: str) -> tuple[nn.Module, Any]:
    """Return a new model in training mode and a batch for it, both on the CPU.

    Args:
        source: ``module:function``, of a function that takes no arguments and returns
            ``(model, sample)``; or the path that `saved` yielded.

    Raises:
        UsageError: There is no such function, it failed, or returned something else.
    """
    if source.endswith(_SUFFIX):
        made = torch.load(source, map_location="cpu", weights_only=False)
        return made["model"], made["sample"]
    try:
        made = called_by_name(source)
    except ValueError as error:
        raise UsageError(str(error)) from error
    is_pair = isinstance(made, tuple) and len(made) == 2
    if not is_pair or not isinstance(made[0], nn.Module):
        found = type(made[0] if is_pair else made).__name__
        msg = (
            f"--model {source}: the function must return (model, sample), a "
            f"torch.nn.Module and one batch as the model takes it; it returned {found}"
        )
        raise UsageError(msg)
    model, sample = made
    return model, sample


@contextmanager
def saved(model: nn.Module, sample: Any) -> Iterator[str]:
    """Write a model and its sample for other processes; delete them at the end.

    Raises:
        UsageError: The model cannot be saved, or its class is in the main script, which
            other processes cannot import.
    """
    instead = "give 'module:function' of a function that returns (model, sample)"
    here = [each for each in model.modules() if type(each).__module__ == "__main__"]
    if here:
        msg = (
            f"{type(here[0]).__name__} is defined in the script itself, where the "
            f"measuring processes cannot import it: move it to a separate module, or "
            f"{instead}"
        )
        raise UsageError(msg)
    with tempfile.TemporaryDirectory(prefix="mimose-advise-") as folder:
        path = str(Path(folder) / f"model{_SUFFIX}")
        try:
            torch.save({"model": model, "sample": sample}, path)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            msg = (
                f"{type(model).__name__} cannot be saved for the measuring processes "
                f"({error}): {instead}"
            )
            raise UsageError(msg) from error
        yield path
