"""The first minutes on a card: checks line by line what the library relies on.

`device` checks the device and its libraries, `library` what mimose does on it. Each of
their functions is a group that yields `Line`s. Groups run in separate processes
(`benchmarks.proofs.check` starts them), need only what mimose needs, and also run on
the simulated accelerator.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from mimose.bench.device import segments_environment
from mimose.exceptions import first_line

HOLDS, MISSED, INFORMATION = "holds", "MISSED", "information"
_REPEATING = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One observation."""

    what: str
    expected: str
    seen: str
    verdict: str
    """`HOLDS`, `MISSED`, `INFORMATION`, or ``not possible here: `` and why."""


def judged(what: str, expected: object, seen: object, holds: bool) -> Line:
    """Return a line with a verdict."""
    verdict = HOLDS if holds else MISSED
    return Line(what=what, expected=str(expected), seen=str(seen), verdict=verdict)


def equal(what: str, expected: object, seen: object) -> Line:
    """Return a line that holds where both are equal."""
    return judged(what, expected, seen, expected == seen)


def told(what: str, seen: object, expected: str = "") -> Line:
    """Return a line without a verdict."""
    return Line(what=what, expected=expected, seen=str(seen), verdict=INFORMATION)


def impossible(what: str, why: str, seen: object = "") -> Line:
    """Return a line for what cannot be looked at here."""
    verdict = f"not possible here: {why}"
    return Line(what=what, expected="", seen=str(seen), verdict=verdict)


@dataclass(frozen=True, slots=True)
class Group:
    """Lines that share a process."""

    module: str
    """In this package."""
    function: str
    limit_seconds: float = 60.0
    """The process is ended then."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the process's."""


GROUPS = {
    "versions": Group("device", "versions"),
    "calls": Group("device", "calls", environment=segments_environment(False)),
    "mapping": Group("device", "calls", environment=segments_environment(True)),
    "waits": Group("device", "waits"),
    "exactness": Group("library", "exactness", 90.0, _REPEATING),
    "memory": Group("library", "out_of_memory", 90.0, _REPEATING),
}
"""By name, in the order in which they run."""


def run_group(name: str, device: torch.device) -> Iterator[Line]:
    """Yield a group's lines; an error is its last."""
    group = GROUPS[name]
    module = importlib.import_module(f"{__name__}.{group.module}")
    look: Callable[[torch.device], Iterator[Line]] = getattr(module, group.function)
    try:
        yield from look(device)
    except Exception as error:  # whatever it is, it is what this device does
        seen = f"{type(error).__name__}: {first_line(error)}"
        yield judged(f"all of {name}", "runs to its end", seen, holds=False)
