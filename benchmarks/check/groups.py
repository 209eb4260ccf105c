"""The groups of checks, in the order in which they run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.check.line import Check, Line, judged
from mimose.bench.device import segments_environment
from mimose.exceptions import first_line


@dataclass(frozen=True, slots=True)
class Group:
    """Checks that share a process."""

    name: str
    module: str
    """Beside this one."""
    limit_seconds: float = 60.0
    """The process is ended then."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the process's."""


_REPEATING = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

GROUPS = {
    group.name: group
    for group in (
        Group("versions", "versions"),
        Group("calls", "calls", environment=segments_environment(False)),
        Group("mapping", "calls", environment=segments_environment(True)),
        Group("meter", "meter"),
        Group("readings", "readings"),
        Group("waits", "waits"),
        Group("random", "random_numbers"),
        Group("requested", "requested"),
        Group("segments", "segments", environment=segments_environment(False)),
        Group("expandable", "segments", environment=segments_environment(True)),
        Group("workspaces", "workspaces"),
        Group("exactness", "exactness", 90.0, _REPEATING),
        Group("budget", "budget", 120.0),
        Group("prediction", "prediction", 120.0),
        Group("memory", "out_of_memory", 90.0, _REPEATING),
        Group("padding", "padding"),
        Group("overhead", "overhead"),
    )
}
"""By name."""


def run_group(group: Group, device: torch.device) -> Iterator[Line]:
    """Run a group's checks; one that fails is a line."""
    module = importlib.import_module(f"{__package__}.{group.module}")
    checks: tuple[Check, ...] = module.CHECKS
    for check in checks:
        try:
            yield from check(device)
        except Exception as error:  # whatever it is, the other checks go on
            name = check.__name__.replace("_", " ")
            seen = f"{type(error).__name__}: {first_line(error)}"
            yield judged(name, "runs to its end", seen, holds=False)
