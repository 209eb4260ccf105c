"""The settings of `mimose advise`."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from mimose.bench.advise.methods import DTYPES, METHODS, OPTIMIZERS
from mimose.bench.device import need_device
from mimose.bench.usage import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The settings of one run.

    Raises:
        UsageError: A name is unknown, torch has no such device, or the minutes are not
            above 0.
    """

    source: str
    """``module:function``, or a file of `mimose.bench.advise.source.saved`."""
    model: str
    """The model's name in messages."""
    budget: float | str
    """The budget, as for `mimose.attach`."""
    methods: tuple[str, ...] = tuple(METHODS)
    """The methods. Plain training is always measured, and first."""
    device: str = "cpu"
    dtype: str = "float32"
    optimizer: str = "adamw"
    threads: int = 2
    seed: int = 0
    minutes: float = 5.0
    """The longest time to measure."""

    def __post_init__(self) -> None:
        """Check the names and numbers."""
        _need_known("method", self.methods, list(METHODS))
        _need_known("optimizer", (self.optimizer,), list(OPTIMIZERS))
        _need_known("dtype", (self.dtype,), DTYPES)
        if not self.minutes > 0.0:
            msg = f"minutes must be above 0, got {self.minutes!r}"
            raise UsageError(msg)
        need_device(self.device)


def _need_known(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in set(given) - set(known):
        choices = ", ".join(difflib.get_close_matches(name, known) or known)
        msg = f"no {what} is called {name}; did you mean {choices}?"
        raise UsageError(msg)
