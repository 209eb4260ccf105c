"""Does this device do what the library relies on, and does the library keep its word?

A first look at a device: one table, of what was expected, what was seen, and a verdict.
Each group of lines runs in a process of its own with a time limit, and each line is
appended to the CSV file as it comes: nothing that fails, hangs or crashes takes another
line with it.

    python -m benchmarks.proofs check --device cuda --out runs/check
    python -m benchmarks.proofs check --device sim --groups meter waits
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.check.groups import GROUPS, Group, run_group
from benchmarks.check.line import MISSED, Line, impossible, judged
from benchmarks.proofs.common import Answer, Bar, Settings, progress
from mimose.bench.child import RunFailedError, run_child
from mimose.bench.rows import Row, RowsFile
from mimose.exceptions import first_line
from mimose.usage import positive

QUESTION = "Does this device do what the library relies on?"
OPTIONS = (
    ("--device", {"default": "cuda", "help": "cuda, or sim to try it"}),
    ("--limit-seconds", {"type": positive, "default": 540.0, "help": "in all"}),
    ("--groups", {"nargs": "+", "choices": GROUPS, "default": list(GROUPS)}),
)

_LEAST_SECONDS = 5.0
"""With less than this left no group is begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRow(Row):
    """One line."""

    group: str
    what: str
    expected: str
    seen: str
    verdict: str
    seconds: float
    """From the begin of its group, process included."""

    def __str__(self) -> str:
        """Write it for who waits."""
        expected = f" (expected {self.expected})" if self.expected else ""
        return f"{self.what}: {self.seen}{expected}: {self.verdict}"


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Run every group, and append each line to the file as it comes."""
    ends = time.monotonic() + options.limit_seconds
    file = RowsFile(settings.out / "check.csv", CheckRow)
    rows = []
    with contextlib.closing(file):
        for name in options.groups:
            for row in _rows(settings, GROUPS[name], ends):
                rows.append(row)
                file.append([row])
                progress(str(row))
    table, bars = _table(rows), _bars(rows)
    return Answer(rows=[*rows], table=table, bars=bars, is_text=True)


def _rows(settings: Settings, group: Group, ends: float) -> Iterator[CheckRow]:
    began = time.monotonic()
    for line in _lines(settings, group, ends - began):
        yield CheckRow(
            group=group.name,
            **asdict(line),
            seconds=round(time.monotonic() - began, 1),
            **settings.provenance(),
        )


def _lines(settings: Settings, group: Group, left_seconds: float) -> Iterator[Line]:
    """Run a group in a process; how it ended is a line where it did not end well."""
    if left_seconds < _LEAST_SECONDS:
        yield impossible(f"all of {group.name}", "no time was left for it")
        return
    limit_seconds = min(group.limit_seconds, left_seconds)
    task = {"group": group.name, "device": settings.device}
    options = {"environment": group.environment, "limit_seconds": limit_seconds}
    try:
        for said in run_child(__name__, task, settings.threads, **options):
            yield Line(**said)
    except RunFailedError as error:
        yield judged(f"all of {group.name}", "ends", first_line(error), holds=False)


def _table(rows: Sequence[CheckRow]) -> list[Mapping[str, object]]:
    names = ("group", "what", "expected", "seen", "verdict")
    return [{name: getattr(row, name) for name in names} for row in rows]


def _bars(rows: Sequence[CheckRow]) -> list[Bar]:
    missed = sum(row.verdict == MISSED for row in rows)
    return [Bar(f"lines missed of {len(rows)}", missed, at_most=0)]


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Run one group."""
    device = torch.empty(0, device=task["device"]).device  # its index is told
    for line in run_group(GROUPS[task["group"]], device):
        yield asdict(line)
